"""From settings to running processes."""
