"""Token-wise decoding: each id stands for fixed bytes, which are joined as UTF-8.

True for the decoders of nearly all language models: byte-level BPE, and the SentencePiece family, whose only other rule
concerns the start of the text. Then a stream costs one look-up per token and is exact by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo_text.utf8 import Utf8Stream


@dataclass(frozen=True, slots=True)
class PieceRules:
    """The rules by which a decoder turns the strings of a vocabulary into bytes."""

    #: The bytes of one token's string.
    to_bytes: Callable[[str], bytes]
    #: A character that is taken off the start of the text, at most `strip_count` times.
    strip: str = ""
    strip_count: int = 0
    #: The bytes of a string as the first token of a text, if they differ.
    first_to_bytes: Callable[[str], bytes] | None = None


def piece_rules(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """Return the rules of a decoder, given as in ``tokenizer.json``; None if it does not work token by token."""
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return PieceRules(_byte_level)
    if kinds == ["Metaspace"]:
        replacement = parts[0]["replacement"]
        later = _sentence_piece([(replacement, " ")], byte_fallback=False)
        if parts[0]["prepend_scheme"] == "never":
            return PieceRules(later)
        return PieceRules(later, first_to_bytes=_sentence_piece([(replacement, "")], byte_fallback=False))
    return _sequence_rules(parts)


def _sequence_rules(parts: Sequence[Mapping[str, Any]]) -> PieceRules | None:
    """Return rules for the order that SentencePiece conversions write: Replace…, ByteFallback, Fuse, Strip."""
    rest = list(parts)
    replace: list[tuple[str, str]] = []
    while rest and rest[0]["type"] == "Replace":
        part = rest.pop(0)
        literal = part["pattern"].get("String")
        if not literal:
            return None
        replace.append((literal, part["content"]))
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    if byte_fallback:
        rest.pop(0)
    fused = bool(rest) and rest[0]["type"] == "Fuse"
    if fused:
        rest.pop(0)
    to_bytes = _sentence_piece(replace, byte_fallback=byte_fallback)
    if not rest:
        return PieceRules(to_bytes) if replace or byte_fallback or fused else None
    # Before Fuse, Strip would work on each token.
    if not fused or len(rest) > 1 or rest[0]["type"] != "Strip" or rest[0]["stop"]:
        return None
    return PieceRules(to_bytes, strip=rest[0]["content"], strip_count=rest[0]["start"])


class PieceTable(dict[int, bytes]):
    """The bytes of each id, worked out when first needed. Ids that are not in the vocabulary have none."""

    def __init__(self, piece: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._piece: Final = piece

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece(token_id)
        if piece is None:
            return b""  # not kept: there is no end of ids that do not exist
        self[token_id] = piece
        return piece


class PieceStream:
    """Decodes one stream by look-ups in a `PieceTable`."""

    __slots__ = ("_look_up", "_utf8")

    def __init__(self, table: PieceTable) -> None:
        self._look_up = table.__getitem__
        self._utf8 = Utf8Stream()

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; may be empty."""
        if len(token_ids) == 1:
            return self._utf8.feed(self._look_up(token_ids[0]))
        return self._utf8.feed(b"".join(map(self._look_up, token_ids)))

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character becomes U+FFFD."""
        return self._utf8.flush()


class StripStream:
    """A `PieceStream` whose text loses up to `count` times the character `strip` at its start."""

    __slots__ = ("_count", "_pieces", "_strip")

    def __init__(self, table: PieceTable, strip: str, count: int) -> None:
        self._pieces = PieceStream(table)
        self._strip = strip
        self._count = count

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; may be empty."""
        text = self._pieces.step(token_ids)
        return self._stripped(text) if self._count and text else text

    def flush(self) -> str:
        """Return what is left at the end; an incomplete character becomes U+FFFD."""
        return self._pieces.flush()

    def _stripped(self, text: str) -> str:
        start = 0
        while start < len(text) and start < self._count and text[start] == self._strip:
            start += 1
        self._count = self._count - start if start == len(text) else 0
        return text[start:]


class FirstStream:
    """A `PieceStream` in which the first token stands for other bytes than it does later."""

    __slots__ = ("_first", "_pieces", "_table")

    def __init__(self, table: PieceTable, first: PieceTable) -> None:
        self._table = table
        self._first: PieceTable | None = first
        self._pieces = PieceStream(table)

    def step(self, token_ids: Sequence[int]) -> str:
        """Return the text that these ids make certain; may be empty."""
        first = self._first
        if first is None:
            return self._pieces.step(token_ids)
        for at, token_id in enumerate(token_ids):
            if self._table[token_id]:  # not left out
                self._first = None
                return first[token_id].decode() + self._pieces.step(token_ids[at + 1 :])
        return ""

    def flush(self) -> str:
        """Return what is left at the end: nothing, because each token holds whole characters."""
        return self._pieces.flush()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the characters of byte-level vocabularies for bytes: printable Latin-1, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


BYTE_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(BYTE_ALPHABET.__getitem__, token))
    except KeyError:  # an added token, which is written as it is
        return token.encode()


def _sentence_piece(replace: Sequence[tuple[str, str]], *, byte_fallback: bool) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        for old, new in replace:
            token = token.replace(old, new)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        return token.encode()

    return to_bytes
