"""The kit for engines names the failure of each broken engine, and lets sound ones pass."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator
from typing import Any

import dynamo_testing
import pytest
from dynamo_core import DisaggregationMode, FinishReason, GenerateContext, LLMEngineOutput, PreprocessedRequest
from dynamo_core.errors import ConfigError
from dynamo_testing import (
    CancellationNotObserved,
    ConformanceFailure,
    EngineConformance,
    PrefillPeer,
    RequestLeaked,
    StartFailed,
    run_conformance,
)
from dynamo_testing.engine.bench import Bench, EngineFactory, Plan
from dynamo_testing.engine.checks import CHECKS, Check
from dynamo_testing.engine.report import OK, SKIPPED
from dynamo_testing.engine.run import make

from libs.testing.tests import broken_engines as engines

#: Seconds, where a failure is to be waited for. Everything else has plenty, as on a busy machine.
HURRY = 0.3
PLENTY = 20.0

MODES = list(DisaggregationMode)
PROMISES = [check.name for check in CHECKS]


def timeouts(broken: Any, check: str = "") -> dict[str, Any]:
    """Return those for a broken engine; with `check`, for this check alone."""
    given = {f"{what}_timeout": PLENTY for what in ("start", "request", "cancel", "cleanup")}
    if broken.RUNS_OUT and (not check or check in broken.FAILS):
        # In a whole run that time is also all that eight requests at once have.
        whole = not check and broken.RUNS_OUT == "request_timeout"
        given[broken.RUNS_OUT] = 3 * HURRY if whole else HURRY
        if check.startswith("cancel_"):
            given["cancel_timeout"] = HURRY
    if broken.RUNS_OUT == "cleanup_timeout":
        # An engine is cleaned up after every check.
        given["cleanup_timeout"] = HURRY / 3
    return given


class Plain(engines.Engine):
    """A sound engine that remembers what it was asked."""

    def __init__(self, mode: DisaggregationMode = DisaggregationMode.AGGREGATED) -> None:
        super().__init__(mode)
        self.requests: list[PreprocessedRequest] = []
        self.running = 0

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        self.requests.append(request)
        self.running += 1
        try:
            async for item in super().generate(request, ctx):
                yield item
        finally:
            self.running -= 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_minimal_engine_passes_in_every_role(mode: DisaggregationMode) -> None:
    report = await run_conformance(lambda: engines.Engine(mode))

    assert report.passed
    assert [check.name for check in report.checks] == PROMISES
    skipped = {check.name for check in report.checks if check.outcome == SKIPPED}
    one_token_only = {"cancel_midway", "cancel_at_end"} if mode is DisaggregationMode.PREFILL else set()
    assert skipped == {"health_check_payload", "progress", "embed", "score", "kv_events"} | one_token_only
    assert (report.engine, report.mode, report.model) == ("Engine", mode.value, "a-model")


async def test_an_engine_with_all_powers_passes_and_no_check_is_skipped() -> None:
    report = await run_conformance(engines.Rich)

    assert {check.outcome for check in report.checks} == {OK}
    assert report.as_text().endswith(f"{len(CHECKS)} checks ok, in {report.duration:.1f} s.")
    # It tells an event of each rank for each request since the sources were asked for.
    assert "0 events" not in next(check.seen for check in report.checks if check.name == "kv_events")


async def test_the_factory_may_be_async() -> None:
    async def factory() -> Any:
        await asyncio.sleep(0)
        return engines.Repeats()

    assert (await run_conformance(factory)).passed


def marked_line(engine: type) -> int | None:
    """Return the line of a broken engine that must be named, if one must."""
    if engine.__module__ != engines.__name__:
        return None
    lines, start = inspect.getsourcelines(engine)
    return next((start + at for at, line in enumerate(lines) if line.rstrip().endswith("# here")), None)


@pytest.mark.parametrize("broken", engines.BROKEN.values(), ids=engines.BROKEN)
async def test_a_run_ends_with_exactly_the_failure_of_the_broken_promise(broken: Any) -> None:
    first = next(name for name in PROMISES if name in broken.FAILS)

    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(broken, **timeouts(broken))

    failure, line = caught.value, marked_line(broken)
    assert broken.SAYS in str(failure)
    assert line is None or f"(broken_engines.py, line {line})" in str(failure)
    assert type(failure) is getattr(dynamo_testing, broken.FAILS[first])
    assert failure.check == first
    assert failure.seen
    assert failure.report is not None
    assert [check.outcome != "FAILED" for check in failure.report.checks[:-1]] == [True] * PROMISES.index(first)
    assert failure.report.checks[-1].failure is failure
    assert not failure.report.passed


#: Nothing can be asked of an engine that is not ready.
READY = {name: broken for name, broken in engines.BROKEN.items() if not {"start", "metrics"} & set(broken.FAILS)}


@pytest.mark.full
@pytest.mark.parametrize("broken", READY.values(), ids=READY)
async def test_made_one_by_one_the_checks_of_other_promises_pass(broken: Any) -> None:
    found = {}
    for check in CHECKS:
        bench = Bench(broken, Plan(**timeouts(broken, check.name)))
        result = await make(check, bench)
        await bench.aclose()
        if result.failure is not None:
            found[check.name] = result.failure.name

    assert found == broken.FAILS


def test_every_failure_is_known_to_be_found_in_some_broken_engine() -> None:
    failures = {name for name in dynamo_testing.__all__ if _is_failure(name)} - {"ConformanceFailure"}

    assert {name for broken in engines.BROKEN.values() for name in broken.FAILS.values()} == failures


def test_every_failure_class_has_a_check_contract_and_remedy() -> None:
    of_checks = {failure.__name__ for check in CHECKS for failure in check.failures}

    assert of_checks == {name for name in dynamo_testing.__all__ if _is_failure(name)} - {"ConformanceFailure"}
    for name in of_checks:
        failure = getattr(dynamo_testing, name)
        assert failure.CONTRACT
        assert failure.REMEDY
        assert failure.__doc__


def _is_failure(name: str) -> bool:
    value = getattr(dynamo_testing, name)
    return isinstance(value, type) and issubclass(value, ConformanceFailure)


async def test_a_failure_message_has_observation_place_and_remedy() -> None:
    with pytest.raises(StartFailed) as caught:
        await run_conformance(engines.StartRaises)

    text = str(caught.value)
    assert "start raised Backend(CannotConnect): no accelerator (broken_engines.py, line " in text
    assert "\n  the contract: " in text
    assert "\n  what to do: " in text
    assert caught.value.report is not None
    assert "FAILED   StartFailed: start raised" in caught.value.report.as_text()


async def test_an_ignored_stop_reports_its_time_limit() -> None:
    with pytest.raises(CancellationNotObserved) as caught:
        await run_conformance(engines.NeverLooks, cancel_timeout=0.2)

    assert 0.2 <= caught.value.after < 2.0


async def test_a_leak_reports_the_number_of_closed_streams() -> None:
    with pytest.raises(RequestLeaked) as caught:
        await run_conformance(engines.LeaksItsPlaces, request_timeout=0.5)

    assert caught.value.seen.startswith("after 3 streams closed in the middle, the next request: GenerateFailed: ")


async def test_an_engine_that_fails_is_cleaned_up_all_the_same() -> None:
    cleaned = []

    class Fails(engines.StartRaises):
        async def cleanup(self) -> None:
            cleaned.append(self)
            raise RuntimeError("half of it was never made")

    with pytest.raises(StartFailed) as caught:
        await run_conformance(Fails)

    assert len(cleaned) == 1
    assert caught.value.__notes__[0].startswith("afterwards, cleanup raised RuntimeError: half of it was never made (")


async def test_a_run_that_is_cancelled_cleans_its_engine_up() -> None:
    cleaned = []

    class Slow(engines.NeverAnswers):
        async def cleanup(self) -> None:
            cleaned.append(self)

    started = asyncio.Event()
    run = asyncio.create_task(
        run_conformance(Slow, on_begin=lambda check: started.set() if check.name == "generate" else None)
    )
    await started.wait()
    run.cancel()

    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(cleaned) == 1


async def test_no_task_is_left_after_a_run() -> None:
    before = asyncio.all_tasks()

    await run_conformance(engines.Rich)
    with pytest.raises(CancellationNotObserved):
        await run_conformance(engines.NeverLooks, cancel_timeout=0.1)

    assert asyncio.all_tasks() == before


async def test_two_engines_are_made_and_requests_are_those_of_the_contract() -> None:
    made: list[Plain] = []

    def factory() -> Plain:
        made.append(Plain())
        return made[-1]

    await run_conformance(factory, token_ids=(5, 6))

    engine, unstarted = made
    assert unstarted.requests == []
    assert engine.running == 0
    # Longer ones are told apart where several are open at once.
    assert {tuple(request.token_ids) for request in engine.requests} == {
        (5, 6),
        (5, 6, 5),
        (5, 6, 5, 6),
        (5, 6, 5, 6, 5),
    }
    assert engine.requests[0].stop_conditions.max_tokens is None
    assert {request.stop_conditions.max_tokens for request in engine.requests} == {None, 2, 3, 4, 5, 10_000}
    assert all(request.prefill_result is None for request in engine.requests)


async def test_an_engine_that_prefills_is_asked_for_one_token() -> None:
    bench = Bench(lambda: made, Plan())
    made = Plain(DisaggregationMode.PREFILL)

    for check in CHECKS[:-1]:
        assert (await make(check, bench)).failure is None

    assert {request.stop_conditions.max_tokens for request in made.requests} == {1}


async def test_an_engine_that_decodes_is_given_a_prefill_result() -> None:
    bench = Bench(lambda: made, Plan(prefill_result={"disaggregated_params": {"room": 7}}))
    made = Plain(DisaggregationMode.DECODE)

    for check in CHECKS[:-1]:
        assert (await make(check, bench)).failure is None

    for request in made.requests:
        assert request.prefill_result is not None
        assert request.prefill_result.disaggregated_params == {"room": 7}


async def test_a_decode_engine_can_get_real_prefill_results() -> None:
    class Prefills(Plain):
        def last(self) -> LLMEngineOutput:
            params = {"of": len(self.requests)}
            return LLMEngineOutput(finish_reason=FinishReason.LENGTH, disaggregated_params=params)

    prefills, decodes = Prefills(DisaggregationMode.PREFILL), Plain(DisaggregationMode.DECODE)
    spare = Plain(DisaggregationMode.DECODE)
    fresh = [decodes, spare]

    async with PrefillPeer(lambda: prefills) as peer:
        await run_conformance(lambda: fresh.pop(0), prefill_result=peer)

    handed = [request.prefill_result for request in decodes.requests]
    assert [each.disaggregated_params["of"] for each in handed if each is not None] == [
        *range(1, len(prefills.requests) + 1)
    ]


async def test_an_engine_of_texts_is_asked_with_a_clients_body() -> None:
    class Text(Plain):
        async def start(self, worker_id: int) -> Any:
            config = await super().start(worker_id)
            config.model_input = "text"
            return config

    made: list[Text] = []

    def factory() -> Text:
        made.append(Text())
        return made[-1]

    await run_conformance(factory)

    for request in made[0].requests:
        assert request.body["model"] == "a-model"
        assert request.body["messages"][0]["role"] == "user"
        assert request.body.get("max_tokens") == request.stop_conditions.max_tokens


async def test_a_factory_that_is_wrong_itself_is_not_taken_for_a_broken_engine() -> None:
    engine = engines.Engine()
    with pytest.raises(ValueError, match="fresh engine"):
        await run_conformance(lambda: engine)
    with pytest.raises(ConfigError, match="dict is no engine"):
        await run_conformance(dict)  # type: ignore[arg-type]


async def test_an_object_that_only_has_the_methods_of_an_engine_is_held_to_the_same_contract() -> None:
    class Foreign:
        def __init__(self, engine: Any) -> None:
            self.start, self.generate, self.cleanup = engine.start, engine.generate, engine.cleanup

    report = await run_conformance(lambda: Foreign(engines.Engine()))
    with pytest.raises(ConformanceFailure) as caught:
        await run_conformance(lambda: Foreign(engines.EndsWithStopWhenStopped()))

    assert report.passed
    assert report.engine == "Foreign"
    assert caught.value.name == "CancellationIgnored"


async def test_wrong_settings_are_not_taken_for_a_broken_engine() -> None:
    def factory() -> Any:
        raise ConfigError("model.path: needed")

    with pytest.raises(ConfigError, match=r"model.path"):
        await run_conformance(factory)


def test_results_are_reported_as_they_come() -> None:
    begun: list[str] = []
    told: list[str] = []

    def begin(check: Check) -> None:
        assert len(begun) == len(told)
        begun.append(check.name)

    asyncio.run(run_conformance(engines.Engine, on_begin=begin, on_result=lambda result: told.append(result.name)))

    assert begun == told == PROMISES


def test_the_class_of_tests_has_a_test_for_every_check() -> None:
    class Names(EngineConformance):
        pass

    tests = [value for name, value in vars(EngineConformance).items() if name.startswith("test_")]
    asked: list[str] = []

    async def check(name: str) -> None:
        asked.append(name)

    for test in tests:
        asyncio.run(test(Names(), check))

    assert asked == PROMISES


class TestASoundEngineAsAClass(EngineConformance):
    """With a factory that is a fixture, as an author writes it."""

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return engines.Rich


async def test_collecting_garbage_after_a_run_finds_no_open_generator(recwarn: pytest.WarningsRecorder) -> None:
    await run_conformance(engines.Rich)
    gc.collect()

    assert [str(warning.message) for warning in recwarn] == []
