"""What the kit for frontends is made of."""
