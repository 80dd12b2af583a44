"""Reading from a ZMQ socket in the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

log = logging.getLogger(__name__)

#: Messages that are read in one turn of the event loop.
BATCH = 256


class SocketReader:
    """A reader that hands over the messages of a socket, from `start` on."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        descriptor = socket.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)  # noqa: S101 - the library's type is that of all options
        self._descriptor = descriptor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due = False

    def start(self) -> None:
        """Begin to read."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self.schedule()

    def schedule(self) -> None:
        """Read in the next turn of the loop.

        The descriptor reports changes only, and any other call of the socket may consume the report: schedule after it.
        """
        if self._loop is not None and not self._due:
            self._due = True
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Read no more. Safe twice."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.remove_reader(self._descriptor)

    def _read(self) -> None:
        self._due = False
        if self._loop is None:
            return
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                log.warning("reading from replicas failed: %s", error)
                return
            self._take(frames)
        # The rest waits for its turn, so that HTTP gets its own.
        self.schedule()
