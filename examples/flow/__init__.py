"""Flow matching on digits: the velocity network, its data and samples."""
