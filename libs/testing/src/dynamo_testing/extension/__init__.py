"""What the kit for extensions is made of."""
