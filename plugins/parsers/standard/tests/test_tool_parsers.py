"""Calls of tools in the ways of several models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import ContentDelta, ToolCallArguments, ToolCallParser, ToolCallStart
from dynamo_plugin_parsers_standard.json_formats import HermesParser, Llama3JsonParser, MistralParser
from dynamo_plugin_parsers_standard.parameter_formats import PythonicParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALL: list[type[ToolCallParser]] = [HermesParser, Llama3JsonParser, MistralParser, PythonicParser]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL_F = ("call", "f", '{"a": 1}')
CALL_G = ("call", "g", "{}")
JSON_F, JSON_G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'

SOUND: list[tuple[type[ToolCallParser], str, list[tuple[str, ...]]]] = [
    # Hermes and Qwen.
    (HermesParser, f"{OPEN}\n{JSON_F}\n{CLOSE}", [CALL_F]),
    (HermesParser, f"\n\n{OPEN}{JSON_F}{CLOSE}\n{OPEN}\n{JSON_G}{CLOSE}\n", [CALL_F, CALL_G]),
    (HermesParser, f"Let me see.\n{OPEN}{JSON_F}{CLOSE}", [("content", "Let me see.\n"), CALL_F]),
    (HermesParser, f"{OPEN}{JSON_F}{CLOSE} So.", [CALL_F, ("content", " So.")]),
    (HermesParser, f"{OPEN}{JSON_F}\n{CLOSE} So.", [CALL_F, ("content", " So.")]),
    (HermesParser, f"{OPEN}{JSON_F}", [CALL_F]),
    (HermesParser, f"{OPEN}{JSON_F}\n", [CALL_F]),
    (
        HermesParser,
        f'{OPEN}{{"name": "f", "arguments": {{"a": "{CLOSE}{OPEN}"}}}}{CLOSE}',
        [("call", "f", f'{{"a": "{CLOSE}{OPEN}"}}')],
    ),
    (HermesParser, f'{OPEN}{{"arguments": {{"a": 1}}, "name": "f"}}{CLOSE}', [CALL_F]),
    (HermesParser, f'{OPEN}{{"name": "unknown"}}{CLOSE}', [("call", "unknown", "{}")]),
    (HermesParser, f" {OPEN}[{JSON_F}]{CLOSE} ", [CALL_F]),
    (HermesParser, f"{OPEN}[{JSON_F}, {JSON_G}]{CLOSE}", [CALL_F, CALL_G]),
    (HermesParser, f"{OPEN}\n{JSON_F}\n{JSON_G}\n{CLOSE}\nSo.", [CALL_F, CALL_G, ("content", "\nSo.")]),
    # Llama 3.
    (Llama3JsonParser, '{"name": "f", "parameters": {"a": 1}}', [CALL_F]),
    (Llama3JsonParser, f" <|python_tag|> {JSON_F}; {JSON_G}\n", [CALL_F, CALL_G]),
    (Llama3JsonParser, f"{JSON_F}\n{JSON_G}", [CALL_F, CALL_G]),
    (Llama3JsonParser, f"<|python_tag|>{JSON_F}<|python_tag|>{JSON_G}", [CALL_F, CALL_G]),
    (Llama3JsonParser, f"{JSON_F} done {JSON_G}", [CALL_F, ("content", f" done {JSON_G}")]),
    # Mistral.
    (MistralParser, f"[TOOL_CALLS] [{JSON_F}, {JSON_G}]", [CALL_F, CALL_G]),
    (MistralParser, f"[TOOL_CALLS][{JSON_F}", [CALL_F]),
    (MistralParser, f"Well. [TOOL_CALLS] [{JSON_F}] ", [("content", "Well. "), CALL_F]),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [CALL_F, CALL_G]),
    (MistralParser, '[TOOL_CALLS]f{"a": 1}', [CALL_F]),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS] {"a": 1}', [CALL_F]),
    (MistralParser, f"[TOOL_CALLS]{JSON_F}", [CALL_F]),
    # Python.
    (PythonicParser, " [f(a=1), g()] \n", [CALL_F, CALL_G]),
    (PythonicParser, "[g()\n, f(a = 1)]", [CALL_G, CALL_F]),
    (PythonicParser, "[f(a=1)] and so", [CALL_F, ("content", " and so")]),
    (
        PythonicParser,
        """[f(a=")]", b='it\\'s', c=[1.5, -2, {"k": None}], d=true)]""",
        [("call", "f", '{"a": ")]", "b": "it\'s", "c": [1.5, -2, {"k": null}], "d": true}')],
    ),
]

