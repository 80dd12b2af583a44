"""Regular expressions of a model's folder, as far as they are literals with white space and names between.

Such an expression is taken apart, never run: what reads the answers instead of it takes linear time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

_LITERAL = r"(?:\\(?:[^A-Za-z0-9]|n|t)|[^\\.^$*+?{}\[\]|()])"
_PIECE = re.compile(
    rf"(?P<space>(?:\\s|\\n|\s)[*+?]\??)"
    rf"|\(\?P<(?P<name>\w+)>(?P<chars>\[\^?(?:\\.|[^\]\\])+\]|\\[wS]|\.)[*+]\??\)"
    rf"|\(\?:(?P<group>{_LITERAL}+(?:\|{_LITERAL}+)*)\)(?P<maybe>\??)"
    rf"|(?P<end>\$|\\Z)"
    rf"|(?P<other>\|)"
    rf"|(?P<literal>{_LITERAL})"
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t"}
#: The longest expression, and the most ways to match one.
_LONGEST, _MOST = 1024, 16


@dataclass(frozen=True, slots=True)
class Space:
    """Any white space, or none."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of the text."""


@dataclass(frozen=True, slots=True)
class Named:
    """A part with a name: characters of one class."""

    name: str
    chars: str


Piece: TypeAlias = str | Space | Named | End
#: One way to match.
Sequence: TypeAlias = tuple[Piece, ...]


def sequences(pattern: str) -> list[Sequence]:
    """Return all ways to match an expression.

    The end of the text, which ends everything, is left out if it is one of them.

    Raises:
        ValueError: it has something else than literals, white space, choices of literals, and named parts.
    """
    if len(pattern) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    found: list[Sequence] = []
    choices: list[list[Piece]] = []
    for match in _pieces(pattern):
        if match["other"]:
            found += _product(choices)
            choices = []
        else:
            choices.append(_choices(match))
    found += _product(choices)
    if len(found) > _MOST:
        raise ValueError(f"matches in more than {_MOST} ways")
    found = [each for each in dict.fromkeys(found) if each != (End(),)]
    if any(End() in each or not any(isinstance(piece, str) for piece in each) for each in found):
        raise ValueError("matches without a literal")
    return found


def _pieces(pattern: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(pattern):
        match = _PIECE.match(pattern, at)
        if match is None:
            raise ValueError(f"{pattern[at : at + 20]!r} is not among the expressions that are read in pieces")
        yield match
        at = match.end()


def _choices(match: re.Match[str]) -> list[Piece]:
    if match["space"]:
        return [Space()]
    if match["name"]:
        return [Named(match["name"], match["chars"])]
    if match["end"]:
        return [End()]
    if match["group"]:
        # A bar that is escaped is part of a literal.
        literals = [_unescaped(text) for text in re.split(r"(?<!\\)\|", match["group"])]
        return [*literals, *([""] if match["maybe"] else [])]
    return [_unescaped(match["literal"])]


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text)


def _product(choices: list[list[Piece]]) -> list[Sequence]:
    return [_joined(way) for way in itertools.islice(itertools.product(*choices), _MOST + 1)]


def _joined(pieces: Sequence) -> Sequence:
    """Return neighbouring literals as one, without the white space at both ends."""
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(last := joined[-1], str):
            joined[-1] = last + piece
        elif piece:
            joined.append(piece)
    while joined and isinstance(joined[0], Space):
        del joined[0]
    while joined and isinstance(joined[-1], Space):
        del joined[-1]
    return tuple(joined)
