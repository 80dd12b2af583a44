"""The parts of the kits for parsers."""
