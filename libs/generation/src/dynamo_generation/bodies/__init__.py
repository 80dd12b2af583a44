"""From the bytes of a request to an object within bounds."""
