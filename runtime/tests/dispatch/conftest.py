"""A pipeline whose workers are worked by the test: it says what each gives, and when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from dynamo_core.contracts.admission import AdmissionServices, Permit
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import PoolView, Route, Router, RoutingRequest, no_worker
from dynamo_core.contracts.transports.call import Endpoint, Sink, Source
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.contracts.transports.transport import Served, Transport
from dynamo_core.errors import Disconnected, DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import LLMEngineOutput, usage
from dynamo_core.protocol.records import Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest, StopConditions
from dynamo_runtime.dispatch.admission import NoAdmission
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.execution.response_stream import ResponseStream
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan, WorkerGroup
from dynamo_runtime.dispatch.unread_answers import UnreadAnswers
from dynamo_telemetry.metrics import Metrics

PROMPT = [900, 901, 902]


def token(position: int) -> int:
    """Return the token of an answer that is at this position of prompt and answer together."""
    return position * 31 % 97


class Call(Source):
    """One accepted call, worked by the test."""

    def __init__(self, request: PreprocessedRequest, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.given = 0
        self.over = False
        self.closed = False
        self.paused = False

    @property
    def left(self) -> int:
        limit = self.request.stop_conditions.max_tokens
        assert limit is not None
        return limit - self.given

    def give(self, count: int) -> None:
        for _ in range(count):
            item = LLMEngineOutput([token(len(self.request.token_ids) + self.given)], log_probs=[-1.0])
            self.given += 1
            self.sink.data(item)

    def complete(self) -> None:
        self.give(self.left)
        self.over = True
        self.sink.data(LLMEngineOutput.length().with_usage(usage(len(self.request.token_ids), self.given)))
        self.sink.event(Annotated.from_complete_final())
        self.sink.closed(None)

    def fail(self, error: DynamoError, *, told: bool) -> None:
        self.over = True
        if told:
            self.sink.event(Annotated.from_error(error))
            self.sink.event(Annotated.from_complete_final())
            self.sink.closed(None)
        else:
            self.sink.closed(error)

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        self.closed = True

    def stop(self) -> None:
        """Leave it to the test whether the worker hears of it."""

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False


class StageTransport(Transport):
    """Accepts calls and does no more; refuses those that it was told to."""

    NAME = "stage"

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())
        self.calls: list[Call] = []
        self.refusals: list[DynamoError] = []
        #: Workers that were called.
        self.asked: set[int] = set()
        #: Tokens that come before the caller knows that it was accepted, and how many such calls then fail at once.
        self.early = 0
        self.broken = 0

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Any) -> Served:
        raise NotImplementedError

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        self.asked.add(instance.instance_id)
        await asyncio.sleep(0)
        if self.refusals:
            raise self.refusals.pop()
        call = Call(request, sink)
        self.calls.append(call)
        call.give(min(self.early, call.left))
        if self.broken:
            self.broken -= 1
            call.fail(Disconnected("at once"), told=False)
        return call

    def events(self) -> EventPlane:
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close nothing."""


class InTurn(Router):
    """The first that is eligible."""

    NAME = "in-turn"

    #: How often there was none.
    refused = 0

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        eligible = pool.eligible(request.excluded)
        if not eligible:
            self.refused += 1
            raise no_worker(pool)
        return Route(eligible[0])


class Counted(Permit):
    __slots__ = ("told",)

    def __init__(self) -> None:
        self.told: list[int] = []

    def release(self, output_tokens: int) -> None:
        self.told.append(output_tokens)


class Open(NoAdmission):
    permit: Permit

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Any) -> Permit:
        return self.permit


class Stage:
    """A pipeline, and one request to be made of it."""

    prompt = PROMPT

    def __init__(
        self, workers: int = 5, *, limit: int = 2, unread: dict[str, Any] | None = None, **deadlines: Any
    ) -> None:
        self.card = ModelCard(name="m", instance_id=0, migration_limit=limit)
        self.pool = Pool("m", "aggregated")
        self.transport = StageTransport()
        self.tracker = LoadTracker()
        self.metrics = Metrics()
        self.permit = Counted()
        admission = Open(PluginConfig(), AdmissionServices(self.metrics))
        admission.permit = self.permit
        self.pipeline = Pipeline(
            transport=self.transport,
            admission=admission,
            tracker=self.tracker,
            deadlines=Deadlines(**({"migration_wait": 0.0} | deadlines)),
            metrics=self.metrics,
            unread=None if unread is None else UnreadAnswers(self.metrics, "dynamo_frontend", **unread),
        )
        self.principal = Principal()
        self.router = InTurn(PluginConfig(), None)  # type: ignore[arg-type]
        self.group = WorkerGroup(self.pool, self.router)
        for number in range(1, workers + 1):
            self.pool.add(Instance(instance_id=number), self.card)
        self.ctx = EngineContext("r")

    def plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        return (self.group,)

    @staticmethod
    def answer(length: int) -> list[int]:
        """Return the whole answer."""
        return [token(len(PROMPT) + at) for at in range(length)]

    def lose(self, given: int = 0, error: DynamoError | None = None) -> None:
        """Break the wire of the last call after some tokens."""
        call = self.transport.calls[-1]
        call.give(given)
        call.fail(error or Disconnected("lost"), told=False)

    async def ends_whole(self, stream: ResponseStream, read: Sequence[int] = (), length: int = 12) -> None:
        """Read the rest of an answer, and hold it to all that was to come."""
        tokens = [*read, *[token async for item in stream for token in item.token_ids]]
        assert tokens == self.answer(length)
        await stream.aclose()

    async def generate(self, max_tokens: int = 12, **options: Any) -> ResponseStream:
        request = PreprocessedRequest(
            model="m", token_ids=PROMPT, stop_conditions=StopConditions(max_tokens=max_tokens), **options
        )
        return await self.pipeline.generate(request, self.ctx, self.principal, self)


@pytest.fixture(scope="session")
def make_stage() -> Callable[..., Stage]:
    """Make one for tests that have a loop of their own."""
    return Stage


@pytest.fixture
def make_call() -> Callable[[], Call]:
    """Return an accepted call without a worker behind it."""

    def make() -> Call:
        sink: Any = None
        return Call(PreprocessedRequest(model="m", token_ids=PROMPT), sink)

    return make
