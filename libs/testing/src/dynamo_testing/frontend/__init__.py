"""The parts of the kit for frontends."""
