"""Whole answers and streams: from the items of engines to what a client reads."""
