"""Where a JSON value ends, in text that comes in pieces, and what is repaired on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_text.json_value import MAX_DEPTH, JsonValue, Progress
from hypothesis import given
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
#: Text that is nearly JSON.
NEARLY = st.text(st.sampled_from('{}[]",:.-+eE019 \\u/ntrulfasé\n\x01'), max_size=14) | st.tuples(
    VALUES.map(json.dumps), st.integers(0, 60), st.text(st.sampled_from('{}[]",:.-+e01 \\'), max_size=2)
).map(lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :])


def read(text: str, sizes: list[int]) -> tuple[Progress, int]:
    """Return how far the reading came and where it stopped, for pieces of these sizes in turn."""
    return told(text, sizes)[:2]


def told(text: str, sizes: list[int]) -> tuple[Progress, int, str, set[str]]:
    """Return the same, with what the value is told as and the kinds of repairs."""
    value, at, turn, out = JsonValue(), 0, 0, ""
    while at < len(text) and value.progress is Progress.OPEN:
        piece = text[at : at + sizes[turn % len(sizes)]]
        turn += 1
        came = value.feed(piece)
        at += came
        out += value.take()
        if came < len(piece):
            break
    return value.progress, at, out + value.give_up(), value.repairs


def is_json(text: str) -> bool:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(VALUES, st.sampled_from([None, 0, 2]), st.lists(st.integers(1, 9), min_size=1))
def test_the_end_of_a_value_is_found_wherever_the_text_is_cut(value: Any, indent: int | None, sizes: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)

    assert read(text + "} and more", sizes) == (Progress.DONE, len(text))


@given(NEARLY)
def test_the_json_scanner_takes_a_text_unrepaired_only_if_it_is_json(text: str) -> None:
    progress, at, out, repairs = told(text + "\n", [100])

    whole = progress is Progress.DONE and not text[at:].strip(" \t\n\r")
    assert (whole and not repairs) == is_json(text)
    assert repairs or out == (text + "\n")[:at]


@given(NEARLY)
def test_a_value_that_was_repaired_is_json(text: str) -> None:
    progress, _, out, _ = told(text + "\n", [100])

    assert progress is not Progress.DONE or is_json(out)


@given(NEARLY, st.lists(st.integers(1, 5), min_size=1))
def test_a_value_reads_the_same_however_the_text_is_cut(text: str, sizes: list[int]) -> None:
    assert told(text, sizes) == told(text, [100])


@given(NEARLY)
def test_a_broken_value_cannot_be_continued_to_json(text: str) -> None:
    progress, at = read(text, [100])

    if progress is Progress.BROKEN:
        endings = ["", '"', "}", "]", '"}', "0", "0}", '":0}', "e", "ull", '0"}']
        assert not any(is_json(text[: at + 1] + ending) for ending in endings)


def test_too_deep_values_are_refused() -> None:
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH, [7])[0] is Progress.DONE
    assert read("[" * 10_000, [7]) == (Progress.BROKEN, MAX_DEPTH)


@pytest.mark.parametrize("text", ["tru!", "01", "-", '{"a" 1}', "[,]", '{"a":1,,}', "{'a':1}", "1.e3", "nan"])
def test_invalid_json_is_refused(text: str) -> None:
    assert not is_json(text)
    progress, at = read(text + " ", [1])
    assert progress is Progress.BROKEN or text[at:].strip()


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ('{"a": "one\ntwo\r\x00"}', {"a": "one\ntwo\r\0"}, "control_character"),
        ('{"a\t": 1}', {"a\t": 1}, "control_character"),
        (r'{"a": "\d+ \. C:\W \u12 \ucafg"}', {"a": r"\d+ \. C:\W \u12 \ucafg"}, "backslash"),
        (r'{"a": "it\'s", "b": "\u12\'"}', {"a": "it's", "b": r"\u12" + "'"}, "backslash"),
        (r'{"a": "\ud83d\d \ud83d\ude00"}', {"a": "\ud83d\\d \U0001f600"}, "backslash"),
        ('{"a": [1, 2 , ] ,\n}', {"a": [1, 2]}, "trailing_comma"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_unambiguous_slips_are_repaired(text: str, value: Any, kind: str, size: int) -> None:
    progress, at, out, repairs = told(text, [size])

    assert (progress, at, repairs) == (Progress.DONE, len(text), {kind})
    assert json.loads(out) == value


def test_text_that_may_need_repair_is_held_back() -> None:
    value = JsonValue()

    value.feed('{"a": "x\\')
    assert value.take() == '{"a": "x'
    value.feed('d", "b": "\\u00e')
    assert value.take() == '\\\\d", "b": "'
    value.feed('9" , ')
    assert value.take() == '\\u00e9" '
    value.feed('"c": 1')
    assert value.take() == ', "c": 1'


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ('{"a": 1', True),
        ('{"a": {"b": [1]}', True),
        *((text, False) for text in ("{", '{"a": "x', '{"a": [1', '{"a": 1,', '{"a":', '{"a": 1.', '{"a": 1}')),
    ],
)
def test_a_single_missing_bracket_is_closed(text: str, closed: bool) -> None:
    value = JsonValue()
    value.feed(text)

    assert value.close() is closed
    assert not closed or is_json(value.take())
