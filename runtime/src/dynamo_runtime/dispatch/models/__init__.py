"""The served models and their files."""
