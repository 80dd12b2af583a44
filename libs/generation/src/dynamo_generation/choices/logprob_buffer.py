"""Log-probabilities in step with the text, however the engine cuts its answer into items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamo_core import StreamDecoder, Tokenizer, TopLogprob


class Scored(NamedTuple):
    """Tokens with their log-probabilities, and where in the text of the choice they begin, in characters.

    The lists are equally long.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    top_logprobs: Sequence[Sequence[TopLogprob]]
    offsets: Sequence[int]


class _Held(NamedTuple):
    """A token whose text is held back, and the offset of the text."""

    begin: int
    token_id: int
    logprob: float
    tops: Sequence[TopLogprob]


class LogprobBuffer:
    """Holds the scores of tokens until the client has seen the first character of each.

    A token is told if its text is, wholly or in part: not those of a stop string that was cut off, nor special tokens
    that are not shown. So the texts of all told tokens, joined, are the text of the answer, at most with more at the
    end where a stop string began within a token.
    """

    __slots__ = ("_decoder", "_given", "_held", "_made", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, decoder: StreamDecoder) -> None:
        """Take a `decoder` of its own, which shows the same tokens as that of the answer."""
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._held: list[_Held] = []
        #: Characters that all tokens so far have become for certain, and how many of them the client has.
        self._made = 0
        self._given = 0

    def add(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None,
        top_logprobs: Sequence[Sequence[TopLogprob]] | None,
    ) -> None:
        """Add tokens that belong to the answer. Those that the engine gave no scores for are left out."""
        scored = log_probs is not None and len(log_probs) >= len(token_ids)
        tops = top_logprobs or ()
        for at, token_id in enumerate(token_ids):
            begin = self._made
            text = self._decoder.step((token_id,))
            self._made += len(text)
            if scored and log_probs is not None and (text or self._shows(token_id)):
                self._held.append(_Held(begin, token_id, log_probs[at], tops[at] if at < len(tops) else ()))

    def give(self, text: str, *, ended: bool = False, cut: bool = False) -> Scored | None:
        """Return the scores that belong to text that is given now; None if there are none.

        At the end the rest is given too, unless a stop string was `cut` off.
        """
        self._given += len(text)
        held = self._held
        if ended and not cut:
            count = len(held)
        else:
            count = next((at for at, each in enumerate(held) if each.begin >= self._given), len(held))
        if not count:
            return None
        told, self._held = held[:count], held[count:]
        return Scored(
            [each.token_id for each in told],
            [each.logprob for each in told],
            [each.tops for each in told],
            [each.begin for each in told],
        )

    def _shows(self, token_id: int) -> bool:
        """Return whether a token that became no text yet is part of a character, and not one that is never shown."""
        return self._tokenizer.decode((token_id,)) != ""
