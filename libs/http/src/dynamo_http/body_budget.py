"""The memory budget of all request bodies, from their first bytes until engines have been asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from aiohttp import StreamReader, web
from dynamo_core.errors import Unavailable
from dynamo_telemetry.metrics import Metrics

#: Bytes of a body that never waits: the event loop reads and parses it at once.
INLINE = 64 * 1024
#: Bytes up to which a body is small: it draws on a quarter of the budget that is kept from larger ones.
SMALL = 1024 * 1024
#: Bytes that a byte of a body takes, at most and about, while it is parsed, checked and encoded: a token id has two
#: digits and a comma or more, and makes an object of 32 bytes in several lists.
WORK = 6
#: Seconds that a body waits before it is refused.
_DEADLINE = 30.0
#: Seconds after which a waiting body looks for others that arrive too slowly.
_PATIENCE = 1.0
#: Seconds for a body to arrive while others wait for its place, and bytes for which it has a second more.
_ARRIVAL, _ARRIVAL_RATE = 5.0, 4 * SMALL
#: Bytes by which a body may be larger than another that came a second later, and still goes first.
_SIZE_PER_SECOND = 10 * SMALL
_MAX_WAITING = 1000

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *args: object) -> T:
    """Call a function in a thread. A cancelled caller waits for its end, since it holds memory until then."""
    running = asyncio.get_running_loop().run_in_executor(None, function, *args)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
    finally:
        # Its error has this frame, which would keep the body until the next collection of garbage.
        del running


class TooSlow(web.RequestPayloadError):
    """A body did not arrive in the time that it has while others wait."""


class Lease:
    """Bytes of a gate that one body holds."""

    def __init__(self, gate: _Gate, size: int) -> None:
        self._gate = gate
        self.size = size
        #: The body that is arriving, and the time of the loop until which it may while others wait.
        self.arriving: StreamReader | None = None
        self.due = 0.0

    def arrives(self, content: StreamReader) -> None:
        """Let the gate cut the body if it arrives too slowly."""
        self.arriving = content
        self.due = asyncio.get_running_loop().time() + _ARRIVAL + self.size / _ARRIVAL_RATE
        self._gate.arriving.add(self)

    def shrink(self, size: int) -> None:
        """Give back all but `size` bytes. Safe twice."""
        self._gate.arriving.discard(self)
        given, self.size = max(0, self.size - size), min(self.size, size)
        self._gate.give(given)


class _Gate:
    """A bound on bytes. Of the bodies that wait, small and old ones go first."""

    def __init__(self, capacity: int, budget: BodyBudget) -> None:
        self._capacity = self._free = capacity
        self._budget = budget
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, int, asyncio.Future[None]]] = []
        self.arriving: set[Lease] = set()

    async def take(self, size: int) -> Lease:
        """Return a lease; a body that is larger than everything gets everything.

        Raises:
            Unavailable: the bytes do not become free in time.
        """
        size = min(size, self._capacity)
        if self._waiting or size > self._free:
            await self._wait(size)
        else:
            self._use(size)
        return Lease(self, size)

    def give(self, size: int) -> None:
        """Take bytes back, and let in the bodies that they are enough for."""
        self._use(-size)
        while self._waiting and self._waiting[0][2] <= self._free:
            _, _, wanted, admitted = heappop(self._waiting)
            self._use(wanted)
            admitted.set_result(None)

    def _use(self, size: int) -> None:
        self._free -= size
        self._budget.held.inc(size)

    async def _wait(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        admitted: asyncio.Future[None] = loop.create_future()
        entry = (begun + size / _SIZE_PER_SECOND, next(self._numbers), size, admitted)
        heappush(self._waiting, entry)
        self._budget.waited.inc()
        self.give(0)
        try:
            while not admitted.done():
                left = begun + _DEADLINE - loop.time()
                if left <= 0 or len(self._waiting) > _MAX_WAITING:
                    self._budget.refused.inc()
                    raise Unavailable("Too many large request bodies are being read, please retry later")
                await asyncio.wait([admitted], timeout=min(left, _PATIENCE))
                self._cut_slow(loop.time())
        except BaseException:
            if admitted.done():
                self.give(size)
            else:
                self._waiting.remove(entry)
                heapify(self._waiting)
                self.give(0)
            raise

    def _cut_slow(self, now: float) -> None:
        if self._waiting:
            for lease in self.arriving:
                if lease.due < now and lease.arriving is not None:
                    lease.arriving.set_exception(TooSlow())


class BodyBudget:
    """The bound on the memory of bodies. `limit` is in bytes, and holds twice: for reading, and for what follows.

    Reading holds the bytes of a body. Unpacking, parsing, checking and encoding hold `WORK` times as many. A body
    takes the second lease with the first in hand, and never the other way round.
    """

    def __init__(self, limit: int, metrics: Metrics, prefix: str) -> None:
        self.held = metrics.gauge(
            f"{prefix}_body_bytes",
            "Bytes reserved for large bodies that are read, unpacked, parsed or encoded.",
        ).labels()
        self.waited = metrics.counter(
            f"{prefix}_waiting_bodies_total", "Bodies of requests that had to wait for other large ones."
        ).labels()
        self.refused = metrics.counter(
            f"{prefix}_refused_bodies_total", "Bodies of requests refused because they had waited too long."
        ).labels()
        self._reading = _Gate(limit // 4, self), _Gate(limit - limit // 4, self)
        self._working = _Gate(limit // 4, self), _Gate(limit - limit // 4, self)

    async def read(self, size: int) -> Lease:
        """Return the lease for a body of `size` bytes to be read.

        Raises:
            Unavailable: the bytes do not become free in time.
        """
        return await self._reading[size > SMALL].take(size)

    async def work(self, size: int) -> Lease:
        """Return the lease for a body of `size` bytes, unpacked, to be worked on.

        Raises:
            Unavailable: the bytes do not become free in time.
        """
        return await self._working[size > SMALL].take(size * WORK)
