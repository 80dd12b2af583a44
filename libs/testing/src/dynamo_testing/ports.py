"""Ports of the loopback for servers that tests start."""

from __future__ import annotations

import socket
from random import SystemRandom

#: Ports that systems give to no outgoing connection, so that no process takes one before it is listened to, or after a
#: server was killed that is to come back. Port 0 would give just those.
_PORTS = range(20_000, 32_000)
#: Of its own: the seed of the common one is the same in several processes of tests.
_random = SystemRandom()


def free_port(row: int = 1) -> int:
    """A port on 127.0.0.1 to which a server can be bound, or the first of so many in a row."""
    while True:
        first = _random.choice(_PORTS[:-row])
        if all(_free(port) for port in range(first, first + row)):
            return first


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
