"""Replica synchronization: the messages between slot trackers, their sockets, and the repair of gaps."""
