"""A lower bound on the tokens of a text: its bytes, divided by the bytes of the longest token.

The bound holds for a tokenizer of which no step drops text or makes one token of arbitrarily much: no fused or replaced
pieces, no whitespace that is removed, no normalizer that deletes. Any other tokenizer has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_text.text_splitter import state_of, steps_of
from dynamo_text.token_pieces import BYTE_ALPHABET

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

#: What Unicode calls white space: an added token may take any length of it.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
_ASCII_SPACES = _SPACES[:6]
#: Characters whose bytes are counted in one go, so that other threads get their turn.
_SLICE = 1 << 16
#: How many bytes a step makes one of, at most, of a text that is not ASCII; one that is ASCII keeps its bytes.
#: A character has up to four. A composed one stands for up to six per byte: some of two bytes are composed of three.
_PER_BYTE = {"NFC": 6, "NFKC": 6, "NFD": 4, "NFKD": 4, "Lowercase": 4}
_KEEPING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The least number of tokens that texts of one tokenizer have.

    `longest` is the bytes of text that a token stands for at most. A text that is not ASCII may lose bytes before it is
    cut into tokens: of `shrink` bytes one is left at least. The tokens `strips` take white space beside them with them.
    """

    longest: int
    shrink: int = 1
    strips: tuple[str, ...] = ()

    def is_instant(self, text: str) -> bool:
        """Return whether `weight` takes no time, however long the text is."""
        return not self.strips and text.isascii()

    def weight(self, text: str) -> int:
        """Return the bytes of a text that become tokens for certain."""
        if text.isascii():
            weight, spaces, shrink = len(text), _ASCII_SPACES, 1
        else:
            weight, spaces, shrink = _size(text), _SPACES, self.shrink
        if any(token in text for token in self.strips):
            weight -= sum(text.count(space) * len(space.encode()) for space in spaces)
        return weight // shrink

    def weight_of(self, texts: Iterable[str]) -> int:
        """Return the bytes of several texts that become tokens for certain."""
        return sum(map(self.weight, texts))

    def at_least(self, weight: int) -> int:
        """Return the least number of tokens for so many bytes."""
        return -(-weight // self.longest)


def _size(text: str) -> int:
    slices = range(0, len(text), _SLICE)
    return sum(len(text[at : at + _SLICE].encode(errors="surrogatepass")) for at in slices)


def token_bound(library: Library) -> TokenBound | None:
    """Return the bound of a tokenizer; None where it would not be sound, or is not known to be."""
    normalizer, pre_tokenizer = state_of(library.normalizer), state_of(library.pre_tokenizer)
    shrink = _shrink(normalizer)
    steps = steps_of(pre_tokenizer, "pretokenizers")
    if shrink is None or not all(map(_keeps, steps)):
        return None
    always, otherwise = shrink
    byte_level = any(step["type"] == "ByteLevel" for step in steps)
    vocabulary = library.get_vocab(with_added_tokens=False)
    if not _covers(library.model, vocabulary, byte_level=byte_level):
        return None
    size: Callable[[str], int] = len if byte_level else _size
    longest = max(map(size, vocabulary), default=0)
    strips: list[str] = []
    for token in library.get_added_tokens_decoder().values():
        forms = [token.content]
        if token.normalized and library.normalizer is not None:
            if token.lstrip or token.rstrip:
                return None
            forms.append(library.normalizer.normalize_str(token.content))
        longest = max(longest, *map(_size, forms))
        if token.lstrip or token.rstrip:
            strips.append(token.content)
    return TokenBound(max(1, longest) * always, otherwise, tuple(strips))


def _covers(model: Any, vocabulary: Mapping[str, int], *, byte_level: bool) -> bool:
    """Return whether each character becomes a part of some token, and none the unknown one, which may be for many."""
    if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if byte_level:
        return all(char in vocabulary for char in BYTE_ALPHABET)
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _shrink(normalizer: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return how many bytes become one at most: of any text, and in addition of one that is not ASCII."""
    always = otherwise = 1
    for step in steps_of(normalizer, "normalizers"):
        kind = step["type"]
        if kind in _PER_BYTE:
            otherwise *= _PER_BYTE[kind]
        elif kind == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            if not old or not new:
                return None
            always *= -(-len(old.encode()) // len(new.encode()))
        elif kind != "Prepend":
            return None
    return always, otherwise


def _keeps(step: Mapping[str, Any]) -> bool:
    """Return whether a step of the pre-tokenizer keeps all of the text."""
    kind = step["type"]
    return kind in _KEEPING or (kind in ("Split", "Punctuation") and step["behavior"] != "Removed")
