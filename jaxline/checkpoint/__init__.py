"""Checkpointers: one protocol, several places to keep things."""
