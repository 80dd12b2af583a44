"""What a request has been given so far, and how another worker goes on from there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_core.contracts.call import Sink
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import CompletionUsage, FinishReason, LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import PreprocessedRequest, TraceLink


class TokenLog:
    """Told every batch that the reader takes, over all attempts. Holds up to `most` tokens, then none at all.

    `overlong` is called once, when there are more.
    """

    __slots__ = (
        "_dropped",
        "_most",
        "_overlong",
        "cached_tokens",
        "cum_log_probs",
        "finished",
        "link",
        "other",
        "tokens",
    )

    def __init__(self, most: int | None = None, overlong: Callable[[], None] | None = None) -> None:
        self._most = most
        self._overlong = overlong
        self._dropped = 0
        self.tokens: list[int] = []
        #: Where the last worker's span can be found.
        self.link: TraceLink | None = None
        #: Tokens of the prompt that the first worker found in its cache, if it has said so: what later ones say is made
        #: to say the same.
        self.cached_tokens: int | None = None
        self.cum_log_probs: float | None = None
        #: Whether the terminal item has come.
        self.finished = False
        #: Whether something came that is no token of a single answer, and so cannot be told to another worker.
        self.other = False

    def observe(self, batch: Sequence[LLMEngineOutput]) -> None:
        """Takes down a batch."""
        tokens = self.tokens
        for item in batch:
            tokens += item.token_ids
            if item.delta is not None or item.index:
                self.other = True
            if item.worker_trace_link is not None:
                self.link = item.worker_trace_link
            if item.cum_log_probs is not None:
                self.cum_log_probs = item.cum_log_probs
            if item.completion_usage is not None:
                self.cached_tokens = item.completion_usage.cached_tokens
            if item.finish_reason is not None:
                self.finished = True
        if self._most is not None and len(tokens) > self._most:
            self._drop()

    def with_ahead(self, items: Sequence[LLMEngineOutput]) -> TokenLog:
        """What this one will be when the reader has taken `items`, which have arrived."""
        log = copy.copy(self)
        log._overlong, log.tokens = None, self.tokens.copy()
        log.observe(items)
        return log

    @property
    def output_tokens(self) -> int:
        """How many tokens came, held or not."""
        return self._dropped + len(self.tokens)

    @property
    def overlong(self) -> bool:
        """Whether there were too many to hold."""
        return self._dropped > 0

    @property
    def empty(self) -> bool:
        """Whether nothing of an answer has come."""
        return not (self.tokens or self._dropped or self.other or self.finished)

    def _drop(self) -> None:
        if not self._dropped and self._overlong is not None:
            self._overlong()
        self._dropped += len(self.tokens)
        self.tokens.clear()
        self._most = 0


class ContinuedSink:
    """Makes what the next worker says a part of one answer: its counts are those of its own prompt and tokens."""

    __slots__ = ("_before", "_cached_tokens", "_cum_log_probs", "_sink")

    def __init__(self, sink: Sink, seen: TokenLog) -> None:
        self._sink = sink
        self._before = len(seen.tokens)
        self._cached_tokens = seen.cached_tokens
        self._cum_log_probs = seen.cum_log_probs

    def data(self, item: LLMEngineOutput) -> None:
        changes: dict[str, Any] = {}
        usage = item.completion_usage
        if usage is not None:
            prompt = max(usage.prompt_tokens - self._before, 0)
            answer = usage.completion_tokens + self._before
            changes["completion_usage"] = CompletionUsage(
                prompt_tokens=prompt,
                completion_tokens=answer,
                total_tokens=prompt + answer,
                cached_tokens=self._cached_tokens,
            )
        if item.cum_log_probs is not None and self._cum_log_probs is not None:
            changes["cum_log_probs"] = self._cum_log_probs + item.cum_log_probs
        # A copy: engines may yield the same object to many.
        self._sink.data(msgspec.structs.replace(item, **changes) if changes else item)

    def event(self, item: Annotated[Any]) -> None:
        self._sink.event(item)

    def closed(self, error: DynamoError | None) -> None:
        self._sink.closed(error)


def migration_blocker(request: PreprocessedRequest, card: ModelCard) -> str | None:
    """Why an answer to this request can never go on at another worker; None if it can."""
    options = request.sampling_options
    if card.model_input == "text":
        return "its engine takes text"
    if options.guided_decoding is not None:
        return "its answer is guided, and the state of the guide is the engine's"
    if (options.n or 1) > 1 or (options.best_of or 1) > 1 or options.use_beam_search:
        return "its engine makes several answers at once"
    return None


def implied_finish_reason(
    request: PreprocessedRequest, tokens: list[int], context_length: int | None
) -> FinishReason | None:
    """How an answer that has come as far as `tokens` has ended, if only its terminal is missing; else None."""
    limits = request.stop_conditions
    if limits.max_tokens is not None and len(tokens) >= limits.max_tokens:
        return FinishReason.LENGTH
    if context_length is not None and len(request.token_ids) + len(tokens) >= context_length:
        return FinishReason.LENGTH
    if tokens and not limits.ignore_eos and len(tokens) >= (limits.min_tokens or 0):
        if tokens[-1] in request.eos_token_ids:
            return FinishReason.EOS
        if tokens[-1] in (limits.stop_token_ids or ()) or tokens[-1] in (limits.stop_token_ids_hidden or ()):
            return FinishReason.STOP
    return None


def continued(request: PreprocessedRequest, seen: TokenLog) -> PreprocessedRequest:
    """What a worker is asked so that it goes on after the tokens that were seen."""
    limits, count = request.stop_conditions, len(seen.tokens)
    return msgspec.structs.replace(
        request,
        token_ids=[*request.token_ids, *seen.tokens],
        stop_conditions=msgspec.structs.replace(
            limits,
            max_tokens=_less(limits.max_tokens, count),
            min_tokens=_less(limits.min_tokens, count),
            max_thinking_tokens=_less(limits.max_thinking_tokens, count),
        ),
        migration_link=seen.link or request.migration_link,
    )


def _less(limit: int | None, count: int) -> int | None:
    return None if limit is None else max(limit - count, 0)