#: Nothing of these is a call.
CONTENT: list[tuple[type[ToolCallParser], str]] = [
    *[
        (cls, text)
        for cls in ALL
        for text in ("", "Hello.", " \n ", " <tool", "[TOOL_CAL", '{"name": 1', "[1, 2]", "[f")
    ],
    (HermesParser, f"{OPEN}{CLOSE}"),
    (HermesParser, f"{OPEN}\n{JSON_F[:-20]}"),
    (HermesParser, f'{OPEN}{{"name": "f", "arguments": [1]}}{CLOSE}'),
    (HermesParser, f"{OPEN}f(a=1){CLOSE}"),
    (HermesParser, JSON_F),
    (Llama3JsonParser, '{"name": "Bob", "arguments": {"age": 3}}'),
    (Llama3JsonParser, '{"name": "Bob"}'),
    (Llama3JsonParser, f"I call {JSON_F}"),
    (Llama3JsonParser, "<|python_tag|>print(1)"),
    (Llama3JsonParser, f"[{JSON_F}]"),
    (MistralParser, "[TOOL_CALLS] hello there"),
    (MistralParser, "[TOOL_CALLS] []"),
    (MistralParser, "[TOOL_CALLS]f[ARGS]5"),
    (MistralParser, "[TOOL_CALLS]f[CALL_ID]1[CALL_ID]2[ARGS]{}"),
    (MistralParser, "[TOOL_CALLS][ARGS]{}"),
    (MistralParser, f"[TOOL_CALLS]{'f' * 300}[ARGS]{{}}"),
    (PythonicParser, "[f(1)]"),
    (PythonicParser, "[f(a=b)]"),
    (PythonicParser, "[f(**{})]"),
    (PythonicParser, "[f(a=1e999)]"),
    (PythonicParser, '[f(a="\\ud800")]'),
    (PythonicParser, "[f(a=1"),
    (PythonicParser, "[h(a=1)]"),
    (PythonicParser, "[f(a=1 if 2 else 3)]"),
    (PythonicParser, f"[f(a={'(' * 300}1{')' * 300})]"),
    (PythonicParser, "f(a=1)"),
]


@pytest.mark.parametrize(("cls", "text", "expected"), SOUND)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_found(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, expected: list[tuple[str, ...]], size: int
) -> None:
    assert parse(cls(tools), text, [size]) == expected


@pytest.mark.parametrize(("cls", "text"), CONTENT)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_is_no_call_is_content_to_the_last_character(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, size: int
) -> None:
    assert parse(cls(tools), text, [size]) == ([("content", text)] if text else [])


