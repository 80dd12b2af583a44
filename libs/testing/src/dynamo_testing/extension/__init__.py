"""The parts of the kit for extensions."""
