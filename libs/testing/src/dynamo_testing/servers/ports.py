"""Free loopback ports for servers that tests start."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from functools import cache
from pathlib import Path
from random import SystemRandom

#: Ports that systems give to no outgoing connection, so that no process takes one before it is listened to, or after a
#: server was killed that is to come back. Port 0 would give just those.
_PORTS = range(20_000, 32_000)
#: Of its own: the seed of the common one is the same in several processes of tests.
_random = SystemRandom()
_claimed: set[int] = set()


def free_port(row: int = 1) -> int:
    """Return a port on 127.0.0.1 to which a server can be bound, or the first of so many in a row.

    No other call gets it, in this process or another one of the user, as long as this process lives.
    """
    while True:
        first = _random.choice(_PORTS[:-row])
        if all(_claim(port) and _free(port) for port in range(first, first + row)):
            return first


def _claim(port: int) -> bool:
    """Lock the byte of the port in the file that all processes of tests share. The system unlocks it when they end."""
    if port in _claimed:
        return False
    try:
        fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _claimed.add(port)
    return True


@cache
def _claims() -> int:
    return os.open(Path(tempfile.gettempdir(), f"dynamo-testing-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600)


def _free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
