"""The attributes of the span ``engine.generate``. Made only for a span that is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.spans import Span, describe

#: `finish_reason` of a stream whose consumer left before the terminal item, and the text of its status.
DROPPED = "Dropped"
DROPPED_TEXT = "stream dropped before terminal"
#: `error_kind` when the engine gave no stream at all.
SETUP_FAILED = "setup_failed"
#: The text of the status where the engine ended a stream with an error and without a message.
NO_REASON = "the engine gave no reason"

_NAMES = {
    FinishReason.EOS: "EoS",
    FinishReason.STOP: "Stop",
    FinishReason.LENGTH: "Length",
    FinishReason.ERROR: "Error",
    FinishReason.CANCELLED: "Cancelled",
    FinishReason.CONTENT_FILTER: "ContentFilter",
}


class GenerateSpan:
    """A follower of one stream that sets the attributes of its span. `clock` gives seconds."""

    __slots__ = ("_begun", "_clock", "_ctx", "_failed", "_gaps", "_last", "_span", "_terminal", "_tokens")

    def __init__(
        self,
        span: Span,
        request: PreprocessedRequest,
        role: str,
        ctx: EngineContext,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._span = span
        self._ctx = ctx
        self._clock = clock
        self._begun = clock()
        self._last: float | None = None
        #: Seconds between the chunks that were not empty.
        self._gaps: list[float] = []
        self._tokens = 0
        self._terminal = False
        self._failed = False
        span.set_attributes(
            {"model": request.model, "input_tokens": len(request.token_ids), "disagg_role": role, "request_id": ctx.id}
        )
        link = request.migration_link
        if link is not None:
            span.set_attributes({"migration_trace_id": link.trace_id, "migration_span_id": link.span_id})
            span.add_link(link)

    def item(self, item: LLMEngineOutput) -> None:
        """Record an item that the engine yielded."""
        if not_empty(item):
            now = self._clock()
            if self._last is None:
                self._span.set_attribute("ttft_ms", _milliseconds(now - self._begun))
            else:
                self._gaps.append(now - self._last)
            self._last = now
            self._tokens += len(item.token_ids)
        if item.finish_reason is not None:
            self._terminal = True
            self._span.set_attribute("finish_reason", _NAMES.get(item.finish_reason, str(item.finish_reason)))
            if item.finish_reason is FinishReason.ERROR:
                self._span.set_error(item.error_message or NO_REASON)

    def failed(self, error: DynamoError, *, setup: bool) -> None:
        """Record that the stream ended with an error; `setup` if the engine gave none at all."""
        self._failed = True
        self._span.set_attribute("error_kind", SETUP_FAILED if setup else error.kind)
        self._span.set_error(describe(error))

    def ended(self) -> None:
        """Record that the stream has ended, in whichever way."""
        span = self._span
        dropped = not (self._terminal or self._failed)
        span.set_attributes({"output_tokens": self._tokens, "cancelled": dropped or self._ctx.is_stopped()})
        if dropped:
            span.set_attribute("finish_reason", DROPPED)
            span.set_error(DROPPED_TEXT)
        if self._gaps:
            gaps = sorted(self._gaps)
            span.set_attributes(
                {
                    "avg_itl_ms": _milliseconds(sum(gaps) / len(gaps)),
                    "itl_p50_ms": _milliseconds(nearest_rank(gaps, 0.5)),
                    "itl_p99_ms": _milliseconds(nearest_rank(gaps, 0.99)),
                    "itl_max_ms": _milliseconds(gaps[-1]),
                }
            )


def not_empty(item: LLMEngineOutput) -> bool:
    """Return whether an item holds a part of the answer."""
    return bool(item.token_ids or item.text or item.delta)


def nearest_rank(ordered: list[float], share: float) -> float:
    """Return the value at a share of an ordered, not empty list: the nearest rank, halves rounded up."""
    return ordered[int((len(ordered) - 1) * share + 0.5)]


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 2)
