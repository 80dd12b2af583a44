"""The life of a worker in any order of events: started at most once, cleaned up once if it was, and never otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import WatchKind
from dynamo_core.contracts.engine import EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.requests.context import GenerateContext
from dynamo_core.contracts.transports.call import WORKER_STATE
from dynamo_core.errors import BackendError, CannotConnect, ConfigError, InvalidArgument
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import CORDONED, WorkerStateRequest
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.worker.worker import Worker, WorkerLimits, WorkerState
from hypothesis import given, settings
from hypothesis import strategies as st


class Diary(LLMEngine):
    """Writes down what is asked of it; starts when it is let."""

    NAME = "diary"

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self.diary: list[str] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.fails = False
        self.answer = EngineConfig(model="m")

    async def start(self, worker_id: int) -> EngineConfig:
        self.diary.append("start")
        self.begun.set()
        await self.go.wait()
        if self.fails:
            raise BackendError.EngineShutdown("no memory")
        self.diary.append("started")
        return self.answer

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput.stop()

    async def drain(self) -> None:
        self.diary.append("drain")
        await asyncio.sleep(0)

    async def cleanup(self) -> None:
        self.diary.append("cleanup")
        await asyncio.sleep(0)


class Ready(Diary):
    """Starts at once."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self.go.set()


def engine_of(worker: Worker) -> Diary:
    assert isinstance(worker._engine, Diary)
    return worker._engine


async def records(ground: Any) -> list[str]:
    keys = []
    watch = ground.discovery.watch("v1/")
    async for event in watch:
        if event.kind is WatchKind.SYNCED:
            break
        keys.append(event.key)
    await watch.aclose()
    return keys


EVENTS = [
    "start",
    "engine is ready",
    "engine fails",
    "interrupt",
    "stop",
    "stop at once",
    "cancel the start",
    "cancel a stop",
    "some turns",
    "the engine is asked",
]


@settings(deadline=None)
@given(events=st.lists(st.sampled_from(EVENTS), max_size=12))
def test_a_started_engine_is_cleaned_up_exactly_once_in_any_order_of_events(
    make_ground: Callable[[], Any], events: list[str]
) -> None:
    asyncio.run(live(make_ground, events))


async def live(make_ground: Callable[[], Any], events: list[str]) -> None:
    ground = make_ground()
    stopping_told: list[None] = []
    worker = ground.worker(Diary, stopping=lambda: stopping_told.append(None))
    engine = engine_of(worker)
    start: asyncio.Task[None] | None = None
    stops: list[asyncio.Task[None]] = []
    for event in events:
        match event:
            case "start" if start is None:
                start = asyncio.ensure_future(worker.start())
            case "engine is ready":
                engine.go.set()
            case "engine fails":
                engine.fails = True
                engine.go.set()
            case "interrupt":
                worker.interrupt()
            case "stop":
                stops.append(asyncio.ensure_future(worker.stop()))
            case "stop at once":
                stops.append(asyncio.ensure_future(worker.stop(grace=False)))
            case "cancel the start" if start is not None:
                start.cancel()
            case "cancel a stop" if stops:
                stops[-1].cancel()
            case "the engine is asked" if start is not None and not start.done():
                waiting = asyncio.ensure_future(engine.begun.wait())
                await asyncio.wait([waiting, start], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            case _:
                for _ in range(5):
                    await asyncio.sleep(0)
    engine.go.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*([start] if start else []), *stops, return_exceptions=True)
        await worker.stop()
        left = await records(ground)
        await ground.aclose()

    diary = engine.diary
    owed = int("start" in diary)
    assert diary.count("start") == owed
    assert diary.count("cleanup") == owed
    assert diary.count("drain") <= 1
    if "drain" in diary:
        assert diary[-2:] == ["drain", "cleanup"]
        assert "started" in diary
    assert worker.state is WorkerState.STOPPED
    assert left == []
    assert len(stopping_told) == 1
    assert ground.hooks.count("dynamo_engine_stopped") == owed
    assert ground.hooks.count("dynamo_engine_started") == ground.hooks.count("dynamo_engine_draining")


async def test_a_worker_interrupted_before_its_start_neither_starts_nor_cleans_up(ground: Any) -> None:
    worker = ground.worker(Ready)

    worker.interrupt()
    await worker.start()

    assert engine_of(worker).diary == []
    assert worker.state is WorkerState.STOPPED


