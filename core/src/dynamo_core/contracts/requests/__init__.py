"""One client request: its life and identity, the view of its route, and the events that it causes."""
