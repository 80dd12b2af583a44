"""Prompts: from a checked request to what an engine is given."""
