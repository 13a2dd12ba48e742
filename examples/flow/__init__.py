"""Flow matching on digits."""
