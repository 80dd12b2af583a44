"""The thread that accepts connections: it answers probes itself, and hands all other connections to the event loop.

So a worker whose event loop is blocked by its engine can be told from one that is dead, at one and the same port.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from dynamo_core import LoopThread, TaskSet
from dynamo_core.errors import ConnectionTimeout, to_wire
from dynamo_wire import Bye, LoopWatch

from dynamo_plugin_transport_tcp.connection_limiter import ConnectionLimiter, PendingConnection
from dynamo_plugin_transport_tcp.messages import pack
from dynamo_plugin_transport_tcp.probes import PROBE_LENGTH, PROBE_START, ProbeKey

log = logging.getLogger(__name__)

#: Connections that may wait to be accepted.
ACCEPT_QUEUE = 512

#: Seconds before the next attempt when none can be accepted.
ACCEPT_PAUSE = 1.0

#: Connections that are accepted in a row, and seconds until the next may be: a flood of them takes a small share of the
#: processor time, and what waits meanwhile waits in the system.
BURST = 64
PACE = 0.002

#: Seconds that ending the thread may take.
STOP_TIMEOUT = 5.0


def listen(family: int, place: tuple[Any, ...]) -> socket.socket:
    """Return a socket that listens at an address as `socket.getaddrinfo` gives it.

    Raises:
        OSError: the address cannot be bound.
    """
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place)
        sock.listen(ACCEPT_QUEUE)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


class Acceptor:
    """The owner of a listening socket. Made in the event loop that gets the connections."""

    def __init__(
        self,
        sock: socket.socket,
        key: ProbeKey,
        *,
        limiter: ConnectionLimiter,
        timeout: float,
        farewell: bool,
        take: Callable[[socket.socket, PendingConnection], None],
    ) -> None:
        """`take` is given each connection that is no probe's, in the event loop, with its entry in `limiter`.

        `timeout` is the seconds in which the first bytes must come; with `farewell` a caller that is too late is told.
        """
        self._sock = sock
        self._key = key
        self._limiter = limiter
        self._timeout = timeout
        self._farewell = farewell
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._watch = LoopWatch()
        self._thread = LoopThread("tcp-accept", self._end)
        self._tasks = TaskSet()
        #: Connections on their way to the event loop. Both threads use it, with the lock held.
        self._handoff: dict[PendingConnection, socket.socket] = {}
        self._lock = threading.Lock()
        self._closed = False

    async def start(self) -> None:
        """Accept from now on."""
        await self._thread.run(self._start())

    async def aclose(self) -> None:
        """Accept no more, and close what was not handed over."""
        self._closed = True
        await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT)
        self._hand_over()

    def _hand_over(self) -> None:
        """Run in the event loop."""
        with self._lock:
            handoff, self._handoff = self._handoff, {}
        for pending, sock in handoff.items():
            if self._closed:
                self._limiter.remove(pending)
                sock.close()
            else:
                self._take(sock, pending)

    # In the thread.

    async def _start(self) -> None:
        self._tasks.spawn(self._accept(), name="tcp-accept")

    async def _end(self) -> None:
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        # The time up to which the connections so far are paid for.
        paid = 0.0
        while True:
            try:
                sock, place = await loop.sock_accept(self._sock)
            except ConnectionError:
                # It was gone before it was accepted.
                continue
            except OSError as error:
                # Most of all: the process has no descriptor left.
                log.error("no connection can be accepted: %s", error.strerror or error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            pending = PendingConnection(str(place[0]), sock.close)
            task = self._tasks.spawn(self._meet(sock, pending), name="tcp-meet")
            task.add_done_callback(partial(self._over, sock, pending))
            pending.close = task.cancel
            self._limiter.add(pending)
            now = loop.time()
            paid = max(paid, now - BURST * PACE) + PACE
            # The next may be there already, and then this would not wait.
            await asyncio.sleep(max(0.0, paid - now))

    def _over(self, sock: socket.socket, pending: PendingConnection, meeting: asyncio.Task[bool]) -> None:
        # A callback, not a `finally`: a task that is cancelled before its first step never enters its coroutine.
        if meeting.cancelled() or meeting.exception() is not None or not meeting.result():
            self._limiter.remove(pending)
            sock.close()

    async def _meet(self, sock: socket.socket, pending: PendingConnection) -> bool:
        """Return whether the connection was handed over."""
        try:
            async with asyncio.timeout(self._timeout):
                if await _begins_with_a_probe(sock):
                    await self._answer(sock, pending)
                    return False
                return self._pass_on(sock, pending)
        except TimeoutError:
            if self._farewell:
                late = ConnectionTimeout(f"the handshake took longer than {self._timeout} s")
                with suppress(OSError):
                    sock.send(pack(Bye(to_wire(late))))
        except OSError as error:
            log.debug("a connection broke before anything was said: %s", error)
        return False

    async def _answer(self, sock: socket.socket, pending: PendingConnection) -> None:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < PROBE_LENGTH:
            more = await loop.sock_recv(sock, PROBE_LENGTH - len(data))
            if not more:
                return
            data += more
        challenge = self._key.read_probe(data)
        if challenge is None:
            return
        self._limiter.verified(pending)
        try:
            busy = await self._watch.busy()
        except RuntimeError:
            # The event loop has been closed: no call could be served.
            return
        await loop.sock_sendall(sock, self._key.answer(challenge, busy))

    def _pass_on(self, sock: socket.socket, pending: PendingConnection) -> bool:
        """Leave the connection to the event loop; whether there is one."""
        pending.close = lambda: self._drop(pending)
        with self._lock:
            self._handoff[pending] = sock
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            with self._lock:
                self._handoff.pop(pending, None)
            return False
        return True

    def _drop(self, pending: PendingConnection) -> None:
        """Close a connection that still waits for the event loop."""
        with self._lock:
            sock = self._handoff.pop(pending, None)
        if sock is not None:
            sock.close()


async def _begins_with_a_probe(sock: socket.socket) -> bool:
    """Return whether what comes is a probe; return as soon as that is known, and take nothing of it.

    Raises:
        OSError: the connection is over.
    """
    while True:
        try:
            start = sock.recv(len(PROBE_START), socket.MSG_PEEK)
        except BlockingIOError:
            await _readable(sock)
            continue
        if not start:
            raise ConnectionResetError(errno.ECONNRESET, "closed by the other end")
        if start == PROBE_START or not PROBE_START.startswith(start):
            return start == PROBE_START
        # Wakes only when there is more. What has been peeked at would make the socket readable again and again.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(PROBE_START))
        await _readable(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return sock.recv(len(PROBE_START), socket.MSG_PEEK) == PROBE_START


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(sock, _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
