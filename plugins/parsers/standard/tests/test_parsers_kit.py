"""Every parser keeps what parsers promise."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dynamo_core import ToolCallParser
from dynamo_plugin_parsers_standard import dynamo_register_reasoning_parsers
from dynamo_plugin_parsers_standard.json_formats import HermesParser, Llama3JsonParser, MistralParser
from dynamo_plugin_parsers_standard.parameter_formats import (
    DeepSeekV32Parser,
    FunctionGemmaParser,
    Glm45Parser,
    Llama4PythonicParser,
    MiniMaxM2Parser,
    Olmo3Parser,
    PythonicParser,
    Qwen3CoderParser,
)
from dynamo_plugin_parsers_standard.think_tags import DeepSeekR1Parser, Qwen3Parser, ThinkParser
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


class TestLlama4Pythonic(_Tools):
    PARSER = Llama4PythonicParser
    CALLS = (("So <|python_start|>[f(a=1), g()]<|python_end|>", ["So ", CALL_F, CALL_G]), (" [f(a=1)]", [CALL_F]))
    UNSOUND = ("<|python_start|>print(1)<|python_end|>", "<|python_start|>", "<|python_start|>[f(1)]")
    OPENINGS = ("<|python_start|>", '<|python_start|>[f(a="')


class TestOlmo3(_Tools):
    PARSER = Olmo3Parser
    CALLS = (("So\n<function_calls>\nf(a=1)\ng()\n</function_calls>\nDone", ["So\n", CALL_F, CALL_G, "\nDone"]),)
    UNSOUND = ("<function_calls></function_calls>", "<function_calls>f(1)</function_calls>", "<function_calls>\nf(")
    OPENINGS = ("<function_calls>", '<function_calls>f(a="')


class TestQwen3Coder(_Tools):
    PARSER = Qwen3CoderParser
    CALLS = (
        (
            "So\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
            "<function=g>\n</function>\n</tool_call>",
            ["So\n", Call("f", {"a": "1"}), CALL_G],
        ),
    )
    UNSOUND = (
        "<tool_call></tool_call>",
        "<tool_call><function=f>",
        "<function=h></function>",
        "<tool_call><function=>",
    )
    OPENINGS = ("<tool_call>", "<function=f>", "<function=f><parameter=", "<function=f><parameter=a>")


class TestGlm45(_Tools):
    PARSER = Glm45Parser
    CALLS = (
        (
            "So\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><tool_call>g</tool_call>",
            ["So\n", Call("f", {"a": "1"}), CALL_G],
        ),
    )
    UNSOUND = ("<tool_call></tool_call>", "<tool_call>f one", "<tool_call>f<arg_key>a</arg_key></tool_call>")
    OPENINGS = ("<tool_call>", "<tool_call>f", "<tool_call>f<arg_key>a</arg_key><arg_value>")


class TestMiniMaxM2(_Tools):
    PARSER = MiniMaxM2Parser
    CALLS = (
        (
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n<invoke name="g">\n'
            "</invoke>\n</minimax:tool_call>\nSo",
            [Call("f", {"a": "1"}), CALL_G, "\nSo"],
        ),
    )
    UNSOUND = ("<minimax:tool_call></minimax:tool_call>", '<minimax:tool_call><invoke name="f">')
    OPENINGS = ("<minimax:tool_call>", '<invoke name="f"><parameter name="a">')


class TestDeepSeekV32(_Tools):
    PARSER = DeepSeekV32Parser
    CALLS = (
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1'
            '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
            [CALL_F, CALL_G],
        ),
    )
    UNSOUND = ("<｜DSML｜function_calls></｜DSML｜function_calls>", '<｜DSML｜function_calls><｜DSML｜invoke name="f">')
    OPENINGS = ("<｜DSML｜function_calls>", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">')


class TestFunctionGemma(_Tools):
    PARSER = FunctionGemmaParser
    CALLS = (
        (
            "So <start_function_call>call:f{a:1}<end_function_call><start_function_call>call:g{}<end_function_call>",
            ["So ", CALL_F, CALL_G],
        ),
        ("<start_function_call>call:f{a:<escape>,}<escape>}<end_function_call>", [Call("f", {"a": ",}"})]),
    )
    UNSOUND = ("<start_function_call>f{}", "<start_function_call>call:f{a}<end_function_call>", "call:f{a:1}")
    OPENINGS = (
        "<start_function_call>",
        "<start_function_call>call:f{a:",
        "<start_function_call>call:f{a:<escape>",
        "<start_function_call>call:f{a:[{b:[",
    )


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
    """Return the kit for one of the formats that differ in their tags alone."""
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
