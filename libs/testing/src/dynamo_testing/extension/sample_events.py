"""Request events of every kind, as the frontend of a few strange requests would send them."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.requests.request_events import (
    RequestAdmitted,
    RequestAttempted,
    RequestEvent,
    RequestFinished,
    RequestFirstToken,
    RequestMoved,
    RequestReceived,
    RequestRefused,
    RequestRouted,
)
from dynamo_core.contracts.router import ScoredRank
from dynamo_core.protocol.records import RequestRecord

MODEL = "kit-model"
#: The workers of the model.
WORKERS = (7, 2**63 - 1)
_KNOWN = Principal("kit-key", "kit-tenant", user="Grüße\n🎉", session="kit-session", headers={"x-kit": "a, b"})


def received(request_id: str, principal: Principal = _KNOWN, *, model: str = MODEL) -> RequestReceived:
    """Return the event that a request arrives."""
    return RequestReceived(request_id, time.monotonic(), model, "chat_completions", "stream", principal, None, "0" * 32)


def routed(request_id: str, candidates: int, *, after: str = "") -> RequestRouted:
    """Return the event that a worker is chosen for it; the first of them at first, the other one `after` an error."""
    scored = [ScoredRank(worker, 0, 2, 30, 9, 1, float(cost)) for cost, worker in enumerate(WORKERS)][:candidates]
    instance_id, attempt_id = WORKERS[bool(after)], f"{request_id}-{bool(after):d}"
    return RequestRouted(
        request_id,
        time.monotonic(),
        f"{request_id}-call",
        attempt_id,
        MODEL,
        "aggregated",
        "kv",
        instance_id,
        0,
        2,
        after,
        0.001,
        scored or None,
    )


def finished(request_id: str, error: str = "") -> RequestFinished:
    """Return the event of its end, a failure if there is an error."""
    record = RequestRecord(
        request_id=request_id,
        model=MODEL,
        endpoint="chat_completions",
        request_type="stream",
        status="error" if error else "success",
        error_type=error,
        http_status=503 if error else 200,
        prompt_tokens=30,
        output_tokens=0 if error else 7,
        duration=0.2,
        time_to_first_token=None if error else 0.1,
        finish_reason=None if error else "stop",
        instance_id=None if error else WORKERS[0],
        trace_id="0" * 32,
        span_id="0" * 16,
        x_request_id=None,
    )
    return RequestFinished(request_id, time.monotonic(), record)


def answered(request_id: str, candidates: int) -> Iterator[RequestEvent]:
    """Yield all events of a request that is answered."""
    yield received(request_id)
    yield RequestAdmitted(request_id, time.monotonic(), f"{request_id}-call", MODEL, 30, 0.0)
    yield routed(request_id, candidates)
    yield RequestAttempted(request_id, time.monotonic(), f"{request_id}-0", WORKERS[0], "", "")
    yield RequestFirstToken(request_id, time.monotonic())
    yield finished(request_id)


def of_all_kinds(candidates: int) -> Iterator[RequestEvent]:
    """Return each kind at least once: an answer, a refusal, a move, two choices, and earlier requests."""
    yield from answered("kit-answered", candidates)

    yield received("kit-refused", Principal())
    yield RequestRefused("kit-refused", time.monotonic(), MODEL, "admit", "ServiceOverloaded", "busy", 1.5, 0.1)
    yield finished("kit-refused", "overloaded")
    yield received("kit-turned-away", model="no-such-model")
    yield RequestRefused("kit-turned-away", time.monotonic(), "", "precheck", "QuotaExceeded", "", None, 0.0)
    yield finished("kit-turned-away", "quota_exceeded")

    yield received("kit-moved")
    for call in ("kit-moved-call", "kit-moved-choice"):
        yield RequestAdmitted("kit-moved", time.monotonic(), call, MODEL, 30, 2.0)
    yield routed("kit-moved", candidates)
    yield RequestAttempted("kit-moved", time.monotonic(), "kit-moved-0", WORKERS[0], "Disconnected", "gone")
    yield RequestMoved("kit-moved", time.monotonic(), "kit-moved-call", MODEL, None, 0, "EngineShutdown", "it ends")
    yield routed("kit-moved", 0, after="EngineShutdown")
    yield finished("kit-moved")

    # An extension that starts, or loses events, sees the rest of a request only.
    yield RequestFirstToken("kit-unknown", time.monotonic())
    yield RequestAttempted("kit-unknown", time.monotonic(), "kit-lost", 12345, "", "")
    yield finished("kit-unknown")
    # No event follows for as long as the extension runs.
    yield received("kit-open")
