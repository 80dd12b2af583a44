"""Dispatch: from a client's request to a worker, and the stream back."""
