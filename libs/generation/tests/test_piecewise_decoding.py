"""Large bodies are decoded in pieces: to the same values, with the same errors, and without a long hold of the lock."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_generation.bodies import piecewise_decoding as module
from dynamo_generation.bodies.piecewise_decoding import Pieces, free
from hypothesis import given
from hypothesis import strategies as st

#: What JSON may be made of, in any order, so that most of it is no JSON.
FRAGMENTS = ["[", "]", "{", "}", '"', ",", ":", " ", "1", "-2.5", "true", "a", "é", "😀", "\\n", '\\"', "\\\\"]
FRAGMENTS += ["\\u00e9", "\\ud83d\\ude00", "\\", "\n", " " * 9, ",,", '","', "1,2,3,4,5,6,7,8,9", "\\u12", "0" * 20]
LETTERS = ["a", '"', "\\", "é", "😀", "\n", "\x00", "\ud7ff", "long " * 8]
TEXTS = st.lists(st.sampled_from(LETTERS), max_size=40).map("".join)
NAMES = st.text("abc", max_size=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(TEXTS, st.integers(-(2**53), 2**53), st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.lists(st.integers(0, 9), max_size=60),
        st.dictionaries(NAMES, inner, max_size=4),
    ),
    max_leaves=20,
)


@pytest.fixture(params=[8, 12, 32], autouse=True)
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE", request.param)
    monkeypatch.setattr(module, "_PAUSE", 0)


def in_pieces(body: bytes) -> Any:
    pieces = Pieces()
    value = msgspec.json.decode(pieces.cut(body))
    if isinstance(value, dict):
        pieces.restore(value)
    return value


@given(st.dictionaries(NAMES, VALUES, max_size=5), st.booleans(), st.sampled_from([None, 3]))
def test_a_body_decoded_in_pieces_equals_the_whole(value: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()

    assert in_pieces(body) == msgspec.json.decode(body)


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join))
def test_invalid_json_is_refused_in_pieces_too(text: str) -> None:
    body = b'{"a":' + text.encode() + b"}"
    try:
        expected = msgspec.json.decode(body)
    except msgspec.DecodeError:
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
            in_pieces(body)
    else:
        # A name of a field that was cut out is refused.
        with suppress(InvalidArgument):
            assert in_pieces(body) == expected


def test_a_long_name_of_a_field_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="name of a field is too long"):
        in_pieces(json.dumps({"a" * 100: 1}).encode())


def test_too_many_numbers_are_refused_by_the_name_of_their_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUES", 1000)
    body = json.dumps({"stop": list(range(100)), "prompt": list(range(2000)), "n": 1}).encode()

    with pytest.raises(InvalidArgument, match="prompt has too many values: at most 1000") as caught:
        Pieces().cut(body)

    assert caught.value.field == "prompt"


def test_freed_object_has_nothing_left() -> None:
    numbers = list(range(100_000))
    raw = {"prompt": numbers, "model": "m"}

    free(raw)

    assert (raw, numbers) == ({}, [])
