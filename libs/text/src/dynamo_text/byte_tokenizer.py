"""The byte tokenizer: no files, no training, every text reversible. For tests, the mocker and models without a path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_core import BYTES_VOCAB_SIZE

from dynamo_text.encode_limit import EncodeLimit
from dynamo_text.token_bound import TokenBound
from dynamo_text.utf8 import Utf8Stream, to_utf8

BOS = 256
EOS = 257

_SPECIAL = {BOS: b"<s>", EOS: b"</s>"}

#: How many bytes become ids in one go, so that other threads get their turn while a huge text is encoded.
_SLICE = 1 << 18


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text; 256 begins and 257 ends a sequence.

    `encode` never adds a special id, whatever it is asked: then what an engine echoes is the text it was given. No
    text encodes to a special id either. Ids are shown as ``<s>`` and ``</s>`` where special tokens are wanted.
    """

    vocab_size = BYTES_VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    token_bound: TokenBound | None = TokenBound(1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return one id per byte of the UTF-8 text.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
        """
        data = to_utf8(text)
        if len(data) <= _SLICE:
            return list(data)
        ids: list[int] = []
        for at in range(0, len(data), _SLICE):
            ids += data[at : at + _SLICE]
        return ids

    def encode_within(self, text: str, limit: EncodeLimit | None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            TextTooLong: it has more tokens than `limit` allows.
            EncodingCancelled: the ids are not wanted any more.
        """
        if limit is not None:
            limit.check(TokenBound(1).weight(text))
        return self.encode(text, add_special_tokens=add_special_tokens)

    def beginning(self, text: str, limit: EncodeLimit) -> str:
        """Return the beginning of a text whose first tokens, as many as `limit` allows, are those of the text."""
        return text[: limit.tokens]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Bytes that are not UTF-8 become U+FFFD, ids that are not in the vocabulary are left out.
        """
        return _join(token_ids, {} if skip_special_tokens else _SPECIAL).decode(errors="replace")

    def stream(self, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> ByteStream:
        """Return a decoder for one stream of output. Special tokens in `keep` are never skipped."""
        return ByteStream(skip_special_tokens, keep)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte itself, or the name of a special id; empty if the id is not in the vocabulary."""
        if 0 <= token_id < BOS:
            return bytes((token_id,))
        return _SPECIAL.get(token_id, b"")


class ByteStream:
    """Decodes one stream of byte ids."""

    __slots__ = ("_special", "_utf8")

    def __init__(self, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> None:
        self._special = {
            token_id: text for token_id, text in _SPECIAL.items() if token_id in keep or not skip_special_tokens
        }
        self._utf8 = Utf8Stream()

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; may be empty."""
        return self._utf8.feed(_join(token_ids, self._special))

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character becomes U+FFFD."""
        return self._utf8.flush()


def _join(token_ids: Sequence[int], special: Mapping[int, bytes]) -> bytes:
    try:
        # `iter`, because an array of wider numbers would give its memory instead of its values.
        return bytes(iter(token_ids))
    except ValueError:
        return b"".join(
            bytes((token_id,)) if 0 <= token_id < BOS else special.get(token_id, b"") for token_id in token_ids
        )
