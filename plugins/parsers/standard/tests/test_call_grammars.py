"""What a grammar of calls allows, the parser of the format reads as those calls."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import ContentDelta, ToolCallArguments, ToolCallStart
from dynamo_plugin_parsers_standard.json_formats import JSON_PARSERS, Llama3JsonParser
from dynamo_plugin_parsers_standard.parameter_formats import PARAMETER_PARSERS
from dynamo_plugin_parsers_standard.state_machine import FormatParser
from dynamo_plugin_parsers_standard.think_tags import DeepSeekR1Parser, ThinkParser

ARGUMENTS = '{"city": "Oslo"}'
#: The same as the grammars of other styles have it.
STYLED = {
    "qwen_xml": "<parameter=city>\nOslo\n</parameter>",
    "glm_xml": "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>",
    "minimax_xml": '<parameter name="city">Oslo</parameter>\n',
    "deepseek_xml": '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n',
}
WITH_GRAMMAR = [*JSON_PARSERS, *(parser for parser in PARAMETER_PARSERS if parser.FORMAT.grammar is not None)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


def written(form: Any) -> str:
    """Return a text that a grammar allows."""
    match form["type"]:
        case "triggered_tags":
            [tag] = form["tags"][:1]
            assert any(tag["begin"].startswith(trigger) for trigger in form["triggers"])
            return f"Let me see. {written(tag)}"
        case "tags_with_separator":
            tags = form["tags"][:1] if form["stop_after_first"] else form["tags"]
            return str(form["separator"]).join(map(written, tags))
        case "tag":
            return f"{form['begin']}{written(form['content'])}{form['end']}"
        case "sequence":
            return "".join(map(written, form["elements"]))
        case "optional":
            return written(form["content"])
        case "json_schema":
            return STYLED[form["style"]] if "style" in form else ARGUMENTS
        case "any_text":
            return "hm"
        case "regex":
            return "0"
        case _:
            return str(form["value"])


def with_grammar() -> list[Any]:
    return [pytest.param(parser, id=parser.NAME) for parser in WITH_GRAMMAR]


def test_formats_of_tagged_parameters_have_grammars() -> None:
    assert {parser.NAME for parser in WITH_GRAMMAR} >= {
        *("qwen3_coder", "seed_oss", "glm45", "glm47", "minimax_m2", "deepseek_v32")
    }


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("parser", with_grammar())
def test_calls_by_the_grammar_are_calls(parser: type[FormatParser], parallel: bool, text: bool) -> None:
    form = parser.structural_tag(TOOLS, parallel=parallel, text=text)
    if parser is Llama3JsonParser and text:
        # Text before a call would make it text.
        assert form is None
        return
    assert form is not None
    reader = parser(TOOLS)

    deltas = [*reader.feed(written(form)), *reader.finish()]

    names = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    arguments = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)]
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    assert names[0] == "weather"
    assert len(names) == 1 or (parallel and names == ["weather", "time"])
    assert "".join(arguments) == ARGUMENTS * len(names)
    assert content == ("Let me see. " if text else "")


def test_the_arguments_of_a_call_obey_the_schema_of_its_tool() -> None:
    form: Any = JSON_PARSERS[0].structural_tag(TOOLS, parallel=True, text=False)

    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [SCHEMA, {"type": "object", "properties": {}}]


@pytest.mark.parametrize(
    ("parser", "prompt", "thoughts"),
    [
        (ThinkParser, "", "<think>hm</think>\n\n"),
        (ThinkParser, "<think>\n", "hm</think>\n\n"),
        (ThinkParser, "<think>\n\n</think>\n\n", ""),
        (DeepSeekR1Parser, "", "hm</think>\n\n"),
    ],
)
def test_thoughts_come_first_as_the_prompt_has_left_them(parser: type[ThinkParser], prompt: str, thoughts: str) -> None:
    reader = parser(prompt)

    text = written(reader.structural_tag())

    assert text == thoughts
    deltas = [*reader.feed(f"{text}{{}}"), *reader.finish()]
    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == "{}"
