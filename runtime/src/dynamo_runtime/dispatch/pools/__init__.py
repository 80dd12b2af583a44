"""The workers of one model, by role, and what decides among them."""
