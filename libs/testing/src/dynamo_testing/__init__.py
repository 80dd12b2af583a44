"""Kits that a plugin's author runs: what every plugin of a kind has promised, as ready-made checks.

For engines:

- `run_conformance` holds an engine to its contract and raises the failure by its name (`StartFailed`, …),
- `EngineConformance` is the same as a class of tests,
- `mock_context` and `cancelling_context` are for tests written by hand.

The other kits are base classes of tests; the author's whole test file is a subclass with one fixture that makes the
real thing: `dynamo_testing.transport_kit.TransportKit` and `dynamo_testing.events_kit.EventsKit` for
transports, `dynamo_testing.discovery_kit.DiscoveryKit` for discovery,
`dynamo_testing.admission_kit.AdmissionKit` for admission,
`dynamo_testing.router_kit.RouterKit` for routers. `dynamo_testing.strategies` makes
requests and outputs for tests with hypothesis.

Classes of tests need the extra ``testing``, the functions do not. The names below are loaded when first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_testing.engine.bench import EngineFactory
    from dynamo_testing.engine.contexts import cancelling_context, mock_context
    from dynamo_testing.engine.failures import (
        AbortFailed,
        AnswerRepeated,
        CancellationIgnored,
        CancellationNotObserved,
        ChunkAfterTerminal,
        CleanupFailed,
        CleanupWithoutStartFailed,
        CloseFailed,
        ConcurrentGenerateFailed,
        ConformanceFailure,
        DrainFailed,
        EmbeddingFailed,
        EmptyModelInConfig,
        EventLoopBlocked,
        GenerateFailed,
        HealthCheckPayloadFailed,
        InvalidItem,
        InvalidTokens,
        KvEventsFailed,
        KvEventSourcesFailed,
        KvEventSourcesNotIdempotent,
        LoadSourcesFailed,
        LoadSourcesNotIdempotent,
        MaxTokensExceeded,
        MetricsFailed,
        NoChunksYielded,
        NoDisaggregatedParams,
        NoTerminalChunk,
        ProgressFailed,
        QueuedStopIgnored,
        RequestLeaked,
        RequestsMixed,
        SecondCleanupFailed,
        StartFailed,
        StreamYieldedError,
        WrongUsage,
    )
    from dynamo_testing.engine.peer import PrefillPeer
    from dynamo_testing.engine.report import CheckResult, Report
    from dynamo_testing.engine.run import run_conformance
    from dynamo_testing.engine_kit import EngineConformance

_FAILURES = (
    "AbortFailed",
    "AnswerRepeated",
    "CancellationIgnored",
    "CancellationNotObserved",
    "ChunkAfterTerminal",
    "CleanupFailed",
    "CleanupWithoutStartFailed",
    "CloseFailed",
    "ConcurrentGenerateFailed",
    "ConformanceFailure",
    "DrainFailed",
    "EmbeddingFailed",
    "EmptyModelInConfig",
    "EventLoopBlocked",
    "GenerateFailed",
    "HealthCheckPayloadFailed",
    "InvalidItem",
    "InvalidTokens",
    "KvEventSourcesFailed",
    "KvEventSourcesNotIdempotent",
    "KvEventsFailed",
    "LoadSourcesFailed",
    "LoadSourcesNotIdempotent",
    "MaxTokensExceeded",
    "MetricsFailed",
    "NoChunksYielded",
    "NoDisaggregatedParams",
    "NoTerminalChunk",
    "ProgressFailed",
    "QueuedStopIgnored",
    "RequestLeaked",
    "RequestsMixed",
    "SecondCleanupFailed",
    "StartFailed",
    "StreamYieldedError",
    "WrongUsage",
)

_HOME = {
    "CheckResult": "engine.report",
    "EngineConformance": "engine_kit",
    "EngineFactory": "engine.bench",
    "PrefillPeer": "engine.peer",
    "Report": "engine.report",
    "cancelling_context": "engine.contexts",
    "mock_context": "engine.contexts",
    "run_conformance": "engine.run",
    **dict.fromkeys(_FAILURES, "engine.failures"),
}

__all__ = [
    "AbortFailed",
    "AnswerRepeated",
    "CancellationIgnored",
    "CancellationNotObserved",
    "CheckResult",
    "ChunkAfterTerminal",
    "CleanupFailed",
    "CleanupWithoutStartFailed",
    "CloseFailed",
    "ConcurrentGenerateFailed",
    "ConformanceFailure",
    "DrainFailed",
    "EmbeddingFailed",
    "EmptyModelInConfig",
    "EngineConformance",
    "EngineFactory",
    "EventLoopBlocked",
    "GenerateFailed",
    "HealthCheckPayloadFailed",
    "InvalidItem",
    "InvalidTokens",
    "KvEventSourcesFailed",
    "KvEventSourcesNotIdempotent",
    "KvEventsFailed",
    "LoadSourcesFailed",
    "LoadSourcesNotIdempotent",
    "MaxTokensExceeded",
    "MetricsFailed",
    "NoChunksYielded",
    "NoDisaggregatedParams",
    "NoTerminalChunk",
    "PrefillPeer",
    "ProgressFailed",
    "QueuedStopIgnored",
    "Report",
    "RequestLeaked",
    "RequestsMixed",
    "SecondCleanupFailed",
    "StartFailed",
    "StreamYieldedError",
    "WrongUsage",
    "cancelling_context",
    "mock_context",
    "run_conformance",
]

if "pytest" in sys.modules:
    import pytest

    # Before any of them is imported: without it a check that fails would say no more than "AssertionError".
    pytest.register_assert_rewrite(
        "dynamo_testing.transport",
        "dynamo_testing.transport_kit",
        "dynamo_testing.events",
        "dynamo_testing.events_kit",
        "dynamo_testing.admission",
        "dynamo_testing.admission_kit",
        "dynamo_testing.router",
        "dynamo_testing.router_kit",
        "dynamo_testing.discovery",
        "dynamo_testing.discovery_kit",
    )


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
