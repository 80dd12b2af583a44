"""Routes that ask a model, for every API."""
