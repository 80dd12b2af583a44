"""Sources of the tokens of an answer."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from dynamo_plugin_engine_mocker.tokens.noise import BLOCK, noise
from dynamo_plugin_engine_mocker.tokens.vocabulary import Vocabulary

_TOKENS = b"tokens"


class TokenSource(Protocol):
    """Gives the tokens of one answer in order."""

    def next_tokens(self) -> tuple[Sequence[int], bool]:
        """Return some more tokens, and whether these are the last. Not asked again after the last."""


class RandomSource:
    """An endless answer whose token at a position depends only on that position and the seed.

    So an answer can be cut anywhere: a request whose prompt is the old prompt and the tokens so far goes on with the
    same tokens. Before position `free_from`, no token in `excluded` is drawn.
    """

    __slots__ = ("_excluded", "_free_from", "_position", "_seed", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, seed: int, position: int, *, excluded: Container[int] = (), free_from: int = 0
    ) -> None:
        self._vocabulary = vocabulary
        self._seed = seed
        self._position = position
        self._excluded = excluded
        self._free_from = free_from

    def next_tokens(self) -> tuple[Sequence[int], bool]:
        """Return the tokens up to the end of the block of positions."""
        position = self._position
        block, offset = divmod(position, BLOCK)
        words = noise(_TOKENS, self._seed, block)[offset:]
        self._position = position + len(words)
        if position >= self._free_from:
            table = self._vocabulary.table
            return [table[word] for word in words], False
        guarded = min(len(words), self._free_from - position)
        tokens = [self._vocabulary.draw_except(word, self._excluded) for word in words[:guarded]]
        tokens += [self._vocabulary.table[word] for word in words[guarded:]]
        return tokens, False


class FixedSource:
    """An answer that is known beforehand: an echo or a script."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def next_tokens(self) -> tuple[Sequence[int], bool]:
        """Return all of it."""
        return self._tokens, True
