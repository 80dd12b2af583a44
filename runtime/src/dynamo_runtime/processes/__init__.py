"""Processes: who starts, watches, reloads and ends them."""
