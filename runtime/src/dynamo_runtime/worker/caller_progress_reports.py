"""Progress reports to callers without output for long, where the engine makes progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final

from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.engine_boundary import engine_name
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.worker.canary import ItemCounter

log = logging.getLogger(__name__)

#: Seconds between two reports.
INTERVAL = 1.0

#: What a caller gets. Frontends take any event for a sign of life, and show clients none that they do not know.
REPORT: Final[Annotated[Any]] = Annotated(event="progress")


class _Followed:
    """One running call: the items it has yielded, and how many there were at the last report."""

    __slots__ = ("beats", "seen")

    def __init__(self) -> None:
        self.beats = ItemCounter()
        self.seen = 0


class ProgressReporter(AsyncResource):
    """Asks the engine for its progress, and reports it to the callers of requests that are silent.

    `beats` counts the progress as well, so that the canary does not probe an engine that is at work.
    """

    def __init__(self, engine: LLMEngine, beats: ItemCounter) -> None:
        self._engine = engine
        self._beats = beats
        self._calls: dict[ServedContext, _Followed] = {}
        self._last = 0
        self._failed = False
        self._tasks = TaskSet()

    def start(self) -> None:
        """Begin to report."""
        self._tasks.spawn(self._run(), name="report-progress")

    async def aclose(self) -> None:
        """Stop. Safe twice, and without `start`."""
        await self._tasks.aclose()

    def follow(self, ctx: ServedContext) -> None:
        """Report to this caller until its call has ended."""
        self._calls[ctx] = _Followed()
        ctx.defer(lambda: self._forget(ctx))

    def watch(self, ctx: ServedContext, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Return the same items; while they come, the call is not silent."""
        followed = self._calls.get(ctx)
        return items if followed is None else followed.beats.watch(items)

    def _forget(self, ctx: ServedContext) -> None:
        self._calls.pop(ctx, None)

    def report(self) -> None:
        """Ask the engine once, and tell those it concerns."""
        try:
            progress = self._engine.progress()
        except Exception:
            if not self._failed:
                log.exception("engine %s cannot say whether it is at work", engine_name(self._engine))
            self._failed = True
            return
        if progress == self._last:
            return
        self._last = progress
        self._beats.count += 1
        for ctx, followed in self._calls.items():
            count = followed.beats.count
            if count == followed.seen:
                ctx.announce(REPORT)
            followed.seen = count

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            self.report()
