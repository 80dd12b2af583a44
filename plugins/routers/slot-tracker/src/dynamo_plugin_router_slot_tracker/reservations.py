"""The requests of this frontend as the service is to know them: each is told in order, behind the request's back."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from dynamo_core.tasks import TaskSet

from dynamo_plugin_router_slot_tracker.bodies import Addition, RequestKey
from dynamo_plugin_router_slot_tracker.client import Away, Refused, ServiceClient

log = logging.getLogger(__name__)

#: Calls that are made at the same time.
_LANES = 8
#: Seconds for what still has to be told when the router ends.
_FLUSH = 2.0


class Stage(enum.IntEnum):
    """How far a request has come."""

    ROUTED = 0
    ADDED = 1
    PREFILLED = 2
    FREED = 3


class Reservation:
    """One request on one rank; watches its route. `make` gives what is added, once the id of the attempt is known."""

    __slots__ = ("_add", "_queue", "addition", "known", "queued", "rank", "wanted", "weight")

    def __init__(
        self,
        reservations: Reservations,
        rank: tuple[int, int],
        weight: float,
        make: Callable[[str], Addition],
    ) -> None:
        self._queue = reservations
        self._add = make
        self.rank = rank
        #: What it adds to the cost of its rank until the service knows it.
        self.weight = weight
        self.addition: Addition | None = None
        #: What has happened, and what of it the service has been told.
        self.wanted = Stage.ROUTED
        self.known = Stage.ROUTED
        self.queued = False

    def entered(self, attempt_id: str) -> None:
        """The request counts from now on."""
        self.addition = self._add(attempt_id)
        self._want(Stage.ADDED)

    def prefilled(self) -> None:
        """Its prompt is processed."""
        self._want(Stage.PREFILLED)

    def left(self) -> None:
        """It is over."""
        self._want(Stage.FREED)

    def _want(self, stage: Stage) -> None:
        if stage > self.wanted:
            self.wanted = stage
            self._queue.changed(self)


class Reservations:
    """Tells the service of every change, each request's in order. What it cannot be told it forgets by itself."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        #: No longer than the number of requests: each is in it once.
        self._changed: asyncio.Queue[Reservation] = asyncio.Queue()
        self._tasks = TaskSet()
        #: By rank: the weight of requests that were placed there and that the service does not know yet.
        self.unknown: dict[tuple[int, int], float] = {}

    def start(self) -> None:
        """Begins to tell."""
        for number in range(_LANES):
            self._tasks.spawn(self._tell(), name=f"slot-tracker-{number}")

    async def aclose(self) -> None:
        """Tells what is left, for a moment, and ends. Safe twice, and without `start`."""
        if len(self._tasks):
            try:
                async with asyncio.timeout(_FLUSH):
                    await self._changed.join()
            except TimeoutError:
                log.warning("%d requests could not be told to the slot tracker", self._changed.qsize())
        await self._tasks.aclose()

    def changed(self, reservation: Reservation) -> None:
        """A request has come further."""
        if reservation.wanted is Stage.ADDED:
            self.unknown[reservation.rank] = self.unknown.get(reservation.rank, 0.0) + reservation.weight
        if not reservation.queued:
            reservation.queued = True
            self._changed.put_nowait(reservation)

    async def _tell(self) -> None:
        while True:
            reservation = await self._changed.get()
            try:
                while reservation.known < reservation.wanted:
                    await self._step(reservation)
            finally:
                reservation.queued = False
                self._changed.task_done()

    async def _step(self, reservation: Reservation) -> None:
        """Tells the next thing. What does not work is not tried again: the service is left with what it has."""
        addition = reservation.addition
        known, wanted = reservation.known, reservation.wanted
        if known is Stage.ROUTED:
            # Until it is known what the service knows: nothing, should this be given up.
            reservation.known = Stage.FREED
            try:
                if wanted is not Stage.FREED and addition is not None:
                    await self._client.add(addition)
                    reservation.known = Stage.ADDED
            except Refused as refused:
                log.debug("the slot tracker did not take a request: %s", refused)
            except Away:
                # It may have been counted in all the same.
                reservation.known = Stage.PREFILLED
            finally:
                self._no_longer_unknown(reservation)
            return
        reservation.known = wanted
        if addition is None:
            return
        key = RequestKey(model_name=addition.model_name, tenant_id=addition.tenant_id, request_id=addition.request_id)
        try:
            await (self._client.free(key) if wanted is Stage.FREED else self._client.complete_prefill(key))
        except (Away, Refused) as error:
            log.debug("the slot tracker was not told of a request: %r", error)

    def _no_longer_unknown(self, reservation: Reservation) -> None:
        left = self.unknown[reservation.rank] - reservation.weight
        # Sums of fractions do not come back to nothing exactly.
        if left > 1e-6:
            self.unknown[reservation.rank] = left
        else:
            del self.unknown[reservation.rank]
