"""Calls of tools written as JSON, in text that comes in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from dynamo_text.json_calls import CallArguments, CallArray, CallObject, CallReader, CallSink
from dynamo_text.json_value import Progress
from hypothesis import given
from hypothesis import strategies as st


class Told:
    """Keeps what it is told."""

    def __init__(self, *, buffered: bool = False) -> None:
        self.calls: list[tuple[str, str]] = []
        self.repairs: set[str] = set()
        self.buffered = buffered

    def begin_call(self, name: str, id: str | None = None) -> None:
        self.calls.append((name, ""))

    def arguments(self, text: str) -> None:
        name, before = self.calls[-1]
        self.calls[-1] = (name, before + text)

    def repaired(self, kind: str) -> None:
        self.repairs.add(kind)


Make = Callable[[CallSink], CallReader]


def read(
    make: Make, text: str, size: int = 1000, *, buffered: bool = False
) -> tuple[list[tuple[str, str]], Progress, str]:
    """Return the calls, how far the reading came, and what of the text is to be shown as it is."""
    sink = Told(buffered=buffered)
    reader = make(sink)
    at = 0
    while at < len(text) and reader.progress is Progress.OPEN:
        at += reader.feed(text[at : at + size])
    if reader.progress is Progress.OPEN:
        return sink.calls, reader.progress, reader.leftover()
    return sink.calls, reader.progress, reader.unreported() + text[at:]


ARGS = '{"a": [1, {"b": "}"}]}'

SOUND = [
    (f'{{"name": "f", "arguments": {ARGS}}}', ARGS),
    (f'{{"name": "f", "parameters": {ARGS}}}', ARGS),
    (f' {{ "arguments" : {ARGS} , "name" : "f" }}', ARGS),
    (f'{{"type": "function", "x": [{{"name": 1}}], "name": "f", "arguments": {ARGS}, "id": 3}}', ARGS),
    (json.dumps({"name": "f", "arguments": ARGS}), ARGS),
    (json.dumps({"arguments": ARGS, "name": "f"}), ARGS),
    ('{"name": "f", "arguments": null}', "{}"),
    ('{"name": "f", "arguments": ""}', "{}"),
    ('{"name": "f"}', "{}"),
    ('{"n\\u0061me": "\\u0066"}', "{}"),
]


@pytest.mark.parametrize(("text", "arguments"), SOUND)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_object_with_a_name_is_a_call(text: str, arguments: str, size: int) -> None:
    assert read(CallObject, text + "tail", size) == ([("f", arguments)], Progress.DONE, "tail")


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "x",
        '{"name": ""}',
        '{"name": 5}',
        '{"name": "\\ud800"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "no object"}',
        '{"name": "f", "arguments": "{} {}"}',
        '{"name": "f", "arguments": 12}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", ,}',
        '{"name": "f", "name": "g"}',
        "{name: 1}",
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_text_that_is_no_call_is_left_unchanged(text: str, size: int) -> None:
    assert read(CallObject, text, size) == ([], Progress.BROKEN, text)


def test_a_name_that_is_not_accepted_is_no_call() -> None:
    assert read(lambda sink: CallObject(sink, accepts=lambda name: name == "g"), SOUND[0][0])[:2] == (
        [],
        Progress.BROKEN,
    )


def test_a_call_is_emitted_when_its_arguments_begin_and_streams_them() -> None:
    sink = Told()
    reader = CallObject(sink)

    reader.feed('{"name": "f", "arguments": ')
    assert sink.calls == []
    reader.feed("{")
    assert sink.calls == [("f", "{")]
    reader.feed('"a": "x')
    assert sink.calls == [("f", '{"a": "x')]


@pytest.mark.parametrize(
    ("text", "arguments", "shown"),
    [
        ('{"name": "f", "arguments": {"a": tru!}} tail', '{"a": tru', "!}} tail"),
        ('{"name": "f", "arguments": {"a": 1}, oops', '{"a": 1}', ", oops"),
        ('{"name": "f", "arguments": {}, "arguments": {}}', "{}", ', "arguments": {}}'),
    ],
)
def test_text_after_a_broken_emitted_call_is_shown(text: str, arguments: str, shown: str) -> None:
    assert read(CallObject, text, 1) == ([("f", arguments)], Progress.BROKEN, shown)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (CallObject, '{"name": "f", "arguments": {"a": tru!}} tail'),
        (CallObject, '{"name": "f", "arguments": { oops'),
        (CallObject, '{"name": "f", "arguments": {"a"'),
        (CallArray, '[{"name": "f", "arguments": {"a"'),
        (lambda sink: CallArguments(sink, "f", before="f[ARGS]"), '{"a": tru!}'),
        (lambda sink: CallArguments(sink, "f", before="f[ARGS]"), '{"a"'),
    ],
)
def test_buffered_reading_emits_no_incomplete_call(make: Make, text: str, size: int) -> None:
    calls, _, shown = read(make, text, size, buffered=True)

    assert calls == []
    assert shown.removeprefix("f[ARGS]") == text


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("text", "arguments"), SOUND)
def test_buffered_reading_emits_the_same_complete_calls(text: str, arguments: str, size: int) -> None:
    assert read(CallObject, text, size, buffered=True) == read(CallObject, text, size)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"name": "f", "arguments": {"a": 1}', ""),
        ('{"name": "f", "arguments": {"a": 1}, oops', ", oops"),
        ('{"arguments": {"a": 1}, "name": "f"', ""),
    ],
)
def test_arguments_are_whole_although_the_call_around_them_is_not(text: str, shown: str) -> None:
    calls, _, left = read(CallObject, text, 1, buffered=True)

    assert (calls, left) == ([("f", '{"a": 1}')], shown)


def test_only_unemitted_calls_are_shown_at_the_end() -> None:
    assert read(CallObject, '{"name": "f", "arg') == ([], Progress.OPEN, '{"name": "f", "arg')
    assert read(CallObject, '{"name": "f", "arguments": {"a"') == ([("f", '{"a"')], Progress.OPEN, "")
    assert read(CallObject, '{"name": "f", "arguments": {} ') == ([("f", "{}")], Progress.OPEN, "")


def test_keys_after_the_arguments_are_shown_if_the_text_ends_in_them() -> None:
    text = '{"name": "f", "arguments": {}, "a": 1, "id": "x'

    assert read(CallObject, text) == ([("f", "{}")], Progress.OPEN, ', "a": 1, "id": "x')
    assert read(CallArray, f"[{text}") == ([("f", "{}")], Progress.OPEN, ', "a": 1, "id": "x')


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_list_holds_several_calls(size: int) -> None:
    text = '[ {"name": "f", "arguments": {"a": 1}} , {"name":"g"}]'

    assert read(CallArray, text, size) == ([("f", '{"a": 1}'), ("g", "{}")], Progress.DONE, "")


@pytest.mark.parametrize(
    ("text", "calls", "shown"),
    [
        ("[]", 0, "[]"),
        ("[1, 2]", 0, "[1, 2]"),
        ('[{"name": "f"}, 5]', 1, ", 5]"),
        ('[{"name": "f"} {"name": "g"}]', 1, ' {"name": "g"}]'),
        ('[{"name": "f"}, {"nome": "g"}]', 1, ', {"nome": "g"}]'),
        ('[{"name": "f"}, {"na', 1, ', {"na'),
        ('[{"name": "f"}, ', 1, ""),
        ("[", 0, "["),
    ],
)
def test_a_list_that_breaks_off_keeps_its_calls_and_shows_the_rest(text: str, calls: int, shown: str) -> None:
    sink, _, left = read(CallArray, text, 1)

    assert (len(sink), left) == (calls, shown)


def test_bare_arguments_are_reported_under_the_name_read_before_them() -> None:
    def make(sink: CallSink) -> CallReader:
        return CallArguments(sink, "f", before="f[ARGS]")

    assert read(make, ' {"a": 1} tail', 1) == ([("f", '{"a": 1}')], Progress.DONE, " tail")
    assert read(make, " 5", 1) == ([], Progress.BROKEN, "f[ARGS] 5")
    assert read(make, " ", 1) == ([], Progress.OPEN, "f[ARGS] ")


@given(
    st.lists(st.sampled_from(["{", "}", "[", "]", '"name"', '"arguments"', '"f"', ":", ",", " ", "{}", '"x', "1"])),
    st.sampled_from([CallObject, CallArray]),
    st.integers(1, 6),
)
def test_the_reading_does_not_depend_on_where_the_text_is_cut(parts: list[str], make: Make, size: int) -> None:
    text = "".join(parts)

    assert read(make, text, size) == read(make, text)


def bare(sink: CallSink) -> CallReader:
    return CallArguments(sink, "f")


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("make", "text", "calls", "kinds"),
    [
        (bare, '{"a": "x\ny",}', ['{"a": "x\\ny"}'], {"control_character", "trailing_comma"}),
        (CallObject, '{"name": "f", "arguments": {"a": 1,},}', ['{"a": 1}'], {"trailing_comma"}),
        (CallObject, '{"arguments": {"a": "\t"}, "name": "f"}', ['{"a": "\\t"}'], {"control_character"}),
        (CallObject, '{"x\n": "\\.", "name": "f", "arguments": {}}', ["{}"], {"control_character", "backslash"}),
        (
            CallObject,
            json.dumps({"name": "f", "arguments": '{"a": "\\d",'})[:-3] + '}"}',
            ['{"a": "\\\\d"}'],
            {"backslash"},
        ),
        (CallObject, '{"name": "f", "arguments": "{}}"}', ["{}"], {"surplus_bracket"}),
        (CallObject, '{"name": "f", "arguments": "{\\"a\\": 1"}', ['{"a": 1}'], {"missing_bracket"}),
        (CallArray, '[{"name": "f", "arguments": {}}, ]', ["{}"], {"trailing_comma"}),
        (CallArray, '[{"name": "f", "arguments": {}} } , {"name": "f"}]', ["{}", "{}"], {"surplus_bracket"}),
        (CallArray, '[{"name": "f", "arguments": {"a": 1}]', ['{"a": 1}'], {"missing_bracket"}),
    ],
)
def test_slips_in_arguments_and_around_them_are_repaired_and_counted(
    make: Make, text: str, calls: list[str], kinds: set[str], size: int, buffered: bool
) -> None:
    sink = Told(buffered=buffered)
    reader = make(sink)
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])

    assert reader.progress is Progress.DONE
    assert sink.calls == [("f", arguments) for arguments in calls]
    assert sink.repairs == kinds


WITHOUT_ONE_BRACKET: dict[str, Make] = {
    '{"a": 1': bare,
    '{"name": "f", "arguments": {"a": 1}': CallObject,
    '{"name": "f", "arguments": {"a": 1}, "id": "x"': CallObject,
    '[{"name": "f", "arguments": {"a": 1}}': CallArray,
}
WITHOUT_MORE: dict[str, Make] = {
    **dict.fromkeys(('{"a": {"b": 1', '{"a": 1, ', ""), bare),
    **dict.fromkeys(('{"name": "f"', '{"name": "f", "arguments": {"a": 1'), CallObject),
    "[": CallArray,
}


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("text", [*WITHOUT_ONE_BRACKET, *WITHOUT_MORE])
def test_a_call_is_completed_if_one_bracket_is_missing(text: str, buffered: bool) -> None:
    sink = Told(buffered=buffered)
    complete = text in WITHOUT_ONE_BRACKET
    reader = (WITHOUT_ONE_BRACKET if complete else WITHOUT_MORE)[text](sink)
    reader.feed(text)

    assert reader.complete() is complete
    if complete:
        assert reader.progress is Progress.DONE
        assert sink.calls == [("f", '{"a": 1}')]
        assert sink.repairs == {"missing_bracket"}


def test_pending_text_of_cut_off_arguments_is_emitted() -> None:
    for make, text in ((bare, '{"a": 1, '), (CallObject, '{"name": "f", "arguments": {"a": "\\u00')):
        calls, progress, shown = read(make, text, 1)

        assert (progress, shown) == (Progress.OPEN, "")
        assert text.endswith(calls[0][1])
