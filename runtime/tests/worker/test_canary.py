"""A worker finds out that its engine does not answer, and that it does again; who streams is never suspected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import WatchKind
from dynamo_core.contracts.engine import EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.requests.context import GenerateContext
from dynamo_core.contracts.transports.call import GENERATE
from dynamo_core.errors import BackendError, DynamoError, ResponseTimeout, StreamIncomplete, WorkerOverloaded
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest, StopConditions
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.worker.canary import Canary, HealthCheck, ItemCounter, probe
from dynamo_runtime.worker.probe_request import probe_request
from dynamo_runtime.worker.worker import Worker, WorkerLimits

CHECK = HealthCheck(wait=0.04, timeout=0.05)
#: For engines that answer: no machine is so busy that a probe takes longer.
PATIENT = HealthCheck(wait=0.04, timeout=60)


class Moody(LLMEngine):
    """Answers, or does not."""

    NAME = "moody"

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self.answers = True
        self.probes: list[PreprocessedRequest] = []
        self.go = asyncio.Event()

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        if request.is_probe:
            self.probes.append(request)
            if not self.answers:
                await ctx.stopped()
                yield LLMEngineOutput.cancelled()
                return
        else:
            yield LLMEngineOutput([1])
            await self.go.wait()
        yield LLMEngineOutput.length().with_tokens([1])

    async def cleanup(self) -> None:
        return None


def engine_of(worker: Worker) -> Moody:
    assert isinstance(worker._engine, Moody)
    return worker._engine


class Records:
    """Follows which instances discovery shows."""

    def __init__(self, ground: Any) -> None:
        self.count = 0
        self._changed = asyncio.Event()
        self._task = asyncio.ensure_future(self._follow(ground))

    async def _follow(self, ground: Any) -> None:
        async for event in ground.discovery.watch("v1/instances/"):
            self.count += {WatchKind.PUT: 1, WatchKind.DELETE: -1}.get(event.kind, 0)
            self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.count != count:
                self._changed.clear()
                await self._changed.wait()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.fixture
async def records(ground: Any) -> AsyncIterator[Records]:
    records = Records(ground)
    yield records
    await records.aclose()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_a_worker_leaves_discovery_while_its_engine_does_not_answer(ground: Any, records: Records) -> None:
    worker = ground.worker(Moody, health_check=CHECK)
    await worker.start()
    await records.until(1)

    engine_of(worker).answers = False
    await records.until(0)
    ready_during = worker.ready
    engine_of(worker).answers = True
    await records.until(1)
    await eventually(lambda: worker.ready)
    await worker.stop()
    await records.until(0)

    assert not ready_during
    assert len(engine_of(worker).probes) >= 2


async def test_a_silent_worker_may_stay_registered_if_configured(ground: Any, records: Records) -> None:
    worker = ground.worker(Moody, health_check=HealthCheck(wait=0.04, timeout=0.05, unregister=False))
    await worker.start()
    await records.until(1)

    engine_of(worker).answers = False
    await eventually(lambda: not worker.ready)
    there = records.count
    await worker.stop()

    assert there == 1


async def test_a_worker_that_stops_while_its_engine_does_not_answer_is_not_put_back(
    ground: Any, records: Records
) -> None:
    worker = ground.worker(Moody, health_check=CHECK)
    await worker.start()
    engine_of(worker).answers = False
    await eventually(lambda: not worker.ready)

    engine_of(worker).answers = True
    await worker.stop()

    assert records.count == 0


async def test_a_verdict_that_comes_while_the_worker_stops_changes_nothing(ground: Any, records: Records) -> None:
    there: list[int] = []

    class Late(Moody):
        async def drain(self) -> None:
            await records.until(0)
            await worker._judged(True, "")
            # As long as a record would need to be seen.
            for _ in range(10):
                await asyncio.sleep(0)
            there.append(records.count)

    worker = ground.worker(Late, health_check=CHECK)
    await worker.start()
    engine_of(worker).answers = False
    await eventually(lambda: not worker._sound)

    await worker.stop()

    assert there == [0]


async def test_a_full_worker_is_probed_past_its_queue_and_the_probe_counts_nowhere(ground: Any) -> None:
    limits = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)
    worker = ground.worker(Moody, limits=limits, health_check=PATIENT)
    await worker.start()
    call = Caller(ground.transport)
    running = asyncio.ensure_future(call(worker.instance, GENERATE, ask(), timeout=10))
    await eventually(lambda: bool(engine_of(worker).probes))
    with pytest.raises(WorkerOverloaded):
        await call(worker.instance, GENERATE, ask(), timeout=10)

    ready = worker.ready
    engine_of(worker).go.set()
    await running
    text = (await ground.metrics.render()).decode()
    await worker.stop()

    assert ready
    assert 'dynamo_component_requests_total{worker="w-0"} 1.0' in text
    assert 'dynamo_rejection_request_total{worker="w-0"} 1.0' in text


def ask() -> PreprocessedRequest:
    return PreprocessedRequest(token_ids=[1], stop_conditions=StopConditions(max_tokens=2))


async def test_an_answered_probe_is_not_aborted(ground: Any) -> None:
    aborted = []

    class Listening(Moody):
        async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
            self.probes.append(request)
            yield LLMEngineOutput([1])
            await asyncio.sleep(0.01)
            yield LLMEngineOutput.length()

        async def abort(self, ctx: Any) -> None:
            aborted.append(ctx.id)

    worker = ground.worker(Listening, health_check=PATIENT)
    await worker.start()
    await eventually(lambda: len(engine_of(worker).probes) >= 3)
    # The last one may be under way, and be taken back by the stop.
    before = list(aborted)
    await worker.stop()

    assert before == []


# The canary by itself.


class Verdicts:
    """Keeps what the canary finds."""

    def __init__(self) -> None:
        self.all: list[tuple[bool, str]] = []
        self._more = asyncio.Event()

    async def __call__(self, answers: bool, why: str) -> None:
        self.all.append((answers, why))
        self._more.set()

    async def until(self, answers: bool) -> str:
        async with asyncio.timeout(10):
            while not self.all or self.all[-1][0] is not answers:
                self._more.clear()
                await self._more.wait()
        return self.all[-1][1]


def failing(error: Exception) -> Callable[[], Awaitable[None]]:
    async def ask() -> None:
        raise error

    return ask


async def test_the_verdict_has_the_reason() -> None:
    verdicts = Verdicts()
    canary = Canary(failing(ResponseTimeout("no answer")), ItemCounter(), CHECK, verdicts)
    canary.start()

    why = await verdicts.until(False)
    await canary.aclose()

    assert why == "ResponseTimeout: no answer"
    assert not canary.answers


async def test_an_engine_that_streams_is_not_probed() -> None:
    probes: list[None] = []
    verdicts, beats = Verdicts(), ItemCounter()

    async def ask() -> None:
        probes.append(None)

    canary = Canary(ask, beats, HealthCheck(wait=0.4, timeout=1), verdicts)
    canary.start()
    async with asyncio.timeout(10):
        while len(verdicts.all) < 3:
            beats.count += 1
            await asyncio.sleep(0)
    await canary.aclose()

    assert probes == []
    assert verdicts.all[:3] == [(True, "")] * 3


async def test_an_engine_that_streams_to_others_during_a_failed_probe_is_busy_and_not_dead() -> None:
    verdicts, beats = Verdicts(), ItemCounter()

    async def ask() -> None:
        beats.count += 1
        raise ResponseTimeout("no answer")

    canary = Canary(ask, beats, CHECK, verdicts)
    canary.start()
    await verdicts.until(True)
    await canary.aclose()

    assert all(answers for answers, _ in verdicts.all)


async def test_an_item_is_enough_to_be_taken_for_alive_again() -> None:
    verdicts, beats = Verdicts(), ItemCounter()
    canary = Canary(failing(ResponseTimeout("no answer")), beats, CHECK, verdicts)
    canary.start()
    await verdicts.until(False)

    async with asyncio.timeout(10):
        while not canary.answers:
            beats.count += 1
            await asyncio.sleep(0)
    await canary.aclose()

    assert verdicts.all[0][0] is False


async def test_a_failed_verdict_is_reported_again() -> None:
    told: list[bool] = []
    again = asyncio.Event()

    async def verdict(answers: bool, why: str) -> None:
        told.append(answers)
        if len(told) > 1:
            again.set()
        raise RuntimeError("discovery is away")

    canary = Canary(failing(ResponseTimeout("no answer")), ItemCounter(), CHECK, verdict)
    canary.start()
    async with asyncio.timeout(10):
        await again.wait()
    await canary.aclose()

    assert told[:2] == [False, False]


async def test_items_are_counted_when_they_have_been_delivered_and_only_then() -> None:
    closed: list[None] = []

    async def items() -> Any:
        try:
            yield 1
            yield 2
        finally:
            closed.append(None)

    beats = ItemCounter()
    stream = beats.watch(items())
    counts = [beats.count async for _ in stream]
    waiting = beats.watch(items())
    await anext(waiting)
    before = beats.count
    await waiting.aclose()

    assert counts == [0, 1]
    assert before == beats.count == 2
    assert closed == [None, None]


# The probe on its way.


@pytest.mark.parametrize(
    ("behaviour", "kind", "timeout"),
    [
        ("nothing", StreamIncomplete, 60),
        ("error", DynamoError, 60),
        ("raise", BackendError, 60),
        ("hang", ResponseTimeout, 0.05),
    ],
)
async def test_an_answer_that_is_none_is_an_error(
    ground: Any, behaviour: str, kind: type[Exception], timeout: float
) -> None:
    async def handler(request: Any, ctx: Any) -> Any:
        return answer(ctx)

    async def answer(ctx: Any) -> Any:
        if behaviour == "error":
            yield LLMEngineOutput.error("out of memory")
        if behaviour == "raise":
            raise BackendError.EngineShutdown("dead")
        if behaviour == "hang":
            await ctx.stopped()

    lease = await ground.discovery.lease()
    served = await ground.transport.serve(lease.id, GENERATE, handler)

    with pytest.raises(kind):
        await probe(ground.transport, Instance(instance_id=lease.id), GENERATE, ask(), timeout)

    await served.aclose()


async def test_a_worker_that_is_not_there_is_an_error(ground: Any) -> None:
    with pytest.raises(DynamoError):
        await probe(ground.transport, Instance(instance_id=1), GENERATE, ask(), 1)


# What is sent.

CARD = ModelCard(name="m", instance_id=1, model_types=["chat"])


async def test_the_settings_win_over_the_engine_and_the_engine_over_the_default() -> None:
    of_settings = await probe_request({"token_ids": [3]}, {"token_ids": [4]}, card=CARD, files={})
    of_engine = await probe_request(None, {"token_ids": [4]}, card=CARD, files={})
    default = await probe_request(None, None, card=CARD, files={"config.json": b'{"bos_token_id": 7}'})

    assert of_settings is not None
    assert of_engine is not None
    assert default is not None
    assert [request.token_ids for request in (of_settings, of_engine, default)] == [[3], [4], [7]]
    assert all(request.is_probe for request in (of_settings, of_engine, default))
    assert default.stop_conditions.max_tokens == 1
    assert default.stop_conditions.ignore_eos
    assert default.sampling_options.temperature == 0


async def test_a_text_is_json_or_names_a_file_of_it(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text('{"token_ids": [5], "_HEALTH_CHECK": false}')

    plain = await probe_request('{"token_ids": [4]}', None, card=CARD, files={})
    filed = await probe_request(f"@{path}", None, card=CARD, files={})

    assert plain is not None
    assert filed is not None
    assert (plain.token_ids, filed.token_ids) == ([4], [5])
    assert filed.is_probe


@pytest.mark.parametrize(
    ("configured", "offered"),
    [("[1]", None), ("{", None), ("@/nowhere/at-all", None), ({"token_ids": "x"}, None), (None, [1]), (None, "7")],
)
async def test_a_payload_that_is_no_request_switches_probing_off_with_a_warning(
    configured: Any, offered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert await probe_request(configured, offered, card=CARD, files={}) is None
    assert "no health checks of m" in caplog.text


async def test_an_engine_that_takes_text_gets_the_body_of_a_client() -> None:
    chat = ModelCard(name="m", instance_id=1, model_types=["chat"], model_input="text")
    completions = ModelCard(name="m", instance_id=1, model_types=["completions"], model_input="text")

    first = await probe_request(None, None, card=chat, files={})
    second = await probe_request(None, None, card=completions, files={})

    assert first is not None
    assert second is not None
    assert json.loads(json.dumps(first.body))["messages"]
    assert second.body["prompt"]
