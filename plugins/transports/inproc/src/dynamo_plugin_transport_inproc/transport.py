"""The request plane within one process: a call is a task that runs the handler; items are handed over as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, ClassVar

from dynamo_core import (
    DynamoError,
    Endpoint,
    EngineContext,
    EventPlane,
    Handler,
    MetricsScope,
    PluginConfig,
    Served,
    ServedCall,
    ServedContext,
    Sink,
    Source,
    TaskSet,
    Transport,
)
from dynamo_core.errors import CannotConnect, EngineShutdown
from dynamo_core.protocol import Annotated, Instance

from dynamo_plugin_transport_inproc.events import InprocEvents


class InprocTransport(Transport):
    """Calls within one process. Workers and clients must be given the same object."""

    NAME = "inproc"
    CROSS_PROCESS: ClassVar[bool] = False

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        super().__init__(config, metrics)
        self._served: dict[tuple[int, str], _InprocServed] = {}
        self._events = InprocEvents(metrics)

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        key = (instance_id, endpoint.name)
        if key in self._served:
            raise ValueError(f"endpoint {endpoint.name!r} of instance {instance_id:016x} is served already")
        served = _InprocServed(self._served, key, handler)
        self._served[key] = served
        return served

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        served = self._served.get((instance.instance_id, endpoint.name))
        if served is None:
            raise CannotConnect(
                f"instance {instance.instance_id:016x} does not serve {endpoint.name!r} in this process"
            )
        return await served.accept(request, ctx, sink)

    def events(self) -> EventPlane:
        return self._events

    async def aclose(self) -> None:
        for served in list(self._served.values()):
            await served.aclose()
        self._events.close()


class _InprocServed(Served):
    """An endpoint of one worker, with the calls that run on it."""

    def __init__(self, registry: dict[tuple[int, str], _InprocServed], key: tuple[int, str], handler: Handler) -> None:
        self._registry = registry
        self._key = key
        self._handler = handler
        self._calls = TaskSet()
        self._draining = False

    @property
    def address(self) -> dict[str, str]:
        return {"inproc": "here"}

    async def accept(self, request: Any, ctx: EngineContext, sink: Sink) -> Source:
        if self._draining:
            raise EngineShutdown(f"endpoint {self._key[1]!r} is being stopped")
        call = _InprocCall(sink)
        call.start(self._handler, request, ctx, self._calls)
        try:
            await call.verdict
        except asyncio.CancelledError:
            call.forget()
            await call.aclose()
            raise
        return call

    async def drain(self, timeout: float) -> bool:
        self._draining = True
        return await self._calls.join(timeout)

    async def aclose(self) -> None:
        self._draining = True
        self._registry.pop(self._key, None)
        await self._calls.aclose()


class _InprocCall(Source):
    """One call: the outlet of the serving side and the source of the calling side in one object."""

    __slots__ = ("_call", "_forget", "_room", "_sink", "verdict")

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink
        self._room: asyncio.Future[None] | None = None
        self._call: ServedCall | None = None
        self._forget = _nothing
        self.verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, handler: Handler, request: Any, ctx: EngineContext, owner: TaskSet) -> None:
        served = ServedContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)
        self._call = call = ServedCall(handler, request, served, self)
        call.start(owner)
        self._forget = ctx.on_stop(lambda: self._stop(kill=ctx.is_killed()))

    # The serving side.

    async def accepted(self) -> None:
        if not self.verdict.done():
            self.verdict.set_result(None)
        await asyncio.sleep(0)

    def refused(self, error: DynamoError) -> None:
        self._sink = None
        if not self.verdict.done():
            self.verdict.set_exception(error)

    def data(self, item: Any) -> None:
        if self._sink is not None:
            self._sink.data(item)

    def event(self, item: Annotated[Any]) -> None:
        if self._sink is not None:
            self._sink.event(item)

    def room(self) -> Awaitable[None] | None:
        return self._room

    def ended(self, error: DynamoError | None) -> None:
        self._forget()
        # A stop from now on would tell a handler that has finished that its caller gave up.
        self._call = None
        if not self.verdict.done():
            self.refused(error or EngineShutdown("the call ended before it was accepted"))
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.closed(error)

    # The calling side.

    def forget(self) -> None:
        """Forget a call whose caller gave up before it was accepted: its sink hears nothing."""
        self._sink = None
        self.stop()

    def stop(self) -> None:
        self._stop(kill=False)

    async def aclose(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self.stop()
        if self._call is not None:
            await self._call.wait()
        if sink is not None:
            sink.closed(None)

    def _stop(self, *, kill: bool) -> None:
        # A handler that waits for room would not notice.
        self.resume()
        if self._call is not None:
            self._call.stop(kill=kill)

    def pause(self) -> None:
        if self._room is None:
            self._room = asyncio.get_running_loop().create_future()

    def resume(self) -> None:
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)


def _nothing() -> None:
    return None
