"""What the kits for parsers are made of."""
