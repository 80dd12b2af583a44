"""Client requests: their types and checks."""
