"""Processes: starting, watching, reloading and ending them."""
