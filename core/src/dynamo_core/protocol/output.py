"""The output of an engine: `LLMEngineOutput`, its constructors, and the merging of pending items."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_core.protocol.request import TraceLink


class FinishReason(enum.StrEnum):
    """Why a stream ended. API clients get ``stop`` for both `EOS` and `STOP`."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    CANCELLED = "cancelled"
    CONTENT_FILTER = "content_filter"

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        # The spelling of some engines; it is always written as `cancelled`.
        return cls.CANCELLED if value == "abort" else None

    def to_openai(self) -> str:
        """Return the name of the reason in the OpenAI API."""
        return _OPENAI_REASON[self]


_OPENAI_REASON = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ERROR: "stop",
    FinishReason.CANCELLED: "stop",
    FinishReason.CONTENT_FILTER: "content_filter",
}


class CompletionUsage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Token counts of one request.

    `reasoning_tokens` are those of the completion that were reasoning. Only engines with `model_input: text` set it: in
    tokens the frontend finds the reasoning itself.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class TopLogprob(msgspec.Struct, omit_defaults=True, gc=False):
    """One alternative at one position. `rank` counts from 1, the most likely."""

    token_id: int
    logprob: float
    rank: int = 0


class LLMEngineOutput(msgspec.Struct, omit_defaults=True):
    """One step of an answer. `finish_reason` is set on the last item, the terminal, and on no other.

    An item holds what is new since the item before.
    """

    #: The new tokens.
    token_ids: list[int] = []
    #: On the terminal only: `stop`, `length`, `eos`, `cancelled` (also read from `abort`), `error`, `content_filter`.
    finish_reason: FinishReason | None = None
    #: The choice, from 0.
    index: int = 0
    #: New text, for `model_input: text`.
    text: str | None = None
    #: If the request asks for them: one number, and one list of `TopLogprob`, per new token; and their sum so far.
    log_probs: list[float] | None = None
    top_logprobs: list[list[TopLogprob]] | None = None
    cum_log_probs: float | None = None
    #: The stop string or token id that was met.
    stop_reason: str | int | None = None
    #: The message of a terminal with reason `error`.
    error_message: str | None = None
    #: The counts of tokens, as `CompletionUsage`.
    completion_usage: CompletionUsage | None = None
    #: In the prefill role, on the terminal: the handoff for the decode engine.
    disaggregated_params: Any = None
    #: The framework's own.
    worker_trace_link: TraceLink | None = None
    #: For `model_input: text`: a ready message delta, passed on as it is, and the `logprobs` of the API for the text.
    delta: dict[str, Any] | None = None
    text_logprobs: dict[str, Any] | None = None

    @classmethod
    def stop(cls) -> LLMEngineOutput:
        """Return a terminal: a stop condition was met."""
        return cls(finish_reason=FinishReason.STOP)

    @classmethod
    def length(cls) -> LLMEngineOutput:
        """Return a terminal: the token limit was reached."""
        return cls(finish_reason=FinishReason.LENGTH)

    @classmethod
    def cancelled(cls) -> LLMEngineOutput:
        """Return a terminal: the engine saw the request cancelled."""
        return cls(finish_reason=FinishReason.CANCELLED)

    @classmethod
    def error(cls, message: str) -> LLMEngineOutput:
        """Return a terminal that carries a failure as text. Raising a `BackendError` instead keeps its type."""
        return cls(finish_reason=FinishReason.ERROR, error_message=message)

    def with_tokens(self, token_ids: Sequence[int]) -> LLMEngineOutput:
        """Set the new tokens and return the item itself."""
        self.token_ids = list(token_ids)
        return self

    def with_usage(self, usage: CompletionUsage) -> LLMEngineOutput:
        """Set the usage and return the item itself."""
        self.completion_usage = usage
        return self


class chunk:  # noqa: N801 - reads as a namespace: chunk.token(7)
    """Makes non-terminal items."""

    @staticmethod
    def token(token_id: int) -> LLMEngineOutput:
        """Return an item with one new token."""
        return LLMEngineOutput([token_id])

    @staticmethod
    def tokens(token_ids: Sequence[int]) -> LLMEngineOutput:
        """Return an item with several new tokens."""
        return LLMEngineOutput(list(token_ids))


def usage(prompt_tokens: int, completion_tokens: int) -> CompletionUsage:
    """Return usage with the total filled in."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def merge_outputs(items: Sequence[LLMEngineOutput]) -> list[LLMEngineOutput]:
    """Merge the pending items of one stream: neighbours of the same choice become one item.

    Tokens, texts and log-probabilities are joined in order; the last finish reason, usage and engine data win. Items
    with a ready-made `delta` or `text_logprobs` are never merged. The given items are left as they are.
    """
    if len(items) == 1:
        return list(items)
    merged: list[LLMEngineOutput] = []
    fresh = False
    for item in items:
        last = merged[-1] if merged else None
        if (
            last is None
            or last.index != item.index
            or last.finish_reason is not None
            or last.delta is not None
            or item.delta is not None
            or last.text_logprobs is not None
            or item.text_logprobs is not None
        ):
            merged.append(item)
            fresh = False
            continue
        if not fresh:
            last = merged[-1] = _copy(last)
            fresh = True
        _append(last, item)
    return merged


def _copy(item: LLMEngineOutput) -> LLMEngineOutput:
    copy = LLMEngineOutput(item.token_ids.copy(), None, item.index, item.text)
    copy.log_probs = None if item.log_probs is None else item.log_probs.copy()
    copy.top_logprobs = None if item.top_logprobs is None else item.top_logprobs.copy()
    copy.cum_log_probs = item.cum_log_probs
    copy.stop_reason = item.stop_reason
    copy.error_message = item.error_message
    copy.completion_usage = item.completion_usage
    copy.disaggregated_params = item.disaggregated_params
    copy.worker_trace_link = item.worker_trace_link
    return copy


def _append(into: LLMEngineOutput, item: LLMEngineOutput) -> None:
    into.token_ids += item.token_ids
    into.finish_reason = item.finish_reason
    if item.text is not None:
        into.text = item.text if into.text is None else into.text + item.text
    if item.log_probs is not None:
        into.log_probs = (into.log_probs or []) + item.log_probs
    if item.top_logprobs is not None:
        into.top_logprobs = (into.top_logprobs or []) + item.top_logprobs
    if item.cum_log_probs is not None:
        into.cum_log_probs = item.cum_log_probs
    if item.stop_reason is not None:
        into.stop_reason = item.stop_reason
    if item.error_message is not None:
        into.error_message = item.error_message
    if item.completion_usage is not None:
        into.completion_usage = item.completion_usage
    if item.disaggregated_params is not None:
        into.disaggregated_params = item.disaggregated_params
    if item.worker_trace_link is not None and into.worker_trace_link is None:
        into.worker_trace_link = item.worker_trace_link
