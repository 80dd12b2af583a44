"""Parsers fed in pieces, and their output in a comparable form."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from dynamo_core.contracts.parsers import (
    ContentDelta,
    ParserDelta,
    ReasoningDelta,
    ReasoningParser,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
)

Parser: TypeAlias = ToolCallParser | ReasoningParser


class Thought(NamedTuple):
    """Reasoning, as a check expects it."""

    text: str


class Call(NamedTuple):
    """A call of a tool, as a check expects it."""

    name: str
    arguments: Mapping[str, Any]


class Said(NamedTuple):
    """A call as it came: its arguments are the text."""

    name: str
    arguments: str


#: What became of a text, in order. A plain text is content.
Parsed: TypeAlias = list[str | Thought | Said]


def parse(parser: Parser, pieces: Sequence[str], *, markers: bool = False) -> Parsed:
    """Return what a parser makes of some text, joined. With `markers` the special tokens of the format come as tokens.

    Raises:
        AssertionError: the parser raised, or its deltas do not go together.
    """
    deltas: list[ParserDelta] = []
    malformed = 0
    try:
        if markers:
            parser.has_marker_tokens(frozenset(parser.MARKERS))
        for piece in pieces:
            deltas += parser.feed_marker(piece) if markers and piece in parser.MARKERS else parser.feed(piece)
            assert malformed <= parser.malformed, "the count of malformed calls falls"
            malformed = parser.malformed
        deltas += parser.finish()
        assert malformed <= parser.malformed, "the count of malformed calls falls"
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"the parser raised {type(error).__name__}: {error} for {''.join(pieces)!r}; a parser never raises"
        ) from error
    return joined(deltas)


def at_markers(text: str, markers: Sequence[str]) -> list[str]:
    """Return the text cut before and after each special token of the format, as a model writes it."""
    if not markers:
        return [text]
    pattern = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    return [piece for piece in re.split(f"({pattern})", text) if piece]


def side_by_side(one: Parser, other: Parser, text: str) -> tuple[Parsed, Parsed]:
    """Return what two parsers make of a text that both get letter by letter, in turns."""
    first: list[ParserDelta] = []
    second: list[ParserDelta] = []
    for letter in text:
        first += one.feed(letter)
        second += other.feed(letter)
    return joined(first + one.finish()), joined(second + other.finish())


def joined(deltas: Sequence[ParserDelta]) -> Parsed:
    """Return deltas with neighbours of one kind joined. Ids are left out; order and indexes of calls are checked."""
    out: Parsed = []
    ids: set[str] = set()
    for delta in deltas:
        last = out[-1] if out else None
        match delta:
            case ContentDelta(text):
                out[-1:] = [last + text] if isinstance(last, str) else [*out[-1:], text]
            case ReasoningDelta(text):
                out[-1:] = [Thought(last.text + text)] if isinstance(last, Thought) else [*out[-1:], Thought(text)]
            case ToolCallStart(index, id, name):
                assert index == len(ids), f"the call {name!r} has index {index}, not {len(ids)}"
                assert id, f"the call {name!r} has no id"
                assert id not in ids, f"two calls have the id {id!r}"
                ids.add(id)
                out.append(Said(name, ""))
            case ToolCallArguments(index, text):
                assert index == len(ids) - 1, f"arguments of the call {index}, but {len(ids) - 1} began last"
                assert isinstance(last, Said), "arguments follow something else than their call"
                out[-1] = Said(last.name, last.arguments + text)
            case _:
                raise AssertionError(f"{delta!r} is no delta of a parser")
    return [part for part in out if part not in ("", Thought(""))]


def understood(parsed: Parsed) -> list[str | Thought | Call]:
    """Return the same with arguments as the values that they stand for.

    Raises:
        AssertionError: the arguments of a call are not a JSON object.
    """
    found: list[str | Thought | Call] = []
    for part in parsed:
        if not isinstance(part, Said):
            found.append(part)
            continue
        try:
            arguments = json.loads(part.arguments or "{}")
        except ValueError:
            arguments = None
        assert isinstance(arguments, dict), f"the arguments of {part.name!r} are no JSON object: {part.arguments!r}"
        found.append(Call(part.name, arguments))
    return found


def cuts(text: str, *, seed: int = 0) -> Iterator[list[str]]:
    """Yield ways to cut a text: into characters, into two at every place, and into pieces of any size."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    dice = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(10):
        pieces, at = [""], 0
        while at < len(text):
            size = dice.choice((1, 1, 2, 3, 5, 8, 13, 40))
            pieces.append(text[at : at + size])
            at += size
        yield pieces


def scraps(samples: Sequence[str], *, count: int) -> Iterator[str]:
    """Yield texts that are put together of parts of the samples: markup that begins, breaks off, repeats and nests."""
    dice = random.Random(len(samples))  # noqa: S311 - no secret
    sources = [sample for sample in samples if sample] or ["a text"]
    for _ in range(count):
        parts = []
        for _ in range(dice.randint(1, 6)):
            source = dice.choice(sources)
            start = dice.randrange(len(source))
            parts.append(source[start : start + dice.choice((1, 2, 4, 8, 16, 200))])
        yield "".join(parts)
