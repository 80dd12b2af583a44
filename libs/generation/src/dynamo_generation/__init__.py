"""What every API shares: from a parsed request to the events of an answer, which each API writes in its own shape."""
