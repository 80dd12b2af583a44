"""The canary: is the engine alive, by its streams, or by a probe after a silence."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint, Source
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import DynamoError, ResponseTimeout, StreamIncomplete, Unknown
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.records import Instance
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)

#: Looks per `HealthCheck.wait`: a probe comes at most a quarter of it too late.
LOOKS = 4
#: Seconds for the rest of a probe after its first item, and again for taking its call back.
ENDING = 5.0

Verdict = Callable[[bool, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The settings of a worker's probe; times in seconds."""

    #: Silence of the engine before a probe.
    wait: float = 10.0
    #: For the first item of the answer.
    timeout: float = 3.0
    #: See `dynamo_runtime.worker.probe_request.probe_request`.
    payload: Mapping[str, Any] | str | None = None
    #: Whether a worker that does not answer leaves discovery until it does.
    unregister: bool = True


class ItemCounter:
    """A counter of an engine's items. It costs one plain call per item, and no look at the clock."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def watch(self, items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Return the same stream, counted."""
        return _CountedStream(self, items)


class _CountedStream(AsyncGenerator[Any, None]):
    """A stream that passes everything on.

    A caller that asks for an item has got the one before, so the first one does not count.
    """

    __slots__ = ("_beats", "_begun", "_items")

    def __init__(self, beats: ItemCounter, items: AsyncGenerator[Any, None]) -> None:
        self._beats = beats
        self._items = items
        self._begun = 0

    # Not a coroutine itself, so that no frame is added to the way of an item.
    def __anext__(self) -> Any:
        self._beats.count += self._begun
        self._begun = 1
        return self._items.__anext__()

    def asend(self, value: Any) -> Any:
        return self._items.asend(value)

    def athrow(self, *error: Any) -> Any:
        return self._items.athrow(*error)

    def aclose(self) -> Any:
        return self._items.aclose()


class Canary(AsyncResource):
    """Watches the beats of one worker and probes it through its own endpoint.

    `verdict` is told at every look whether the engine answers, and why not; it may be told the same again.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        beats: ItemCounter,
        check: HealthCheck,
        verdict: Verdict,
    ) -> None:
        """`probe` returns when the engine has answered, and raises if it has not; it keeps to the time itself."""
        self._probe = probe
        self._beats = beats
        self._check = check
        self._verdict = verdict
        self._tasks = TaskSet()
        self.answers = True

    def start(self) -> None:
        """Begin to watch."""
        self._tasks.spawn(self._run(), name="canary")

    async def aclose(self) -> None:
        """Stop watching; a probe under way is taken back. Safe twice, and without `start`."""
        await self._tasks.aclose()

    async def _run(self) -> None:
        silent = 0
        while True:
            seen = self._beats.count
            await asyncio.sleep(self._check.wait / LOOKS)
            if self._beats.count != seen:
                silent, why = 0, ""
                self.answers = True
            else:
                silent += 1
                if silent < LOOKS:
                    continue
                silent, why = 0, await self._ask()
                self.answers = not why
            try:
                await self._verdict(self.answers, why)
            except Exception:
                # Discovery may be away; the verdict is told again at the next look.
                log.exception("what the canary found could not be told")

    async def _ask(self) -> str:
        """Return why the engine does not answer; empty if it does."""
        seen = self._beats.count
        why = ""
        try:
            await self._probe()
        except DynamoError as error:
            why = f"{error.kind}: {error}"
        except Exception as error:
            log.exception("the canary's probe failed")
            why = str(error) or type(error).__name__
        # An engine that streams to others is busy, not dead, whatever became of the probe.
        return "" if self._beats.count != seen else why


async def probe(
    transport: Transport, instance: Instance, endpoint: Endpoint, request: PreprocessedRequest, timeout: float
) -> None:
    """Send a probe to a worker and return once it has answered; its first item must come within `timeout` seconds.

    Raises:
        ResponseTimeout: nothing came in time.
        DynamoError: the worker could not be reached, refused, or answered with an error or with nothing.
    """
    sink = _Sink()
    ctx = EngineContext(f"canary-{uuid.uuid4()}")
    source: Source | None = None
    try:
        async with asyncio.timeout(timeout):
            source = await transport.call(instance, endpoint, request, ctx, sink)
            await sink.first.wait()
        with suppress(TimeoutError):
            # The engine ends by itself after one token; to stop it now would be told to it as a caller's wish.
            async with asyncio.timeout(ENDING):
                await sink.last.wait()
    except TimeoutError as error:
        raise ResponseTimeout(f"no answer to a probe within {timeout:g} s", cause=error) from error
    finally:
        if source is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ENDING):
                    await source.aclose()
    if sink.error is not None:
        raise sink.error


class _Sink:
    """Takes the first thing that comes for the answer."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.last = asyncio.Event()
        self.error: DynamoError | None = None

    def data(self, item: Any) -> None:
        error = None
        if item.finish_reason is FinishReason.ERROR:
            error = Unknown(item.error_message or "the engine answered with an error")
        self._settle(error)

    def event(self, item: Annotated[Any]) -> None:
        if item.is_error():
            self._settle(item.to_error())
        elif item.is_complete_final():
            self._settle(StreamIncomplete("the answer was empty"))
            self.last.set()

    def closed(self, error: DynamoError | None) -> None:
        self._settle(error or StreamIncomplete("the answer was empty"))
        self.last.set()

    def _settle(self, error: DynamoError | None) -> None:
        if not self.first.is_set():
            self.error = error
            self.first.set()
