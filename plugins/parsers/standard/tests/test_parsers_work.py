"""How much parsers do for a long text: counted in lines of Python and in the text that they keep, not in seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import ModelText, ReasoningParser, ToolCallParser
from dynamo_plugin_parsers_standard.json_formats import HermesParser, Llama3JsonParser, MistralParser
from dynamo_plugin_parsers_standard.parameter_formats import (
    DeepSeekV32Parser,
    FunctionGemmaParser,
    Glm45Parser,
    Olmo3Parser,
    PythonicParser,
    Qwen3CoderParser,
)
from dynamo_plugin_parsers_standard.reasoning_regions import TemplateReasoningParser
from dynamo_plugin_parsers_standard.response_template import TemplateParser
from dynamo_plugin_parsers_standard.think_tags import ThinkParser
from dynamo_testing.parser.cost import Lines, allocated_by, check_cost, longest_text

#: Characters of a long text.
LONG = 64 * 1024
#: Characters in a piece of text.
PIECE = 64
#: Generous, and the same from first to last: lines of Python per piece, characters in the longest text that is kept,
#: bytes allocated at once for a piece.
LINES, KEPT, ALLOCATED = 140, 4 * PIECE, 16 * 1024

Parser = ToolCallParser | ReasoningParser
Make = Callable[[Any], Parser]

DESCRIBED = ModelText(
    "",
    frozenset(),
    {
        "response_template": {
            "start_anchor": "assistant:",
            "fields": {
                "thinking": {"open": "<think>", "close": "</think>"},
                "tool_calls": {
                    "open_pattern": r"\s*<call\s+(?P<name>\w+)>",
                    "close": "</call>",
                    "content": "json",
                    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
                },
                "content": {},
            },
        }
    },
    {},
)
DESCRIBED_CALLS = TemplateParser.for_model(DESCRIBED)


def described_thoughts(tools: Any) -> Parser:
    return TemplateReasoningParser.for_model(DESCRIBED)("")


CASES: dict[str, tuple[Make, str, str]] = {
    "hermes, a long argument": (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "', "the quick brown fox "),
    "hermes, arguments before the name": (HermesParser, '<tool_call>{"arguments": {"a": "', "the quick brown fox "),
    "hermes, arguments as text": (HermesParser, '<tool_call>{"name": "f", "arguments": "', "the quick brown fox "),
    "hermes, another key": (HermesParser, '<tool_call>{"x": "', "the quick brown fox "),
    "hermes, content": (HermesParser, "", "the quick brown fox "),
    "hermes, content that looks like markup": (HermesParser, "", "<tool_cal <tool_cal "),
    "hermes, nothing but space": (HermesParser, "", " \n"),
    "hermes, space before the closing tag": (HermesParser, '<tool_call>{"name": "f"}', " \n"),
    "llama3_json, a long argument": (Llama3JsonParser, '{"name": "f", "parameters": {"a": "', "the quick brown fox "),
    "llama3_json, an answer in JSON": (Llama3JsonParser, '{"answer": "', "the quick brown fox "),
    "mistral, a long argument": (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": "', "the quick brown fox "),
    "mistral, a long list": (
        MistralParser,
        "[TOOL_CALLS] [",
        f'{{"name": "f", "arguments": {{"a": "{"b" * 999}"}}}}, ',
    ),
    "mistral, space in the header": (MistralParser, "[TOOL_CALLS] ", " \n"),
    "pythonic, a long argument": (PythonicParser, '[f(a="', "the quick brown fox "),
    "olmo3, a long argument": (Olmo3Parser, '<function_calls>f(a="', "the quick brown fox "),
    "qwen3_coder, a long string": (Qwen3CoderParser, "<function=f><parameter=a>", "the quick\\nbrown fox\n"),
    "qwen3_coder, a long number": (Qwen3CoderParser, "<function=f><parameter=n>", "12345678901234567890"),
    "qwen3_coder, tags in a string": (Qwen3CoderParser, "<function=f><parameter=a>", "</parameter> </function> <"),
    "qwen3_coder, space after a value": (Qwen3CoderParser, "<function=f><parameter=a></parameter>", " \n"),
    "glm45, a long string": (Glm45Parser, "<tool_call>f<arg_key>a</arg_key><arg_value>", "the quick brown fox "),
    "deepseek_v32, a long value": (
        DeepSeekV32Parser,
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">',
        "the quick brown fox ",
    ),
    "functiongemma, a long string": (
        FunctionGemmaParser,
        "<start_function_call>call:f{a:<escape>",
        "the quick brown fox ",
    ),
    "functiongemma, a long word": (FunctionGemmaParser, "<start_function_call>call:f{a:", "the quick brown fox "),
    "think, reasoning": (lambda tools: ThinkParser(""), "<think>", "the quick brown fox\n"),
    "think, newlines": (lambda tools: ThinkParser(""), "<think>", "\n"),
    "think, content": (lambda tools: ThinkParser(""), "So ", "the quick brown fox "),
    "think, nothing but space": (lambda tools: ThinkParser(""), "", " \n"),
    "response_template, a long argument": (DESCRIBED_CALLS, '<call f>{"a": "', "the quick brown fox "),
    "response_template, a long name": (DESCRIBED_CALLS, "<call ", "the_quick_brown_fox_"),
    "response_template, reasoning": (described_thoughts, "<think>", "the quick brown fox\n"),
    "response_template, space in reasoning": (described_thoughts, "<think>Hm.", " \n"),
    "response_template, content": (described_thoughts, "So ", "the quick brown fox "),
    "response_template, tags": (described_thoughts, "", "<think> So </think> <call <thin "),
}


@pytest.mark.parametrize("case", CASES)
def test_a_piece_of_a_long_text_costs_the_same_at_its_end_as_at_first(case: str, tools: Any) -> None:
    make, head, body = CASES[case]
    parser = make(tools)
    parser.feed(head)
    text = (body * (2 * PIECE // len(body) + 2))[: 2 * PIECE + len(body)]

    with Lines() as lines:
        for at in range(LONG // PIECE):
            start = at * PIECE % len(body)
            parser.feed(text[start : start + PIECE])

    assert lines.count / (LONG // PIECE) < LINES
    assert longest_text(parser) <= KEPT
    assert min(allocated_by(parser, text[:PIECE]) for _ in range(3)) < ALLOCATED


def test_structure_costs_a_fixed_number_of_lines_per_character(tools: Any) -> None:
    parser = HermesParser(tools)
    parser.feed('<tool_call>{"name": "f", "arguments": {"a": [')
    text = '{"b": [1, -2.5e3, true, null, "\\u0041"]}, ' * 10
    # From now on a comma waits at the beginning of each piece.
    parser.feed(text)

    counts = []
    for _ in range(4):
        with Lines() as lines:
            for _ in range(10):
                parser.feed(text)
        counts.append(lines.count)

    assert max(counts) < 40 * 10 * len(text)
    assert max(counts) == min(counts)


@pytest.mark.parametrize(
    ("make", "head", "body"),
    [
        (Qwen3CoderParser, "", "<tool_call><function=h> "),
        (Qwen3CoderParser, "<function=f>", "<parameter=a>1</parameter>"),
        (FunctionGemmaParser, "<start_function_call>call:f{a:[", "1,{b:<escape>c<escape>},"),
    ],
)
def test_structure_costs_as_much_after_much_text_as_at_first(make: Make, head: str, body: str, tools: Any) -> None:
    check_cost(make(tools), head, body)