async def test_a_worker_interrupted_while_leasing_neither_starts_nor_cleans_up(
    ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = asyncio.Event(), asyncio.Event()
    lease = ground.discovery.lease

    async def slow() -> Any:
        asked.set()
        await go.wait()
        return await lease()

    monkeypatch.setattr(ground.discovery, "lease", slow)
    worker = ground.worker(Ready)
    start = asyncio.ensure_future(worker.start())
    await asked.wait()

    worker.interrupt()
    go.set()
    await start

    assert engine_of(worker).diary == []
    assert worker.state is WorkerState.STOPPED


async def test_a_worker_interrupted_during_the_engine_start_finishes_it_and_never_serves(
    ground: Any,
) -> None:
    worker = ground.worker(Diary)
    engine = engine_of(worker)
    start = asyncio.ensure_future(worker.start())
    await engine.begun.wait()

    worker.interrupt()
    engine.go.set()
    await start

    assert engine.diary == ["start", "started", "drain", "cleanup"]
    assert worker.instance is None
    assert await records(ground) == []


async def test_a_worker_that_serves_is_not_ended_by_an_interruption(ground: Any) -> None:
    worker = ground.worker(Ready)
    await worker.start()

    worker.interrupt()

    assert worker.ready
    await worker.stop()
    assert engine_of(worker).diary == ["start", "started", "drain", "cleanup"]


async def test_a_worker_is_started_once(ground: Any) -> None:
    worker = ground.worker(Ready)
    await worker.start()

    with pytest.raises(RuntimeError, match="once"):
        await worker.start()

    await worker.stop()
    assert engine_of(worker).diary.count("start") == 1


async def test_a_worker_that_cannot_be_registered_takes_the_same_steps_down(
    ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ground.worker(Ready)
    lease = await ground.discovery.lease()

    async def refuse(key: str, value: bytes) -> None:
        raise CannotConnect("the store is gone")

    monkeypatch.setattr(type(lease), "put", lambda _, key, value: refuse(key, value))

    with pytest.raises(CannotConnect):
        await worker.start()

    assert engine_of(worker).diary == ["start", "started", "drain", "cleanup"]
    assert worker.state is WorkerState.STOPPED


async def test_an_unknown_model_input_is_refused(ground: Any) -> None:
    worker = ground.worker(Ready)
    engine_of(worker).answer = EngineConfig(model="m", model_input="speech")

    with pytest.raises(InvalidArgument, match="speech"):
        await worker.start()

    assert engine_of(worker).diary == ["start", "started", "cleanup"]


async def test_a_worker_that_callers_know_to_be_out_of_service_stops_without_waiting_for_them(
    ground: Any, advance: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(ground.discovery), "CROSS_PROCESS", True)
    worker = ground.worker(Ready, limits=WorkerLimits(grace_period=3600, drain_timeout=1))
    await worker.start()
    await Caller(ground.transport)(worker.instance, WORKER_STATE, WorkerStateRequest(CORDONED), timeout=10)
    advance(3600)

    async with asyncio.timeout(10):
        await worker.stop()

    assert worker.state is WorkerState.STOPPED


async def test_an_engine_that_does_not_drain_is_cleaned_up_all_the_same(
    ground: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hanging(Ready):
        async def drain(self) -> None:
            await super().drain()
            await asyncio.Event().wait()

    monkeypatch.setattr("dynamo_runtime.worker.worker.MIN_DRAIN", 0.01)
    worker = ground.worker(Hanging, limits=WorkerLimits(grace_period=0, drain_timeout=0.01))
    await worker.start()

    await worker.stop()

    assert engine_of(worker).diary == ["start", "started", "drain", "cleanup"]
    assert "could not drain its engine in time" in caplog.text


async def test_failing_drain_and_cleanup_are_logged_and_swallowed(
    ground: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Ready):
        async def drain(self) -> None:
            await super().drain()
            raise RuntimeError("cannot drain")

        async def cleanup(self) -> None:
            await super().cleanup()
            raise RuntimeError("cannot clean up")

    worker = ground.worker(Failing)
    await worker.start()

    await worker.stop()
    await worker.stop()

    assert engine_of(worker).diary == ["start", "started", "drain", "cleanup"]
    assert "cannot drain" in caplog.text
    assert "cannot clean up" in caplog.text


async def test_the_times_of_start_drain_and_cleanup_are_gauges(ground: Any) -> None:
    class Slow(Ready):
        async def start(self, worker_id: int) -> EngineConfig:
            await asyncio.sleep(0.01)
            return await super().start(worker_id)

        async def cleanup(self) -> None:
            await asyncio.sleep(0.01)

    worker = ground.worker(Slow)
    await worker.start()
    await worker.stop()

    lines = (await ground.metrics.render()).decode().splitlines()
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["dynamo_component_model_load_time_seconds"] > 0
    assert values["dynamo_component_drain_time_seconds"] > 0
    assert values["dynamo_component_cleanup_time_seconds"] > 0


@pytest.mark.parametrize("name", ["m\u202egnp.exe", "\x1b[2J", "x" * 60_000, " "])
async def test_an_unprintable_model_name_refuses_the_start(ground: Any, name: str) -> None:
    class Named(Ready):
        def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
            super().__init__(config, worker)
            # The worker's own name for the model would win.
            worker.model_name = ""
            self.answer = EngineConfig(model=name)

    worker = ground.worker(Named)
    with pytest.raises(ConfigError, match=r"^workers\.w\.model\.name: ") as refused:
        await worker.start()

    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000
    assert worker.state is WorkerState.STOPPED
    async with aclosing(ground.discovery.watch("v1/")) as events:
        assert (await anext(events)).kind is WatchKind.SYNCED


async def test_an_engine_config_no_frontend_could_read_refuses_the_start(ground: Any) -> None:
    class Odd(Ready):
        def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
            super().__init__(config, worker)
            self.answer = EngineConfig(model="m", data_parallel_size=0)

    with pytest.raises(InvalidArgument, match="data_parallel_size is 0"):
        await ground.worker(Odd).start()
