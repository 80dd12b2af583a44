"""The models that are served now, and the files that they need."""
