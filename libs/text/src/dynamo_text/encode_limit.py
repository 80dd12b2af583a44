"""Limits on the length of encoded text, and the errors beyond them."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes that may be encoded at once for want of a place to cut; a tokenizer takes some 150 times that in memory.
MAX_STRETCH = 1 << 20


class TextTooLong(Exception):
    """A text has too many tokens: at least this many; None where unknown because the text cannot be cut."""

    def __init__(self, tokens: int | None) -> None:
        super().__init__(tokens)
        self.tokens = tokens


class EncodingCancelled(Exception):
    """The ids of a text are not wanted any more."""


@dataclass(slots=True)
class EncodeLimit:
    """The limit of a text's tokens, and of its bytes without a place to cut.

    `given_up` may be set from another thread, and ends the work soon.
    """

    tokens: int
    stretch: int = MAX_STRETCH
    given_up: bool = False

    def check(self, tokens: int) -> None:
        """Check that the work goes on, of a text that has at least so many tokens.

        Raises:
            TextTooLong: these are too many.
            EncodingCancelled: the ids are not wanted any more.
        """
        if tokens > self.tokens:
            raise TextTooLong(tokens)
        if self.given_up:
            raise EncodingCancelled
