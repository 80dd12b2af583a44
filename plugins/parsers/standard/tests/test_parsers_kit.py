"""Every parser keeps what parsers promise."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dynamo_core import ToolCallParser
from dynamo_plugin_parsers_standard import dynamo_register_reasoning_parsers
from dynamo_plugin_parsers_standard.json_formats import HermesParser, Llama3JsonParser, MistralParser
from dynamo_plugin_parsers_standard.parameter_formats import PythonicParser
from dynamo_plugin_parsers_standard.think import DeepSeekR1Parser, Qwen3Parser, ThinkParser
from dynamo_testing import (
    Answer,
    Call,
    ReasoningParserFactory,
    ReasoningParserKit,
    ToolParserFactory,
    ToolParserKit,
)

F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
CALL_F, CALL_G = Call("f", {"a": 1}), Call("g", {})


class _Tools(ToolParserKit):
    PARSER: ClassVar[type[ToolCallParser]]

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        return self.PARSER


class TestHermes(_Tools):
    PARSER = HermesParser
    CALLS = (
        (f"Well.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", ["Well.\n", CALL_F, CALL_G]),
        (f"<tool_call>{F}</tool_call> So.", [CALL_F, " So."]),
    )
    UNSOUND = ("<tool_call></tool_call>", "<tool_call>f(a=1)</tool_call>", "<tool_call>\n{", "<tool")
    OPENINGS = ('<tool_call>{"name": "f", "arguments": {"a": "', "<tool_call>", f"<tool_call>{F}")


class TestLlama3Json(_Tools):
    PARSER = Llama3JsonParser
    CALLS = (
        ('{"name": "f", "parameters": {"a": 1}}', [CALL_F]),
        (f" <|python_tag|> {F}; {G}\n", [CALL_F, CALL_G]),
    )
    UNSOUND = ('{"name": "Bob"}', "<|python_tag|>print(1)", f"[{F}]")
    OPENINGS = ('{"name": "f", "parameters": {"a": "', '{"answer": "')


class TestMistral(_Tools):
    PARSER = MistralParser
    CALLS = (
        (f"Well. [TOOL_CALLS] [{F}, {G}] ", ["Well. ", CALL_F, CALL_G]),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [CALL_F, CALL_G]),
    )
    UNSOUND = ("[TOOL_CALLS] hello", "[TOOL_CALLS] []", "[TOOL_CALLS]f[ARGS]5")
    OPENINGS = ('[TOOL_CALLS]f[ARGS]{"a": "', "[TOOL_CALLS] ")


class TestPythonic(_Tools):
    PARSER = PythonicParser
    CALLS = ((" [f(a=1), g()] \n", [CALL_F, CALL_G]), ("[f(a=1)] and so", [CALL_F, " and so"]))
    UNSOUND = ("[f(1)]", "[f(a=b)]", "[f(a=1", "[h(a=1)]")
    OPENINGS = ('[f(a="',)


@pytest.mark.parametrize("parser", [ThinkParser, Qwen3Parser], scope="class")
class TestThink(ReasoningParserKit):
    ANSWERS = (
        Answer("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        Answer("Hm.</think>Yes.", "Hm.", "Yes.", prompt="<think>\n"),
        Answer("Yes.", "", "Yes.", prompt="<think>\n\n</think>\n\n"),
        Answer("Yes <think>no</think>.", "", "Yes <think>no</think>."),
    )
    OPENINGS = ("<think>", "So ")

    @pytest.fixture
    def make_parser(self, parser: type[ThinkParser]) -> ReasoningParserFactory:
        return parser


class TestDeepSeekR1(ReasoningParserKit):
    ANSWERS = (
        Answer("Hm.</think>Yes.", "Hm.", "Yes."),
        Answer("Yes.", "", "Yes.", prompt="<think>\n\n</think>\n\n"),
    )
    OPENINGS = ("<think>", "Hm.</think>")

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        return DeepSeekR1Parser


def _kit_of(cls: type[ThinkParser]) -> type[ReasoningParserKit]:
    """The kit for one of the formats that differ in their tags alone."""
    opening, closing = cls.FORMAT.pairs[0]

    class Kit(ReasoningParserKit):
        ANSWERS = (
            Answer(f"{opening}\nHm.\n{closing}\n\nYes.", "Hm.", "Yes."),
            Answer(f"Hm.{closing}Yes.", "Hm.", "Yes.", prompt=f"{opening}\n"),
            Answer("Yes.", "", "Yes.", prompt=f"{opening}\n{closing}\n"),
            *(Answer(f"{opening}Hm.\n{end}", "Hm.", end) for end in cls.FORMAT.ends),
        )
        OPENINGS = (opening, "So ")

        @pytest.fixture
        def make_parser(self) -> ReasoningParserFactory:
            return cls

    return Kit


for _cls in dynamo_register_reasoning_parsers():
    if issubclass(_cls, ThinkParser) and _cls.NAME not in ("think", "qwen3", "deepseek_r1"):
        globals()[f"Test{_cls.__name__}"] = _kit_of(_cls)
