"""Programs compiled ahead of time: what they will need, before they run."""
