"""The bounds of a body are found in its bytes: as a parser of one byte at a time would, and in linear time."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_generation.bodies import bounds, json_structure
from dynamo_generation.bodies.bounds import check_bounds
from dynamo_generation.bodies.decode import parse_object
from dynamo_generation.bodies.json_structure import outermost_names
from hypothesis import given
from hypothesis import strategies as st

BOUNDS = {"MAX_DEPTH": 4, "MAX_CONTAINERS": 7, "MAX_STRINGS": 6, "MAX_VALUES": 9}
WORDS = {"MAX_DEPTH": "nested too deeply", "MAX_CONTAINERS": "lists and objects:", "MAX_STRINGS": "too many texts"}
NAMES = st.sampled_from(["a", "b", "", '"', "\\", '\\"', "a\\", "{", "]", ":", ",", "é", "\n"])
VALUES = st.recursive(
    st.none() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
#: Bytes that may be of a JSON text, and more often are of none.
SOUP = st.lists(st.sampled_from([b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b" ", b"a"]), max_size=60)


@contextmanager
def small(piece: int) -> Iterator[None]:
    """Yield bounds that a short text passes, and pieces of a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, most in BOUNDS.items():
            patch.setattr(bounds, name, most)
        patch.setattr(bounds, "SHORT", 0)
        patch.setattr(json_structure, "PIECE", piece)
        patch.setattr(json_structure, "NAMED_PIECE", piece)
        yield


class Counted:
    """A text read byte by byte, as long as it can still be JSON."""

    def __init__(self, text: bytes) -> None:
        self.most = dict.fromkeys(BOUNDS, 0)
        depth = quotes = containers = values = 0
        inside = escaped = False
        for char in text.decode():
            if inside:
                quotes += char == '"' and not escaped
                inside = char != '"' or escaped
                escaped = char == "\\" and not escaped
                continue
            quotes += char == '"'
            inside = char == '"'
            values += char == ","
            containers += char in "[{"
            depth += (char in "[{") - (char in "]}")
            self.most["MAX_DEPTH"] = max(depth, self.most["MAX_DEPTH"])
            if depth < 0 or char == "\\":
                break
        self.most |= {"MAX_CONTAINERS": containers, "MAX_STRINGS": (quotes + 1) // 2, "MAX_VALUES": values}

    def passed(self) -> set[str]:
        return {name for name, most in BOUNDS.items() if self.most[name] > most}


def verdict(text: bytes, check: Callable[[bytes], Any] = check_bounds) -> str:
    try:
        check(text)
    except InvalidArgument as error:
        return str(error)
    return ""


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 9) | st.just(10_000))
def test_a_json_text_is_refused_exactly_if_it_passes_a_bound(
    value: Any, indent: int | None, ascii: bool, piece: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode()
    passed = Counted(text).passed()

    with small(piece):
        told = verdict(text)

    assert bool(told) is bool(passed)
    assert not told or any(WORDS.get(name, "too many values") in told for name in passed)


@given(SOUP, st.integers(1, 9))
def test_bytes_that_are_no_json_are_refused_by_the_bounds_or_by_the_parser(soup: list[bytes], piece: int) -> None:
    text = b"".join(soup)
    passed = Counted(text).passed()

    with small(piece):
        told, refused = verdict(text), verdict(text, parse_object)

    try:
        sound = isinstance(json.loads(text), dict)
    except ValueError:
        sound = False
    assert bool(refused) is (not sound or bool(passed))
    assert not passed or refused
    assert not sound or bool(told) is bool(passed)


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.sampled_from(["", " ", "\n\t"]), st.integers(1, 9))
def test_the_outermost_names_are_those_of_the_parser_with_their_places(
    pairs: list[tuple[str, Any]], space: str, piece: int
) -> None:
    fields = [f"{json.dumps(name)}{space}:{space}{json.dumps(value)}" for name, value in pairs]
    text = (space + "{" + f"{space},".join(fields) + "}").encode()

    with small(piece):
        found = list(outermost_names(text, 100))

    assert [json.loads(name) for _, name in found] == [name for name, _ in pairs]
    assert all(text[:end].endswith(name) for end, name in found)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"a": [1, 2], "b": ' + b"[" * 101, "b"),
        (b'{"a": "' + b"[" * 200 + b'", "b\\"": {"c": ' + b"[" * 101, 'b"'),
        (b'{"a": [], "c": [' + b"[]," * 60_000 + b'1], "b": ' + b"[" * 101, "c"),
        (b'{"a": [' + b"[]," * 30_000 + b'1], "b": [' + b"[]," * 21_000 + b"1]}", "a"),
        (b'{"a": {"b": ["' + b'","' * 260_000 + b'"]}}', "a"),
        # To look for the field would take longer than to refuse the body.
        (b"{" + b'"a":"",' * 130_000 + b'"b": ' + b"[" * 101, None),
        (b"[" * 101, None),
        (b'{"a', None),
    ],
)
def test_the_field_that_passes_a_bound_is_named(body: bytes, field: str | None) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_object(body)

    assert raised.value.field == field


#: What a body is filled with, behind one of these beginnings and before one of these ends.
FILLINGS = [
    b'\\"',
    b"\\",
    b"\\\\",
    b'"',
    b'""',
    b'"a',
    b'"a":1,',
    b"[",
    b"]",
    b"[]",
    b"{}",
    b",",
    b":",
    b"1,",
    b" ",
    b"x",
]
BEGINNINGS = [b"", b'{"a":"', b'{"a":[', b'{"a"']
ENDS = [b"", b"[" * 101, b'","a":1}', b"]}", b"NaN]}"]


def cost(body: bytes) -> float:
    """Return the seconds of processor time that refusing or reading it takes."""
    begun = time.process_time()
    verdict(body, parse_object)
    return time.process_time() - begun


def is_linear(once: bytes, twice: bytes) -> bool:
    """Return whether the second costs about twice the first. Other work on the machine may spoil a try."""
    # The sum allows for the first share, which is what any call takes.
    return any(cost(twice) <= 3 * cost(once) + 0.002 for _ in range(5))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(30_000, id="read on the loop"),
        pytest.param(3_000_000, id="beyond all bounds", marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
def test_twice_the_body_takes_about_twice_the_time(size: int) -> None:
    slow = []
    for beginning, filling, end in itertools.product(BEGINNINGS, FILLINGS, ENDS):
        count = size // len(filling)
        if not is_linear(*(beginning + filling * number + end for number in (count, 2 * count))):
            slow.append((beginning, filling, end))

    assert not slow
