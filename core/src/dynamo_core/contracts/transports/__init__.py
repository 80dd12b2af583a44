"""Calls and events between processes: the contract of transports, and both ends of a call."""
