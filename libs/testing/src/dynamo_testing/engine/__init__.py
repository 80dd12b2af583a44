"""The checks of an engine, and what runs them. Nothing here needs pytest."""
