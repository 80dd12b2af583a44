"""The reservations of this frontend at the service, reported in order in the background."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable

from dynamo_core import TaskSet

from dynamo_plugin_router_slot_tracker.client import Refused, ServiceClient, ServiceUnreachable
from dynamo_plugin_router_slot_tracker.pending_frees import PendingFrees
from dynamo_plugin_router_slot_tracker.schemas import Addition, RequestKey

log = logging.getLogger(__name__)

#: Calls that are made at the same time.
_LANES = 8
#: Requests that wait to be told of. The service is not told of more, but for those that it is to free.
_MAX_CHANGED = 16_384
#: Seconds for what still has to be told when the router ends.
_FLUSH = 2.0


class Stage(enum.IntEnum):
    """The stage of a request."""

    ROUTED = 0
    ADDED = 1
    PREFILLED = 2
    FREED = 3


class Reservation:
    """One request on one rank; it watches its route. `make` builds the call once the attempt's id is known."""

    __slots__ = (
        "_make",
        "_queue",
        "added",
        "addition",
        "key",
        "known",
        "queued",
        "rank",
        "uncertain",
        "wanted",
        "weight",
    )

    def __init__(
        self,
        reservations: Reservations,
        rank: tuple[int, int],
        weight: float,
        make: Callable[[str], Addition],
    ) -> None:
        self._queue = reservations
        self._make: Callable[[str], Addition] | None = make
        self.rank = rank
        #: What it adds to the cost of its rank until the service knows it.
        self.weight = weight
        #: What is to be added, until it has been.
        self.addition: Addition | None = None
        self.key: RequestKey | None = None
        #: What has happened, and what of it the service has been told.
        self.wanted = Stage.ROUTED
        self.known = Stage.ROUTED
        self.queued = False
        #: When it was added, as a time of the loop, and whether the answer to that was lost.
        self.added = 0.0
        self.uncertain = False

    def entered(self, attempt_id: str) -> None:
        """Record that the request counts from now on."""
        if self._make is None:
            return
        addition = self.addition = self._make(attempt_id)
        self.key = RequestKey(
            model_name=addition.model_name, tenant_id=addition.tenant_id, request_id=addition.request_id
        )
        self._want(Stage.ADDED)

    def prefilled(self) -> None:
        """Record that its prompt is processed."""
        self._want(Stage.PREFILLED)

    def left(self) -> None:
        """Record that it is over. Drop its hashes, of which there may be many."""
        self._make = self.addition = None
        self._want(Stage.FREED)

    def _want(self, stage: Stage) -> None:
        if stage > self.wanted:
            self.wanted = stage
            self._queue.changed(self)


class Reservations:
    """Tells the service of every change, each request's in order.

    A `/free` is repeated until the service answers or, `expiry` seconds after its `/add`, has expired the request by
    itself. Other calls are not: `/add` may have been done although its answer was lost, and what a lost
    `/prefill_complete` leaves goes with the `/free`.
    """

    def __init__(self, client: ServiceClient, *, expiry: float) -> None:
        self._client = client
        self._changed: asyncio.Queue[Reservation] = asyncio.Queue()
        self._frees = PendingFrees(client, expiry)
        self._tasks = TaskSet()
        self._repeating = TaskSet()
        #: By rank: the weight of requests that were placed there and that the service does not know yet.
        self.unknown: dict[tuple[int, int], float] = {}

    @property
    def pending(self) -> int:
        """Requests that are over, and that the service may count until a repeated `/free` is answered."""
        return len(self._frees)

    def start(self) -> None:
        """Begin to tell."""
        for number in range(_LANES):
            self._tasks.spawn(self._report(), name=f"slot-tracker-{number}")
        self._repeating.spawn(self._frees.run(), name="slot-tracker-frees")

    async def aclose(self) -> None:
        """Report what is left, for a moment, and end. Safe twice, and without `start`."""
        await self._repeating.aclose()
        if len(self._tasks):
            try:
                async with asyncio.timeout(_FLUSH):
                    await self._changed.join()
                    await self._frees.flush()
            except TimeoutError:
                left = self._changed.qsize() + len(self._frees)
                log.warning("%d requests could not be told to the slot tracker", left)
        await self._tasks.aclose()

    def changed(self, reservation: Reservation) -> None:
        """Record that a request has come further."""
        if reservation.queued or reservation.known >= reservation.wanted:
            return
        if self._changed.qsize() >= _MAX_CHANGED:
            self._skip(reservation)
            return
        if reservation.wanted is Stage.ADDED:
            self.unknown[reservation.rank] = self.unknown.get(reservation.rank, 0.0) + reservation.weight
        reservation.queued = True
        self._changed.put_nowait(reservation)

    def _skip(self, reservation: Reservation) -> None:
        """Skip a report when too much waits, unless the service would go on counting an ended request."""
        if reservation.known is Stage.ROUTED:
            reservation.known, reservation.addition = Stage.FREED, None
        elif reservation.wanted is Stage.FREED:
            reservation.known = Stage.FREED
            self._repeat_free(reservation)

    async def _report(self) -> None:
        while True:
            reservation = await self._changed.get()
            try:
                while reservation.known < reservation.wanted:
                    await self._step(reservation)
            finally:
                reservation.queued = False
                self._changed.task_done()

    async def _step(self, reservation: Reservation) -> None:
        """Tell the next thing."""
        if reservation.known is Stage.ROUTED:
            await self._add(reservation)
        elif reservation.wanted is Stage.FREED:
            reservation.known = Stage.FREED
            await self._free(reservation)
        else:
            reservation.known = Stage.PREFILLED
            await self._complete_prefill(reservation)

    async def _add(self, reservation: Reservation) -> None:
        addition, reservation.addition = reservation.addition, None
        # Until it is known what the service knows: nothing, should this be given up.
        reservation.known = Stage.FREED
        try:
            if addition is not None:
                reservation.added = asyncio.get_running_loop().time()
                await self._client.add(addition)
                reservation.known = Stage.ADDED
        except Refused as refused:
            log.debug("the slot tracker did not take a request: %s", refused)
        except ServiceUnreachable as unreachable:
            if unreachable.uncertain:
                # It may have been added all the same. Only `/free` is worth a call then.
                reservation.known, reservation.uncertain = Stage.PREFILLED, True
        finally:
            self._no_longer_unknown(reservation)

    async def _complete_prefill(self, reservation: Reservation) -> None:
        if reservation.key is not None:
            try:
                await self._client.complete_prefill(reservation.key)
            except (ServiceUnreachable, Refused) as error:
                log.debug("the slot tracker was not told of a prefill: %r", error)

    async def _free(self, reservation: Reservation) -> None:
        if reservation.key is None:
            return
        try:
            await self._client.free(reservation.key)
        except Refused as refused:
            log.debug("the slot tracker did not free a request: %s", refused)
        except ServiceUnreachable:
            self._repeat_free(reservation)
        else:
            if reservation.uncertain:
                self._frees.put(reservation.key, reservation.added)

    def _repeat_free(self, reservation: Reservation) -> None:
        if reservation.key is not None:
            self._frees.put(reservation.key, reservation.added, answers=2 if reservation.uncertain else 1)

    def _no_longer_unknown(self, reservation: Reservation) -> None:
        left = self.unknown[reservation.rank] - reservation.weight
        # Sums of fractions do not come back to nothing exactly.
        if left > 1e-6:
            self.unknown[reservation.rank] = left
        else:
            del self.unknown[reservation.rank]
