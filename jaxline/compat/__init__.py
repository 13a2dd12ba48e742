"""Adapters and helpers for programs that were written for JAXline."""
