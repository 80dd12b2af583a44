"""The checks of an engine and their runner. Nothing here needs pytest."""
