"""One client request: admitted, routed, accepted, streamed, recovered, ended."""
