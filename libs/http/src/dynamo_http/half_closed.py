"""Half-closed connections: tell clients that still read from clients that are gone.

A client that closes its socket and one that shuts down its sending half send the same FIN. They differ in how their
kernel takes the next bytes: that of a client which is gone answers with a reset. Bytes that any client reads as a part
of its answer therefore find out.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any

#: Whether the kernel tells what has become of a connection that is not read any more.
SUPPORTED = hasattr(socket, "TCP_INFO")
#: Every status line begins with these bytes, whatever the status and the version. Each is one probe.
STATUS_LINE = b"HTTP/1."
#: How much longer each pause between two such probes is, since there are few: they last for eight minutes.
_LATER = 3.0
_FIRST_PAUSE = 2.0
#: The state of a connection in TCP_INFO, and that of one which was reset.
_STATE, _CLOSED = 0, 7


def was_reset(transport: Any) -> bool:
    """Return whether the peer's kernel has reset the connection."""
    try:
        info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except (AttributeError, OSError):
        # The socket is closed already, or is none of TCP.
        return True
    return bool(info[_STATE] == _CLOSED)


class EarlyStatusLine:
    """Stands for the transport of a connection until its answer begins, and sends first bytes of it ahead.

    `begun` is called when the rest of the status line follows.
    """

    def __init__(self, transport: Any, begun: Callable[[], None], now: float) -> None:
        self._transport = transport
        self._begun = begun
        self._since = now
        self._due = now
        self._sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def probe(self, now: float) -> None:
        """Send one byte more, if it is time."""
        if now >= self._due and self._sent < len(STATUS_LINE):
            self._transport.write(STATUS_LINE[self._sent : self._sent + 1])
            self._sent += 1
            self._due = now + max(_FIRST_PAUSE, (_LATER - 1) * (now - self._since))

    def write(self, data: Any) -> None:
        """Write the answer without the bytes that were sent ahead."""
        sent, self._sent = self._sent, 0
        self._begun()
        self._transport.write(data[sent:])

    def writelines(self, chunks: Iterable[Any]) -> None:
        """Write the answer, which is in pieces."""
        self.write(b"".join(chunks))
