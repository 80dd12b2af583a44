"""Prompts: from a checked request to the engine's input."""
