"""The whole way of a request without HTTP: real transport, discovery, router, worker and pipeline in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import (
    Admission,
    AdmissionServices,
    Discovery,
    EngineContext,
    LLMEngine,
    PluginConfig,
    PreprocessedRequest,
    Principal,
    Router,
    RouterServices,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.plugins.loader import PluginLoader
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.resolve import load_parsers
from dynamo_runtime.dispatch.admission import NoAdmission
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.model import Model
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.settings import load_settings
from dynamo_runtime.telemetry.request_events import RequestEventHub
from dynamo_runtime.worker.canary import HealthCheck
from dynamo_runtime.worker.parser_choice import Candidates
from dynamo_runtime.worker.worker import Worker, WorkerLimits
from dynamo_telemetry import Metrics
from dynamo_text import load_tokenizer


@dataclass
class House:
    """One process with workers added by the test."""

    stack: AsyncExitStack
    deadlines: Deadlines = field(default_factory=Deadlines)
    admission: Admission | None = None
    #: Makes the router of each pool.
    router: Callable[[RouterServices], Router] = lambda services: RoundRobinRouter(PluginConfig(), services)
    #: Makes discovery.
    store: Callable[[Metrics], Discovery] = lambda metrics: MemoryDiscovery(PluginConfig(), metrics)
    #: The events of its requests.
    events: RequestEventHub = field(default_factory=RequestEventHub)
    #: The models of its config.
    expected: Collection[str] = ()
    announced: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ids: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.transport = InprocTransport(PluginConfig(), self.metrics)
        self.discovery = self.store(self.metrics)
        self.tracker = LoadTracker()
        self.pipeline = Pipeline(
            transport=self.transport,
            admission=self.admission or NoAdmission(PluginConfig(), AdmissionServices(self.metrics)),
            tracker=self.tracker,
            deadlines=self.deadlines,
            metrics=self.metrics,
            events=self.events,
        )
        self.caller = Caller(self.transport)
        self.models = Models(
            discovery=self.discovery,
            pipeline=self.pipeline,
            caller=self.caller,
            make_router=lambda pool: self.router(
                RouterServices(
                    pool=pool,
                    tracker=self.tracker,
                    events=self.transport.events(),
                    directory=self.discovery,
                    metrics=self.metrics,
                    call=self.caller,
                ),
            ),
            announce=self.announce,
            load_tokenizer=load_tokenizer,
            load_parsers=partial(load_parsers, PluginLoader()),
            expected=self.expected,
        )
        self.models.start()
        self.stack.push_async_callback(self.transport.aclose)
        self.stack.push_async_callback(self.discovery.aclose)
        self.stack.push_async_callback(self.pipeline.aclose)
        self.stack.push_async_callback(self.models.aclose)

    def announce(self, name: str, **arguments: Any) -> None:
        self.announced.append((name, arguments))

    def worker(
        self,
        engine: type[LLMEngine],
        *,
        limits: WorkerLimits | None = None,
        health_check: HealthCheck | None = None,
        candidates: Candidates | None = None,
        **config: Any,
    ) -> Worker:
        settings = WorkerConfig(**({"model_name": "m", "worker": "w"} | config))
        replica = len(self.announced)
        return Worker(
            engine(PluginConfig(), settings),
            settings,
            transport=self.transport,
            discovery=self.discovery,
            metrics=self.metrics.scope(worker=f"{settings.worker}-{replica}"),
            limits=limits or WorkerLimits(grace_period=0, drain_timeout=1),
            announce=self.announce,
            health_check=health_check,
            parsers=candidates or Candidates(),
        )

    async def run(self, engine: type[LLMEngine], **options: Any) -> Worker:
        """Add a running worker and return when it can be routed to."""
        worker = self.worker(engine, **options)
        await worker.start()
        self.stack.push_async_callback(worker.stop, grace=False)
        instance = worker.instance
        assert instance is not None
        await self.until(lambda: instance.instance_id in {i.instance_id for i in self.models.instances()})
        return worker

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds, looked at after every change of the models."""
        async with asyncio.timeout(60):
            while not condition():
                await self.models.changed()

    async def eventually(self, condition: Callable[[], bool]) -> None:
        """Return once something holds that no event tells of."""
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    def model(self, name: str = "m") -> Model:
        return self.models.get(name)

    async def generate(
        self, prompt: list[int], *, ctx: EngineContext | None = None, max_tokens: int | None = None
    ) -> Any:
        request = PreprocessedRequest(
            model="m", token_ids=prompt, stop_conditions=StopConditions(max_tokens=max_tokens)
        )
        return await self.ask(request, ctx=ctx)

    async def begun(self, prompt: list[int], **options: Any) -> Any:
        """Return the stream of a request, of which one item has come."""
        stream = await self.generate(prompt, **options)
        await anext(stream)
        return stream

    async def ask(self, request: PreprocessedRequest, *, ctx: EngineContext | None = None) -> Any:
        return await self.model().generate(request, ctx or EngineContext(f"r{next(self.ids)}"), Principal())


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def make_house(stack: AsyncExitStack) -> AsyncIterator[Callable[..., House]]:
    """Make houses, and check that no request counts as load in any of them when the test is over."""
    made: list[House] = []

    def make(**options: Any) -> House:
        made.append(House(stack, **options))
        return made[-1]

    yield make
    assert [house.tracker.total_requests for house in made] == [0] * len(made)


@pytest.fixture
async def house(make_house: Callable[..., House]) -> House:
    return make_house()


@pytest.fixture(autouse=True)
async def nothing_left_behind() -> AsyncIterator[None]:
    """Assert that every test of this folder ends with the tasks it began with."""
    before = set(asyncio.all_tasks())
    yield
    own = asyncio.current_task()
    left = [task for task in asyncio.all_tasks() - before if not task.done() and task is not own]
    assert not left, f"tasks left behind: {[task.get_name() for task in left]}"


Collect = Callable[[Any], Awaitable[list[int]]]


@pytest.fixture
def tokens_of() -> Collect:
    async def collect(stream: Any) -> list[int]:
        tokens: list[int] = []
        try:
            async for item in stream:
                tokens += item.token_ids
        finally:
            await stream.aclose()
        return tokens

    return collect


@pytest.fixture
async def serve_config(tmp_path: Path) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Serve a config file of this text, in this process; give the address."""
    running = []

    async def run(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        application = Application(load_settings(path, env={}))
        running.append(application)
        await application.start()
        assert application.frontend_process is not None
        await application.frontend_process.ready()
        assert application.url is not None
        return application.url

    yield run
    for application in running:
        await application.stop(grace=False)
