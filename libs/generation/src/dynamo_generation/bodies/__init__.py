"""Request bodies: from bytes to an object within bounds."""
