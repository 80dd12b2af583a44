"""What a request has been given so far: all that another worker needs to go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.request import TraceLink


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
        log = TokenLog(self._most)
        log._dropped = self._dropped
        log.tokens = self.tokens.copy()
        log.link, log.finished, log.other = self.link, self.finished, self.other
        log.cached_tokens, log.cum_log_probs = self.cached_tokens, self.cum_log_probs
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
