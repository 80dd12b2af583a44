"""The tokenizer protocol. Token ids are non-negative integers below `vocab_size`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: How many token ids a model without files has: the bytes, and one id each to begin and to end a sequence.
BYTES_VOCAB_SIZE = 258


class StreamDecoder(Protocol):
    """Decodes one stream of token ids piece by piece.

    However the ids are cut into pieces, the texts of all `step` calls and the final `flush`, joined, are the same. A
    text never ends within a character that later ids may complete.
    """

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these ids; may be empty."""

    def flush(self) -> str:
        """Return the rest of the text at the end; an incomplete character becomes U+FFFD."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a sequence, if the model has one."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end a sequence."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Raises:
            InvalidArgument: the text is not valid Unicode (a lone surrogate).
        """

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; ids that are not in the vocabulary are left out."""

    def stream(self, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> StreamDecoder:
        """Return a decoder for one stream of output. Special tokens in `keep` are never skipped.

        A tokenizer may lack the parameter `keep`: parsers of answers then see all special tokens, or none.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; empty if the id is not in the vocabulary."""
