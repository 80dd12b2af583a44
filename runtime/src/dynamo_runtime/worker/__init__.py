"""The worker: an engine registered in discovery, with a capacity limit and validated streams."""
