"""Unanswered ``/free`` calls, repeated until the service answers or has expired the request by itself."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

from dynamo_plugin_router_slot_tracker.client import Refused, ServiceClient, ServiceUnreachable
from dynamo_plugin_router_slot_tracker.schemas import RequestKey

log = logging.getLogger(__name__)

#: Seconds before the first repetition, and most of them between two, each varied by a quarter.
FIRST = 0.5
LAST = 5.0
#: Most repetitions of one call. They reach as far as the default expiry of the service.
ATTEMPTS = 64
#: Most calls that wait. Of more the oldest is dropped, which the service expires first.
LIMIT = 16_384
#: Calls at the same time, once the service has answered one.
_BATCH = 8
#: Seconds between two attempts while the router ends.
_HURRY = 0.1


@dataclass(slots=True)
class _PendingFree:
    key: RequestKey
    #: When the service has expired the request, as a time of the loop.
    deadline: float
    #: Answers that are still needed.
    answers: int
    attempts: int = 0


class PendingFrees:
    """`/free` may be repeated, and is the last call of its request, so that these calls need no order among them."""

    def __init__(self, client: ServiceClient, expiry: float) -> None:
        self._client = client
        self._expiry = expiry
        #: The one that was put first, or repeated longest ago, is the first.
        self._waiting: dict[RequestKey, _PendingFree] = {}
        self._filled = asyncio.Event()
        #: Dropped since the last message about it.
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, key: RequestKey, added: float, *, answers: int = 1) -> None:
        """Repeat a call from now on. `added` is the time of the loop at which the service may have added the request.

        Two `answers` are needed after an `/add` that was not answered: it may come after the first of them.
        """
        if len(self._waiting) >= LIMIT:
            del self._waiting[next(iter(self._waiting))]
            self._dropped += 1
        self._waiting[key] = _PendingFree(key, added + self._expiry, answers)
        self._filled.set()

    async def run(self) -> None:
        """Repeat what waits, round by round, until it is cancelled."""
        pause = FIRST
        while True:
            await self._filled.wait()
            # Frontends that met the same outage do not come back at the same time.
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311
            if not self._client.usable:
                continue
            pause = FIRST if await self._round() else min(2 * pause, LAST)
            if not self._waiting:
                self._filled.clear()
            if self._dropped:
                log.warning("%d ended requests count at the slot tracker until they expire there", self._dropped)
                self._dropped = 0

    async def flush(self) -> None:
        """Repeat what waits without backing off, until all of it is answered. The caller sets a deadline."""
        while self._waiting:
            if not await self._round(urgent=True):
                await asyncio.sleep(_HURRY)

    async def _round(self, *, urgent: bool = False) -> bool:
        """Repeat each call once, up to the first that is not answered; whether all were."""
        # Each stays on the list until it is answered, so that one that is cancelled is repeated later.
        waiting = list(self._waiting.values())
        # The first call finds out whether the service is there.
        for batch in (waiting[:1], *(waiting[at : at + _BATCH] for at in range(1, len(waiting), _BATCH))):
            if not all(await asyncio.gather(*(self._repeat(one, urgent) for one in batch))):
                return False
        return True

    async def _repeat(self, pending: _PendingFree, urgent: bool) -> bool:
        """Return whether the service answered, or need not any more."""
        if pending.attempts >= ATTEMPTS or asyncio.get_running_loop().time() >= pending.deadline:
            self._dropped += self._waiting.pop(pending.key, None) is not None
            return True
        pending.attempts += 1
        try:
            await self._client.free(pending.key, urgent=urgent)
        except Refused as refused:
            # It has forgotten the model with all its requests.
            log.debug("the slot tracker did not free a request: %s", refused)
            self._waiting.pop(pending.key, None)
        except ServiceUnreachable as unreachable:
            log.debug("the slot tracker was not told that a request is over: %r", unreachable)
            self._move_to_the_end(pending)
            return False
        else:
            pending.answers -= 1
            if not pending.answers:
                self._waiting.pop(pending.key, None)
        return True

    def _move_to_the_end(self, pending: _PendingFree) -> None:
        """Move a call that fails to the end, so that it does not keep the others waiting."""
        if self._waiting.pop(pending.key, None) is not None:
            self._waiting[pending.key] = pending
