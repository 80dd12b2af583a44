"""The tokens of random answers."""

from __future__ import annotations

from collections.abc import Container, Iterable

from dynamo_core import BackendError, Tokenizer

from dynamo_plugin_engine_mocker.tokens.noise import WORD


class Vocabulary:
    """Some token ids, and how a number picks one.

    `table` maps every number below `WORD` to an id; where there are more ids than numbers, it is an even sample.
    """

    __slots__ = ("ids", "table")

    def __init__(self, ids: Iterable[int]) -> None:
        self.ids = tuple(ids)
        if not self.ids:
            raise BackendError.InvalidArgument("the tokenizer has no token that a random answer could be drawn from")
        size = len(self.ids)
        self.table = [self.ids[word * size // WORD] for word in range(WORD)]

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, printable: bool) -> Vocabulary:
        """Return the tokens of a tokenizer without its end-of-sequence tokens, or only those that are printable text.

        Look at every token: call it outside the event loop.
        """
        ends = frozenset(tokenizer.eos_token_ids)
        ids = (token for token in range(tokenizer.vocab_size) if token not in ends and tokenizer.token_bytes(token))
        return cls(token for token in ids if not printable or _is_printable(tokenizer, token))

    def draw_except(self, word: int, excluded: Container[int]) -> int:
        """Return the id for a number, or the next one that is not excluded; if all are, they cannot be avoided."""
        size = len(self.ids)
        first = word * size // WORD
        for index in range(first, first + size):
            token = self.ids[index % size]
            if token not in excluded:
                return token
        return self.ids[first]


def _is_printable(tokenizer: Tokenizer, token: int) -> bool:
    try:
        text = tokenizer.token_bytes(token).decode()
    except UnicodeDecodeError:
        return False
    # Special tokens have bytes but decode to nothing.
    return text.isprintable() and tokenizer.decode([token]) != ""
