"""Compiles a run's programs ahead of time, and reports what they need."""
