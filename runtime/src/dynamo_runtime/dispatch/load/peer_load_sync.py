"""Load synchronization between frontends, so that the loads their routers see agree.

Each tells of its own requests only, which it knows exactly, and hears of the others'. So nothing is counted twice, and
no frontend guesses which part of a worker's load is its own. Between two messages the others' part is out of date by up
to `INTERVAL`; the own part never is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec
from dynamo_core.backoff import jitter
from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.protocol.decoding import read
from dynamo_core.protocol.events import PLACED_LOADS, PlacedLoads
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.load.load_subscription import RETRY, listen
from dynamo_runtime.dispatch.load.peer_loads import Rank
from dynamo_runtime.dispatch.load.tracker import LoadTracker

log = logging.getLogger(__name__)

#: Seconds between two messages while loads change.
INTERVAL = 0.05
#: Seconds after which everything is told, changed or not: a sign of life, and for peers that missed something.
REFRESH = 1.0

_decoder = msgspec.msgpack.Decoder(PlacedLoads)


class PeerLoadMessages:
    """The messages between frontends about the loads of their trackers. `PeerLoadSync` sends and receives them."""

    def __init__(self, tracker: LoadTracker) -> None:
        self._tracker = tracker
        #: Not a lease's id: a lease may be lost and another taken while the requests stay the same.
        self._id = secrets.randbits(63)
        self._number = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._dirty: set[Rank] = set()

    def note(self, rank: Rank) -> None:
        """Note that something has changed on a rank."""
        self._dirty.add(rank)

    def changes(self) -> bytes:
        """Return a message of what has changed since the last one."""
        return self._message(False, self._dirty)

    def everything(self) -> bytes:
        """Return a message of all there is."""
        return self._message(True, self._tracker.own_ranks())

    def farewell(self) -> bytes:
        """Return a message that nothing is left."""
        return self._message(True, ())

    def apply(self, payload: bytes, now: float) -> None:
        """Take in a message, unless it is this frontend's own.

        Raises:
            Unreadable: it is none.
        """
        message = read(_decoder, payload)
        if message.frontend != self._id:
            self._tracker.peers.apply(message, now)

    def _message(self, whole: bool, ranks: Iterable[Rank]) -> bytes:
        loads = [self._tracker.placed(rank) for rank in ranks]
        self._dirty.clear()
        self._number += 1
        return self._encoder.encode(PlacedLoads(self._id, self._number, whole, loads))


class PeerLoadSync(AsyncResource):
    """Load synchronization: sends this frontend's placements, and applies the others' to the tracker.

    Best effort: without the event plane a frontend goes by its own requests, as if it were alone. `peers` is told how
    many other frontends have been heard of lately.
    """

    def __init__(
        self, tracker: LoadTracker, events: EventPlane, directory: Discovery, *, peers: Callable[[float], None]
    ) -> None:
        self._tracker = tracker
        self._events = events
        self._directory = directory
        self._peers = peers
        self._messages = PeerLoadMessages(tracker)
        self._changed = asyncio.Event()
        self._tasks = TaskSet()

    def start(self) -> None:
        """Begin to tell and to listen."""
        self._tracker.on_change = self._note
        self._tasks.spawn(self._send_changes(), name="tell loads")
        self._tasks.spawn(
            listen(self._events, self._directory, PLACED_LOADS, self._receive, whose="frontend"), name="receive loads"
        )

    async def aclose(self) -> None:
        """Tell the others that nothing is left here, and end. Safe twice, and without `start`."""
        self._tracker.on_change = None
        await self._tasks.aclose()

    def _note(self, rank: Rank) -> None:
        self._messages.note(rank)
        self._changed.set()

    async def _send_changes(self) -> None:
        while True:
            try:
                lease = await self._directory.lease()
                try:
                    await self._send_under(lease)
                finally:
                    await lease.aclose()
            except Exception as error:
                log.warning("other frontends cannot be told of the loads here: %s", error)
            self._expire()
            await asyncio.sleep(jitter(RETRY))

    async def _send_under(self, lease: Lease) -> None:
        """Tell until the lease is lost."""
        publisher = await self._events.publisher(PLACED_LOADS, lease)
        loop = asyncio.get_running_loop()
        due = 0.0
        try:
            while not lease.lost.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - loop.time())):
                        await self._changed.wait()
                self._changed.clear()
                if loop.time() < due:
                    publisher.send(self._messages.changes())
                else:
                    due = loop.time() + REFRESH
                    publisher.send(self._messages.everything())
                    self._expire()
                await asyncio.sleep(INTERVAL)
        finally:
            publisher.send(self._messages.farewell())
            await publisher.aclose()

    def _receive(self, payload: bytes) -> None:
        self._messages.apply(payload, asyncio.get_running_loop().time())
        self._peers(len(self._tracker.peers))

    def _expire(self) -> None:
        self._tracker.peers.expire(asyncio.get_running_loop().time())
        self._peers(len(self._tracker.peers))
