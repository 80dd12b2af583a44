"""The thread of a worker's process that answers probes, over a connection with the broker of its own.

It needs neither the event loop that carries calls nor an engine, so that callers can tell a worker whose event loop is
blocked from one that is dead.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from dynamo_core import DynamoError, LoopThread, TaskSet, jitter

from dynamo_wire.blocked_loop_probe import LoopWatch
from dynamo_wire.brokered.addresses import Addresses, is_link
from dynamo_wire.brokered.broker import Broker
from dynamo_wire.brokered.wire_format import answer_fragment

log = logging.getLogger(__name__)

#: Seconds that closing the connection, and ending the thread, may take.
STOP_TIMEOUT = 5.0

#: Seconds before connecting is tried again after it was given up, varied by half.
RETRY = 2.0

#: Callers that may wait for their answers.
MOST = 1024


class Responder:
    """Made in the event loop that is watched. `broker` is its own, and used in the thread only."""

    def __init__(self, broker: Broker, addresses: Addresses) -> None:
        self._broker = broker
        self._addresses = addresses
        self._watch = LoopWatch()
        self._thread = LoopThread("probe-answers", self._end)
        self._tasks = TaskSet()
        self._connecting = False
        self._known: set[str] = set()
        self._answering: set[str] = set()

    async def answer_for(self, worker: str) -> None:
        """Answer probes of the worker at an address, as soon as there is a connection. Safe twice."""
        if worker not in self._known:
            self._known.add(worker)
            await self._thread.run(self._begin(self._addresses.probes(worker)))

    async def aclose(self) -> None:
        """Close the connection, and end the thread."""
        with suppress(TimeoutError, ValueError):
            async with asyncio.timeout(STOP_TIMEOUT):
                await self._thread.run(self._close())
        await asyncio.to_thread(self._thread.stop, STOP_TIMEOUT)

    # In the thread.

    async def _begin(self, address: str) -> None:
        self._tasks.spawn(self._listen(address), name=f"listen-{address}")

    async def _listen(self, address: str) -> None:
        await self._broker.listen(address, self, linked=True)
        if not self._connecting:
            self._connecting = True
            await self._connect()

    async def _connect(self) -> None:
        while True:
            try:
                await self._broker.start()
            except DynamoError as error:
                log.warning("probes cannot be answered: %s", error)
                await asyncio.sleep(jitter(RETRY))
            else:
                return

    async def _close(self) -> None:
        await self._tasks.aclose()
        await self._broker.aclose()

    async def _end(self) -> None:
        """End, once all is closed or could not be in time."""

    def receive(self, link: str, data: bytes, reply: str) -> None:
        """Receive a probe; see `Listener`."""
        if is_link(link) and link not in self._answering and len(self._answering) < MOST:
            self._answering.add(link)
            self._tasks.spawn(self._answer(link), name=f"answer-{link}")

    def absent(self, link: str) -> None:
        """Ignore it, since no message sent asks for life; see `Listener`."""

    async def _answer(self, link: str) -> None:
        try:
            busy = await self._watch.busy()
        except RuntimeError:
            # The event loop has been closed: no call could be served.
            return
        finally:
            self._answering.discard(link)
        self._broker.publish(self._addresses.caller(link), answer_fragment(busy), link=link)
