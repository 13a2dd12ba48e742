"""Ends a run early: on a signal, a hang, or a loss that is not finite."""
