"""Stalled connections, whose clients do not read: found by a periodic look at all, at no cost per write.

A stream that is being written has a deadline of its own. What is left are answers that were handed over whole, and
connections that are closed as soon as the client has taken the rest: it may never.

What waits here alone tells little: the kernel takes more only when a good part of what it holds has left.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TypeAlias

#: Looks per deadline.
_LOOKS = 4
#: Where Linux tells how many bytes a peer has acknowledged, and how much of that structure must be asked for.
_ACKED, _INFO_SIZE = slice(120, 128), 128

#: What changes when something leaves: the bytes that wait here, and those that the peer has acknowledged.
_State: TypeAlias = tuple[int, bytes]
_NOTHING: _State = (0, b"")


class Stalls:
    """Cuts connections of which nothing leaves for `deadline` seconds although something waits."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        #: Per connection: how it was at the last look, and how many looks in a row have found it so.
        self._seen: dict[asyncio.Transport, tuple[_State, int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: Connections that were cut.
        self.cut = 0

    def watch(self, transport: asyncio.Transport) -> None:
        """Keep an eye on a connection until it is closed."""
        self._seen[transport] = (_NOTHING, 0)
        if self._timer is None:
            self._arm()

    def close(self) -> None:
        """Cut whatever still has something to send, and look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for transport in self._seen:
            if _waiting(transport):
                transport.abort()
        self._seen.clear()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.deadline / _LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        seen, self._seen = self._seen, {}
        for transport, (before, times) in seen.items():
            waiting = _waiting(transport)
            if not waiting:
                if not transport.is_closing():
                    self._seen[transport] = (_NOTHING, 0)
                continue
            now = (waiting, _acknowledged(transport))
            times = times + 1 if now == before else 0
            if times >= _LOOKS:
                self.cut += 1
                transport.abort()
            else:
                self._seen[transport] = (now, times)
        if self._seen:
            self._arm()


def _waiting(transport: asyncio.Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        # A TLS transport that is closed has let go of what knows. It has a deadline of its own for closing.
        return 0


def _acknowledged(transport: asyncio.Transport) -> bytes:
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "TCP_INFO"):
        return b""
    try:
        info: bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
    except OSError:
        # Closed, or no TCP: what waits here must do.
        return b""
    return info[_ACKED]
