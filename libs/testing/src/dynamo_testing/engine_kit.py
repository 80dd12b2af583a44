"""The kit for engines as a class of tests: every promise of the engine contract as one check.

The author's whole test file::

    import pytest
    from dynamo_core import LLMEngine, WorkerConfig
    from dynamo_testing.engine_kit import EngineConformance, EngineFactory

    class TestMine(EngineConformance):
        @pytest.fixture
        def engine_factory(self) -> EngineFactory:
            return lambda: MyEngine(MyConfig(), WorkerConfig(model_name="a-model"))

Every check makes and starts an engine of its own. Where a start takes long, one test that awaits
`dynamo_testing.run_conformance` makes all checks over one engine. Neither that function nor anything but this
module needs pytest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, TypeAlias

from dynamo_testing.engine.bench import NOTHING_PREFILLED, Bench, EngineFactory, Plan, Prefill
from dynamo_testing.engine.checks import CHECKS
from dynamo_testing.engine.report import SKIPPED
from dynamo_testing.engine.run import make, run_conformance
from dynamo_testing.optional_packages import pytest

__all__ = ["EngineConformance", "EngineFactory", "Prefill", "run_conformance"]

MakeCheck: TypeAlias = Callable[[str], Awaitable[None]]

_CHECKS = {check.name: check for check in CHECKS}


@pytest.mark.asyncio
class EngineConformance:
    """All checks of an engine. Subclass it as ``Test…`` and write the fixture `engine_factory`."""

    #: The prompt of every request.
    TOKEN_IDS: ClassVar[Sequence[int]] = (1, 2, 3)
    #: Seconds for `start`.
    START_TIMEOUT: ClassVar[float] = 120.0
    #: Seconds for one request, and for anything else that is asked of a running engine.
    REQUEST_TIMEOUT: ClassVar[float] = 60.0
    #: Seconds from the stop of a request to the end of its stream.
    CANCEL_TIMEOUT: ClassVar[float] = 2.0
    #: Seconds for `cleanup`.
    CLEANUP_TIMEOUT: ClassVar[float] = 30.0

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        """Make a fresh engine each time it is called; may be async. Every author writes this one."""
        raise NotImplementedError("write a fixture `engine_factory` that returns a function which makes an engine")

    @pytest.fixture
    def prefill_result(self) -> Prefill:
        """Return what an engine that decodes is given.

        Write it for those that decode only what was really prefilled.
        """
        return NOTHING_PREFILLED

    @pytest.fixture
    def check(self, engine_factory: EngineFactory, prefill_result: Prefill) -> MakeCheck:
        """Make the check of a name over an engine of its own."""
        plan = Plan(
            token_ids=self.TOKEN_IDS,
            prefill_result=prefill_result,
            start_timeout=self.START_TIMEOUT,
            request_timeout=self.REQUEST_TIMEOUT,
            cancel_timeout=self.CANCEL_TIMEOUT,
            cleanup_timeout=self.CLEANUP_TIMEOUT,
        )

        async def made(name: str) -> None:
            bench = Bench(engine_factory, plan)
            try:
                result = await make(_CHECKS[name], bench)
            finally:
                # What goes wrong here is found by the checks of cleanup.
                await bench.aclose()
            if result.failure is not None:
                raise result.failure
            if result.outcome == SKIPPED:
                pytest.skip(result.seen)

        return made

    async def test_start_makes_the_engine_ready_and_names_its_model(self, check: MakeCheck) -> None:
        """StartFailed, EmptyModelInConfig."""
        await check("start")

    async def test_its_metrics_can_be_registered_and_scraped(self, check: MakeCheck) -> None:
        """MetricsFailed."""
        await check("metrics")

    async def test_its_kv_event_sources_are_the_same_when_asked_twice(self, check: MakeCheck) -> None:
        """KvEventSourcesFailed, KvEventSourcesNotIdempotent."""
        await check("kv_event_sources")

    async def test_its_load_sources_are_the_same_when_asked_twice(self, check: MakeCheck) -> None:
        """LoadSourcesFailed, LoadSourcesNotIdempotent."""
        await check("load_sources")

    async def test_a_request_is_answered_and_only_the_last_item_is_a_terminal(self, check: MakeCheck) -> None:
        """GenerateFailed, NoTerminalChunk, ChunkAfterTerminal, InvalidTokens, WrongUsage, and others."""
        await check("generate")

    async def test_no_more_tokens_come_than_the_request_allows(self, check: MakeCheck) -> None:
        """MaxTokensExceeded, AnswerRepeated."""
        await check("max_tokens")

    async def test_the_engine_does_not_block_the_event_loop(self, check: MakeCheck) -> None:
        """EventLoopBlocked."""
        await check("event_loop")

    async def test_its_own_health_probe_is_answered(self, check: MakeCheck) -> None:
        """HealthCheckPayloadFailed."""
        await check("health_check_payload")

    async def test_streams_that_are_open_at_once_end_as_they_would_alone(self, check: MakeCheck) -> None:
        """ConcurrentGenerateFailed, RequestsMixed."""
        await check("concurrent")

    async def test_a_request_stopped_before_its_first_item_ends_cancelled(self, check: MakeCheck) -> None:
        """CancellationNotObserved, CancellationIgnored."""
        await check("cancel_at_once")

    async def test_a_request_stopped_midway_ends_cancelled(self, check: MakeCheck) -> None:
        """CancellationNotObserved, CancellationIgnored, AbortFailed."""
        await check("cancel_midway")

    async def test_a_request_stopped_after_its_last_token_ends_cancelled(self, check: MakeCheck) -> None:
        """CancellationNotObserved, CancellationIgnored."""
        await check("cancel_at_end")

    async def test_a_request_stopped_while_it_waits_for_a_place_ends_cancelled(self, check: MakeCheck) -> None:
        """QueuedStopIgnored, CancellationIgnored."""
        await check("cancel_queued")

    async def test_a_stream_closed_midway_leaves_nothing_behind(self, check: MakeCheck) -> None:
        """CloseFailed, RequestLeaked."""
        await check("close_midway")

    async def test_progress_that_is_declared_is_made(self, check: MakeCheck) -> None:
        """ProgressFailed."""
        await check("progress")

    async def test_embeddings_that_are_declared_are_made(self, check: MakeCheck) -> None:
        """EmbeddingFailed."""
        await check("embed")

    async def test_scores_that_are_declared_are_made(self, check: MakeCheck) -> None:
        """ScoringFailed."""
        await check("score")

    async def test_its_kv_events_come_in_order(self, check: MakeCheck) -> None:
        """KvEventsFailed."""
        await check("kv_events")

    async def test_the_engine_drains(self, check: MakeCheck) -> None:
        """DrainFailed."""
        await check("drain")

    async def test_cleanup_is_safe_twice(self, check: MakeCheck) -> None:
        """CleanupFailed, SecondCleanupFailed."""
        await check("cleanup")

    async def test_cleanup_is_safe_without_start(self, check: MakeCheck) -> None:
        """CleanupWithoutStartFailed."""
        await check("cleanup_without_start")
