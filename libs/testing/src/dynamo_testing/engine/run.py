"""The runner of the checks: all of them over one engine, or one by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dynamo_testing.engine.bench import NOTHING_PREFILLED, Bench, EngineFactory, Plan, Prefill, Skipped
from dynamo_testing.engine.checks import CHECKS, Check
from dynamo_testing.engine.failures import CancellationNotObserved, ConformanceFailure
from dynamo_testing.engine.report import FAILED, OK, SKIPPED, CheckResult, Report


async def run_conformance(
    factory: EngineFactory,
    *,
    token_ids: Sequence[int] = (1, 2, 3),
    prefill_result: Prefill = NOTHING_PREFILLED,
    start_timeout: float = 120.0,
    request_timeout: float = 60.0,
    cancel_timeout: float = 2.0,
    cleanup_timeout: float = 30.0,
    on_begin: Callable[[Check], None] | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
) -> Report:
    """Hold an engine to its contract, check after check; the first failure ends the run.

    Two engines are made: one that lives through everything, and one that is cleaned up without a start. The engine's
    own role (`WorkerConfig.disaggregation_mode`) decides what it is sent and what it has to answer.

    Args:
        factory: makes a fresh engine each time; may be async.
        token_ids: the prompt of every request.
        prefill_result: what an engine that decodes is given: the fields of a `PrefillResult`, or a function that makes
            one for a request, such as a `PrefillPeer`.
        start_timeout: seconds for `start`.
        request_timeout: seconds for one request, and for anything else that is asked of a running engine.
        cancel_timeout: seconds from the stop of a request to the end of its stream.
        cleanup_timeout: seconds for `cleanup`.
        on_begin: told of each check before it is made.
        on_result: told of each check that has been made, the one that failed too.

    Raises:
        ConformanceFailure: the failure by its own class; its `report` has everything up to it.
        ConfigError: the factory raised it.
    """
    plan = Plan(
        token_ids=tuple(token_ids),
        prefill_result=prefill_result,
        start_timeout=start_timeout,
        request_timeout=request_timeout,
        cancel_timeout=cancel_timeout,
        cleanup_timeout=cleanup_timeout,
    )
    bench, report, begun = Bench(factory, plan), Report(), time.perf_counter()
    failure: ConformanceFailure | None = None
    try:
        for check in CHECKS:
            if on_begin is not None:
                on_begin(check)
            result = await make(check, bench)
            report.checks.append(result)
            if on_result is not None:
                on_result(result)
            failure = result.failure
            if failure is not None:
                raise failure
    finally:
        fault = await bench.aclose()
        report.engine, report.mode = bench.engine_name, bench.mode.value
        report.model = bench.config.model if bench.config is not None else ""
        report.duration = time.perf_counter() - begun
        if failure is not None:
            failure.report = report
            if fault:
                failure.add_note(f"afterwards, {fault}")
    return report


async def make(check: Check, bench: Bench) -> CheckResult:
    """Make one check; a failure is in the result."""
    begun = time.perf_counter()
    failure: ConformanceFailure | None = None
    try:
        outcome, seen = OK, await check.run(bench)
    except Skipped as skipped:
        outcome, seen = SKIPPED, str(skipped)
    except ConformanceFailure as failed:
        failure, outcome, seen = failed, FAILED, failed.seen
        failure.check = check.name
    return CheckResult(check.name, check.promise, outcome, seen, time.perf_counter() - begun, failure)


def blocked(check: Check, seen: str, seconds: float) -> CheckResult:
    """Return the result of a check in which the event loop was blocked for so long that no caller waits any more."""
    cls = check.failures[0]
    failure = CancellationNotObserved(seen, after=seconds) if cls is CancellationNotObserved else cls(seen)
    failure.check = check.name
    return CheckResult(check.name, check.promise, FAILED, seen, seconds, failure)
