"""The proxy: a loopback listener that forwards every connection to one server."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_testing.faults.framing import Framing, LengthPrefixed
from dynamo_testing.faults.link import CHUNK, Link, Tap, reset
from dynamo_testing.faults.plan import FaultPlan

log = logging.getLogger(__name__)

#: Seconds that connecting to the server may take.
CONNECT_TIMEOUT = 5.0


class FaultProxy(AsyncResource):
    """A server on the loopback that carries frames to another one, faults of its `plan` included.

    If the server cannot be reached, a client is accepted and reset. Held per connection are at most one frame and
    what the sockets hold: the proxy reads no faster than the other end does.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        *,
        plan: FaultPlan | None = None,
        framing: Framing | None = None,
        tap: Tap | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`tap` is called with every frame before anything happens to it; port 0 is any free one."""
        #: Where new connections go. May be changed.
        self.target = target_host, target_port
        self.plan = plan if plan is not None else FaultPlan()
        self.host = host
        #: Where it listens; known after `start`.
        self.port = port
        #: Connections that were ever accepted.
        self.accepted = 0
        self._framing = framing if framing is not None else LengthPrefixed()
        self._tap = tap
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        self._server = await asyncio.start_server(self._accept, self.host, self.port, limit=CHUNK)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._tasks)

    def cut(self) -> None:
        """Reset every connection, as if a cable were pulled; new ones are carried."""
        for link in list(self._links):
            link.cut()

    async def aclose(self) -> None:
        """Stop listening and reset what is open. Safe twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self.cut()
        await self._tasks.aclose()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.accepted = self.accepted, self.accepted + 1
        task = self._tasks.spawn(self._carry(number, reader, writer), name=f"fault-proxy-{number}")
        # A task that is cancelled before it began closes nothing itself.
        task.add_done_callback(lambda _: reset(writer))

    async def _carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                server = await asyncio.open_connection(*self.target, limit=CHUNK)
        except OSError as error:
            log.debug("connection %d: the server at %s cannot be reached: %s", number, self.target, error)
            return
        link = Link(number, (reader, writer), server, self._framing, self.plan, self._tap)
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
