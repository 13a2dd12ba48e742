"""Where training and evaluation batches come from, one module per source."""
