"""Calls of tools in the ways of several models."""

from __future__ import annotations

import re
from typing import Any

import pytest
from dynamo_core import ContentDelta, ToolCallArguments, ToolCallParser, ToolCallStart
from dynamo_plugin_parsers_standard.json_formats import HermesParser, Llama3JsonParser, MistralParser
from dynamo_plugin_parsers_standard.parameter_formats import PythonicParser

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
def test_text_without_calls_is_all_content(
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
def test_text_after_a_broken_call_is_content(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, expected: list[tuple[str, ...]], size: int
) -> None:
    assert parse(cls(tools), text, [size]) == expected


def test_only_possible_markup_is_held_back(tools: Any) -> None:
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