@pytest.mark.parametrize(
    ("cls", "text", "expected"),
    [
        (
            HermesParser,
            f'{OPEN}{{"name": "f", "arguments": {{"a": tru!}}}}{CLOSE} x',
            [("call", "f", '{"a": tru'), ("content", f"!}}}}{CLOSE} x")],
        ),
        (HermesParser, f"{OPEN}{JSON_F}}}}}\n{CLOSE}", [CALL_F, ("content", f"}}}}\n{CLOSE}")]),
        (HermesParser, f"{OPEN}{JSON_F}}} x", [CALL_F, ("content", "} x")]),
        (HermesParser, f"{OPEN}{JSON_F}{CLOSE}{CLOSE} x", [CALL_F, ("content", f"{CLOSE} x")]),
        (HermesParser, f"{OPEN}{JSON_F}\n</tool", [CALL_F, ("content", "\n</tool")]),
        (HermesParser, f"{OPEN}{OPEN}{JSON_F}{CLOSE}", [("content", OPEN), CALL_F]),
        (HermesParser, f'{OPEN}{{"name": "f", "arguments": {{"a": "cut', [("call", "f", '{"a": "cut')]),
        (HermesParser, f"{OPEN}x{CLOSE}\n{OPEN}{JSON_F}{CLOSE}", [("content", f"{OPEN}x{CLOSE}\n"), CALL_F]),
        (HermesParser, f"{OPEN}{JSON_F}{CLOSE}\n{OPEN}x", [CALL_F, ("content", f"\n{OPEN}x")]),
        (MistralParser, f"[TOOL_CALLS] [{JSON_F}; {JSON_G}]", [CALL_F, ("content", f"; {JSON_G}]")]),
        (Llama3JsonParser, f'{JSON_F}; {{"name": "Bob"}}', [CALL_F, ("content", '; {"name": "Bob"}')]),
        (PythonicParser, "[f(a=1), g(5)]", [CALL_F, ("content", ", g(5)]")]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_follows_a_break_is_content(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, expected: list[tuple[str, ...]], size: int
) -> None:
    assert parse(cls(tools), text, [size]) == expected


def test_only_what_may_still_be_markup_is_held_back(tools: Any) -> None:
    parser = HermesParser(tools)

    assert parser.feed("See: <") == [ContentDelta("See: ")]
    assert parser.feed("b> <tool_c") == [ContentDelta("<b> ")]
    assert parser.feed("at>") == [ContentDelta("<tool_cat>")]


def test_a_call_begins_with_its_name_and_its_arguments_follow_as_they_are_written(parse: Any, tools: Any) -> None:
    parser = HermesParser(tools)

    assert parser.feed(f'{OPEN}\n{{"name": "f", "argum') == []
    [start, first] = parser.feed('ents": {"a"')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name) == (0, "f")
    assert re.fullmatch(r"call_[0-9a-f]{24}", start.id)
    assert [first, *parser.feed(": [1"), *parser.feed(",  2] }}")] == [
        ToolCallArguments(0, '{"a"'),
        ToolCallArguments(0, ": [1"),
        ToolCallArguments(0, ",  2] }"),
    ]


def test_ids_have_the_form_that_mistral_demands_and_the_models_own_is_kept(tools: Any) -> None:
    starts = MistralParser(tools).feed("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}")

    first, second = [delta.id for delta in starts if isinstance(delta, ToolCallStart)]
    assert re.fullmatch(r"[A-Za-z0-9]{9}", first)
    assert second == "abcdefghi"


TEXT = st.text(st.sampled_from('ab <>[]{}"\n/\\é'), max_size=6)
ARGUMENTS = st.dictionaries(
    st.text(max_size=3), st.text(max_size=8) | st.integers() | st.lists(st.booleans()), max_size=3
)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
#: Pieces of the markup of all parsers, and of what disturbs it.
PARTS = st.sampled_from(
    [
        *(
            OPEN,
            CLOSE,
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "<|python_tag|>",
            "[",
            "]",
            ",",
            ";",
            " ",
            "\n",
            "f",
            "(",
        ),
        *(
            JSON_F,
            JSON_G,
            '{"name": "f", "arguments": ',
            '{"a": 1}',
            "}",
            '"',
            "g()",
            "f(a=1)",
            ")",
            "a",
            "\\",
            "{",
            "<",
        ),
        *(f"{OPEN}{JSON_F}{CLOSE}", f"[TOOL_CALLS] [{JSON_F}]", "[TOOL_CALLS]f[ARGS]{}", "[f(a=1)]"),
    ]
)
BROKEN = st.lists(PARTS | TEXT, max_size=10).map("".join)


def on_broken_text(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test on texts of pieces of all formats, and with sizes to cut them by."""
    over = given(text=BROKEN, sizes=SIZES)(test)
    return settings(suppress_health_check=[HealthCheck.function_scoped_fixture])(over)


@on_broken_text
@pytest.mark.parametrize("cls", ALL)
def test_the_cuts_of_the_text_change_nothing(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, sizes: list[int]
) -> None:
    assert parse(cls(tools), text, sizes) == parse(cls(tools), text)


#: What may be missing between the pieces of an answer, by parser: its markup, names and separators.
MARKUP: dict[type[ToolCallParser], str] = {
    HermesParser: rf'(?:\s|{OPEN}|{CLOSE}|[\[\]{{}}:,]|"(?:name|arguments|f|g)")*+',
    Llama3JsonParser: r'(?:\s|<\|python_tag\|>|[{}:,;]|"(?:name|arguments|f|g)")*+',
    MistralParser: r'(?:\s|\[TOOL_CALLS\]|\[CALL_ID\]\w+|\[ARGS\]|[\[\]{}:,fgab]|"(?:name|arguments|f|g)")*+',
}


def is_markup(cls: type[ToolCallParser], text: str) -> bool:
    return re.fullmatch(MARKUP[cls], text) is not None


@on_broken_text
@pytest.mark.parametrize("cls", MARKUP)
def test_nothing_but_markup_is_lost(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, sizes: list[int]
) -> None:
    # Where the pieces so far may end, with nothing but markup between them.
    ends = {0}
    for _, *words in parse(cls(tools), text, sizes):
        piece = words[-1]
        starts = {at for at in range(len(text) + 1) if text.startswith(piece, at)}
        found = {at + len(piece) for at in starts for end in ends if at >= end and is_markup(cls, text[end:at])}
        # Arguments that the model left out.
        ends = found | ends if piece == "{}" else found
    assert any(is_markup(cls, text[end:]) for end in ends)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3), sizes=SIZES)
@pytest.mark.parametrize("cls", ALL)
def test_calls_come_as_the_model_meant_them(
    parse: Any, tools: Any, cls: type[ToolCallParser], calls: list[tuple[str, dict[str, Any]]], sizes: list[int]
) -> None:
    texts = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    if cls is PythonicParser:
        calls = [(name, {f"k{at}": value for at, value in enumerate(values.values())}) for name, values in calls]
        written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in keys.items())})" for name, keys in calls]
        text = f"[{', '.join(written)}]"
    elif cls is HermesParser:
        text = "\n".join(f"{OPEN}\n{each}\n{CLOSE}" for each in texts)
    elif cls is MistralParser:
        text = f"[TOOL_CALLS] [{', '.join(texts)}]"
    else:
        text = "; ".join(texts)

    parsed = parse(cls(tools), text, sizes)

    assert [(kind, name, json.loads(arguments)) for kind, name, arguments in parsed] == [
        ("call", name, arguments) for name, arguments in calls
    ]
