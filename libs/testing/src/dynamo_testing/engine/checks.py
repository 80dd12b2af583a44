"""All checks of an engine, in the order of its life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo_testing.engine import answers, lifecycle, loop, sources, stopping
from dynamo_testing.engine import failures as f
from dynamo_testing.engine.bench import Bench, Plan


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of the contract.

    `run` makes the engine do its part and returns what was seen; it raises one of `failures`, or that of a step
    before it, or `Skipped`. `patience` is the longest that any one call of it may take.
    """

    run: Callable[[Bench], Awaitable[str]]
    #: The first of them is also that of an engine which blocks the event loop.
    failures: tuple[type[f.ConformanceFailure], ...]
    patience: Callable[[Plan], float] = lambda plan: plan.request_timeout

    @property
    def name(self) -> str:
        """The name of the check."""
        return getattr(self.run, "__name__", "")

    @property
    def promise(self) -> str:
        """The promise that it holds the engine to, as a sentence."""
        return (self.run.__doc__ or "").strip()


_ANSWER = (
    f.GenerateFailed,
    f.NoChunksYielded,
    f.StreamYieldedError,
    f.NoTerminalChunk,
    f.ChunkAfterTerminal,
    f.InvalidTokens,
    f.InvalidItem,
    f.WrongUsage,
)
_STOP = (f.CancellationNotObserved, f.CancellationIgnored, f.StreamYieldedError, f.NoChunksYielded, f.AbortFailed)

CHECKS = (
    Check(lifecycle.start, (f.StartFailed, f.EmptyModelInConfig), lambda plan: plan.start_timeout),
    Check(lifecycle.metrics, (f.MetricsFailed,)),
    Check(sources.kv_event_sources, (f.KvEventSourcesFailed, f.KvEventSourcesNotIdempotent)),
    Check(sources.load_sources, (f.LoadSourcesFailed, f.LoadSourcesNotIdempotent)),
    Check(answers.generate, (*_ANSWER, f.NoDisaggregatedParams)),
    Check(answers.max_tokens, (f.MaxTokensExceeded, f.AnswerRepeated, f.WrongUsage)),
    Check(loop.event_loop, (f.EventLoopBlocked,)),
    Check(answers.health_check_payload, (f.HealthCheckPayloadFailed,)),
    Check(answers.concurrent, (f.ConcurrentGenerateFailed, f.RequestsMixed)),
    Check(stopping.cancel_at_once, _STOP),
    Check(stopping.cancel_midway, _STOP),
    Check(stopping.cancel_at_end, _STOP),
    Check(stopping.cancel_queued, (*_STOP[:1], f.QueuedStopIgnored, *_STOP[1:])),
    Check(stopping.close_midway, (f.CloseFailed, f.RequestLeaked)),
    Check(answers.progress, (f.ProgressFailed,)),
    Check(answers.embed, (f.EmbeddingFailed,)),
    Check(answers.score, (f.ScoringFailed,)),
    Check(sources.kv_events, (f.KvEventsFailed,)),
    Check(lifecycle.drain, (f.DrainFailed,)),
    Check(lifecycle.cleanup, (f.CleanupFailed, f.SecondCleanupFailed), lambda plan: plan.cleanup_timeout),
    Check(lifecycle.cleanup_without_start, (f.CleanupWithoutStartFailed,), lambda plan: plan.cleanup_timeout),
)
