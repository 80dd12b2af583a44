"""Parsers that a model's `response_template` describes: what they read, and that transformers reads the same.

`make test-transformers` runs the comparisons: they need the library.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    ContentDelta,
    ModelText,
    ParserDelta,
    ReasoningDelta,
    ReasoningParser,
    ToolCallParser,
    ToolCallStart,
)
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.literal_patterns import Named, Space, sequences
from dynamo_plugin_parsers_standard.parameter_formats import Gemma4Parser, Qwen3CoderParser
from dynamo_plugin_parsers_standard.reasoning_regions import TemplateReasoningParser
from dynamo_plugin_parsers_standard.response_template import TemplateParser
from dynamo_plugin_parsers_standard.think_tags import Gemma4ThinkParser, Qwen3Parser
from dynamo_testing import (
    Answer,
    Call,
    ReasoningParserFactory,
    ReasoningParserKit,
    ToolParserFactory,
    ToolParserKit,
)
from hypothesis import given
from hypothesis import strategies as st

HAS_LIBRARY = find_spec("transformers") is not None and find_spec("torch") is not None

CHATML = {"start_anchor": "<|im_start|>assistant\n", "defaults": {"role": "assistant"}}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CONTENT = {"content": "text", "close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
THINK = {"open": "<think>", "close": "</think>", "content": "text"}

#: Thoughts, and calls that are JSON in tags.
JSON_CALLS: dict[str, Any] = {
    **CHATML,
    "fields": {
        "thinking": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": CONTENT,
    },
}
#: Calls that have parameters in tags.
XML_CALLS: dict[str, Any] = {
    **CHATML,
    "fields": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": FUNCTION,
        },
        "content": CONTENT,
    },
}
#: Keys and values in tags of their own; values are JSON where they can be.
PAIRS: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": THINK,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>(?P<name>[^\s<]+)\s*",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": FUNCTION,
        },
        "content": {"content": "text"},
    },
}
#: Messages on channels: all text is in a field, and what is between fields is nothing.
CHANNELS: dict[str, Any] = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": "\n"},
        "tool_calls": {
            "open_pattern": (
                r"<\|channel\|>commentary to=functions\.(?P<name>[\w-]+)\s*(?:<\|constrain\|>json)?<\|message\|>"
            ),
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|return|>", "<|end|>"]},
    },
}
#: Objects without quotes around their keys.
BRACES: dict[str, Any] = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": FUNCTION,
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
#: A list of calls.
LISTS: dict[str, Any] = {
    **CHATML,
    "fields": {
        "tool_calls": {
            "open": "<TOOLCALL>",
            "close_pattern": r"</TOOLCALL>|\Z",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "content": {},
    },
}
TEMPLATES = {
    "json": JSON_CALLS,
    "xml": XML_CALLS,
    "pairs": PAIRS,
    "channels": CHANNELS,
    "braces": BRACES,
    "lists": LISTS,
}

TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g"))


def model(template: Any) -> ModelText:
    return ModelText("", frozenset(), {"response_template": template}, {})


@cache
def made(name: str) -> tuple[type[TemplateParser], type[TemplateReasoningParser] | None]:
    """Return the parsers of one of the templates."""
    text = model(TEMPLATES[name])
    reasons = TemplateReasoningParser.recognizes(text) is not None
    return TemplateParser.for_model(text), TemplateReasoningParser.for_model(text) if reasons else None


Parsers = tuple[type[ToolCallParser], type[ReasoningParser] | None]


class Message:
    """What both parsers together make of an answer, as the frontend puts them one after the other."""

    def __init__(self, name: str | Parsers, pieces: Sequence[str], prompt: str = "", tools: Any = TOOLS) -> None:
        calls, reasoning = made(name) if isinstance(name, str) else name
        parser = calls(tools)
        thinker = None if reasoning is None else reasoning(prompt)
        deltas: list[ParserDelta] = []
        for piece in [*pieces, None]:
            first: list[ParserDelta]
            if thinker is None:
                first = [] if piece is None else [ContentDelta(piece)]
            else:
                first = thinker.finish() if piece is None else thinker.feed(piece)
            for delta in first:
                deltas += parser.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        deltas += parser.finish()
        self.content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
        self.reasoning = "".join(each.text for each in deltas if isinstance(each, ReasoningDelta))
        self.calls: list[list[str]] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                self.calls.append([delta.name, ""])
            elif not isinstance(delta, ContentDelta | ReasoningDelta):
                self.calls[delta.index][1] += delta.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and vars(self) == vars(other)

    def understood(self) -> tuple[str, str, list[tuple[str, Any]]]:
        """Return reasoning, content without the white space around it, and calls."""
        return self.reasoning, self.content.strip(), [(name, json.loads(text)) for name, text in self.calls]


# What is written: the same message in the markup of each template.

Arguments = Mapping[str, Any]


def _braced(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_braced(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_braced, value)) + "]"
    return json.dumps(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_call(name: str, function: str, arguments: Arguments) -> str:
    """Return one call, as a model of one of the formats writes it."""
    match name:
        case "json":
            return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"
        case "xml":
            inner = "".join(f"<parameter={key}>\n{_plain(each)}\n</parameter>\n" for key, each in arguments.items())
            return f"<tool_call>\n<function={function}>\n{inner}</function>\n</tool_call>"
        case "pairs":
            inner = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(each)}</arg_value>\n" for key, each in arguments.items()
            )
            return f"<tool_call>{function}\n{inner}</tool_call>"
        case "channels":
            body = json.dumps(arguments)
            return f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>{body}<|call|>"
        case "braces":
            return f"<|tool_call>call:{function}{_braced(arguments)}<tool_call|>"
    return json.dumps({"name": function, "arguments": arguments})


def write(name: str, reasoning: str, content: str, calls: Sequence[tuple[str, Arguments]]) -> str:
    """Return a whole answer in one of the formats."""
    written = [write_call(name, *call) for call in calls]
    match name:
        case "channels":
            thought = f"<|channel|>analysis<|message|>{reasoning}<|end|>" if reasoning else ""
            text = f"<|channel|>final<|message|>{content}<|return|>" if content else ""
            return "<|start|>assistant".join(part for part in (thought, *written, text) if part)
        case "braces":
            return (f"<|channel>thought\n{reasoning}<channel|>" if reasoning else "") + content + "".join(written)
        case "lists":
            return content + (f"<TOOLCALL>[{', '.join(written)}]</TOOLCALL>" if written else "")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + "\n".join(part for part in (content, *written) if part)


WORDS = st.text("abc .,{}[]:\"'\\é世\n", max_size=12).map(str.strip)
#: Values that all formats write and no schema has to explain: strings that no JSON could be meant by.
VALUES = WORDS.map(lambda text: f"w{text}w")
KEYS = st.sampled_from(["a", "b", "city"])
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(KEYS, VALUES, max_size=3)), max_size=3)
MESSAGES = st.tuples(st.sampled_from(sorted(TEMPLATES)), WORDS, WORDS, CALLS)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 20), st.sampled_from(["", "<", '"', "}", " "])))


def cut(text: str, sizes: list[int]) -> list[str]:
    """Return the text in pieces of these sizes, taken in turn."""
    pieces: list[str] = []
    at = 0
    while at < len(text):
        pieces.append(text[at : at + sizes[len(pieces) % len(sizes)]])
        at += len(pieces[-1])
    return pieces


@given(MESSAGES, SIZES)
def test_written_messages_are_read_back_however_cut(
    message: tuple[str, str, str, list[tuple[str, Arguments]]], sizes: list[int]
) -> None:
    name, reasoning, content, calls = message
    reasoning = "" if name == "lists" else reasoning
    text = write(name, reasoning, content, calls)

    assert Message(name, [text]).understood() == (reasoning, content, calls)
    assert Message(name, cut(text, sizes)) == Message(name, [text])


@given(MESSAGES, SIZES, CHANGES)
def test_mutated_answers_raise_nothing_lose_nothing_and_may_be_cut(
    message: tuple[str, str, str, list[tuple[str, Arguments]]],
    sizes: list[int],
    changes: list[tuple[float, int, str]],
) -> None:
    name = message[0]
    text = write(*message)
    for start, length, put in changes:
        at = int(start * len(text))
        text = text[:at] + put + text[at + length :]

    whole = Message(name, [text])

    assert Message(name, cut(text, sizes)) == whole
    if not whole.calls:
        # The parser of calls shows all that it got.
        parser = made(name)[0](TOOLS)
        shown = [*parser.feed(text), *parser.finish()]
        if not any(isinstance(delta, ToolCallStart) for delta in shown):
            assert "".join(delta.text for delta in shown if isinstance(delta, ContentDelta)) == text


# The same as transformers.


def library(
    name: str | dict[str, Any], text: str, prompt: str = "", tools: Any = None
) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what transformers makes of an answer."""
    parse = import_module("transformers.utils.chat_parsing").parse_response
    found = parse(text, TEMPLATES[name] if isinstance(name, str) else name, prefix=prompt, tools=tools)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in found.get("tool_calls", [])]
    return found.get("thinking", found.get("reasoning_content", "")), found.get("content", ""), calls


needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="`make test-transformers` has transformers")


@needs_library
@given(MESSAGES)
def test_transformers_reads_the_same(message: tuple[str, str, str, list[tuple[str, Arguments]]]) -> None:
    text = write(*message)

    assert Message(message[0], [text]).understood() == library(message[0], text)


#: Templates of transformers for models that have none of their own: a type of such a model, and our format for it.
OWN: dict[str, tuple[str, Parsers]] = {
    "json": ("qwen3", (HermesParser, Qwen3Parser)),
    "xml": ("qwen3_5", (Qwen3CoderParser, Qwen3Parser)),
    "braces": ("gemma4", (Gemma4Parser, Gemma4ThinkParser)),
}


@needs_library
@given(MESSAGES.filter(lambda message: message[0] in OWN))
def test_our_formats_read_as_the_templates_that_transformers_has_for_models(
    message: tuple[str, str, str, list[tuple[str, Arguments]]],
) -> None:
    templates = import_module("transformers.cli.serving.utils")._RESPONSE_TEMPLATE_FALLBACKS
    kind, ours = OWN[message[0]]
    template = next(each for kinds, each in templates.items() if kind in kinds)
    text, described = write(*message), ModelText("", frozenset(), {"response_template": template}, {})
    made_of_it = TemplateParser.for_model(described), TemplateReasoningParser.for_model(described)

    expected = library(template, text)

    assert Message(ours, [text]).understood() == expected
    assert Message(made_of_it, [text]).understood() == expected


ASKED = "<|im_start|>assistant\n"
PROMPTS = [
    ("json", f"<|im_start|>user\n<think>no</think><|im_end|>\n{ASKED}<think>\n", "Hm.\n</think>\n\nYes."),
    ("json", f"{ASKED}<think>\n\n</think>\n\n", "Yes."),
    ("xml", f"{ASKED}No<|im_end|>\n{ASKED}<think>\n", f"Hm.</think>{write_call('xml', 'f', {})}"),
    ("braces", "<|turn>model\n<|channel>thought\n", "Hm.<channel|>Yes."),
    (
        "channels",
        "<|start|>assistant<|channel|>analysis<|message|>",
        f"Hm.<|end|><|start|>assistant{write_call('channels', 'f', {'a': 'b'})}",
    ),
]


@needs_library
@pytest.mark.parametrize(("name", "prompt", "text"), PROMPTS)
def test_transformers_reads_the_same_after_a_prompt_that_has_opened_or_closed_thoughts(
    name: str, prompt: str, text: str
) -> None:
    assert Message(name, [text], prompt).understood() == library(name, text, prompt)


@needs_library
def test_values_have_the_types_of_transformers_by_the_tools_schema() -> None:
    kinds = {"n": "integer", "on": "boolean", "list": "array", "text": "string"}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    text = write_call("xml", "f", {"n": 5, "on": True, "list": [1, {"a": None}], "text": "5"})

    assert Message("xml", [text], tools=tools).understood() == library("xml", text, tools=tools)


#: Malformed answers: transformers gives up on all of them or loses a part. Ours are read as far as they are sound; what
#: is no call is content, to the last character.
MALFORMED = [
    ("json", "So <tool_call>{</tool_call>", "So <tool_call>{</tool_call>", []),
    ("json", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("json", "<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
    # A closing tag inside of a string is part of the string.
    ("json", write_call("json", "f", {"a": "</tool_call>"}), "", [("f", {"a": "</tool_call>"})]),
    (
        "channels",
        "<|channel|>commentary to=functions.f<|message|>[<|call|>",
        "<|channel|>commentary to=functions.f<|message|>[<|call|>",
        [],
    ),
    ("braces", "<|tool_call>call:f{a}<tool_call|>", "<|tool_call>call:f{a}<tool_call|>", []),
    ("lists", "<TOOLCALL>[5]</TOOLCALL>", "<TOOLCALL>[5]</TOOLCALL>", []),
]

#: Calls that do not even begin. Transformers, too, reads them as content, as far as they are not empty.
UNOPENED: list[tuple[str, str, str, list[Any]]] = [
    ("xml", "<tool_call>f</tool_call>", "", []),
    ("pairs", "<tool_call></tool_call>", "", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), MALFORMED)
def test_malformed_calls_are_content(name: str, text: str, content: str, calls: list[tuple[str, Arguments]]) -> None:
    assert Message(name, [text]).understood() == ("", content, calls)
    if HAS_LIBRARY:
        with pytest.raises((ValueError, TypeError)):
            library(name, text)


def test_text_after_a_call_is_added_to_the_content_before_it() -> None:
    """Transformers keeps the last part of the content alone, here and where a field of reasoning does not repeat."""
    text = f"One.{write_call('json', 'f', {})} Two."

    assert Message("json", [text]).content == "One. Two."
    if HAS_LIBRARY:
        assert library("json", text)[1] == "Two."


def test_an_answer_without_any_tag_is_content_where_text_between_fields_is_nothing() -> None:
    """So is JSON that an engine with guided decoding has written. Transformers loses it."""
    assert Message("channels", ['{"a": 1}']).content == '{"a": 1}'


def test_reasoning_opened_in_the_prompt_is_no_part_of_the_answer() -> None:
    """Transformers takes it in."""
    prompt = "<|im_start|>assistant\n<think>\nFirst, "

    assert Message("json", ["then.</think>Yes."], prompt).understood() == ("then.", "Yes.", [])


def test_a_prompt_without_the_beginning_of_a_message_opens_nothing() -> None:
    """Transformers reads all of it, and whatever a user has written there."""
    assert Message("json", ["Yes."], "Say <think>").understood() == ("", "Yes.", [])


# Templates that cannot be followed.

FIELD = JSON_CALLS["fields"]["tool_calls"]


def with_calls(**changes: Any) -> dict[str, Any]:
    field = {key: value for key, value in {**FIELD, **changes}.items() if value is not None}
    return {**JSON_CALLS, "fields": {**JSON_CALLS["fields"], "tool_calls": field}}


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ("x", "object"),
    "an unknown key": ({**JSON_CALLS, "more": 1}, "unknown field `more`"),
    "another version": ({**JSON_CALLS, "version": 2}, "version 2"),
    "an unknown field": ({**JSON_CALLS, "fields": {"citations": {}}}, "fields.citations"),
    "a nested quantifier": (with_calls(open_pattern="(a+)+<x>"), "open_pattern: '(a+)+<x>'"),
    "any text": (with_calls(open_pattern="<x>.*<y>"), "open_pattern: '.*<y>'"),
    "a look ahead": (with_calls(open_pattern="<x>(?=y)"), "open_pattern: '(?=y)'"),
    "nothing to look for": (with_calls(open_pattern=r"\s*"), "matches without a literal"),
    "an end inside": (with_calls(open_pattern="<x>$<y>"), "matches without a literal"),
    "a text of any length": ({**JSON_CALLS, "fields": {"a\nb" * 999: {}}}, r"fields.a\nba\nb"),
    "a list of calls with one name": (
        with_calls(open_pattern="<x>(?P<name>.*?)>", transform=FUNCTION, transform_each=True),
        "transform: ",
    ),
    "too many ways": (with_calls(open_pattern="<x>" + "(?:a|b)" * 9), "more than 16 ways"),
    "too long": (with_calls(open_pattern="x" * 2000), "longer than 1024"),
    "no opening": (with_calls(open_pattern=None), "open"),
    "two openings": (with_calls(open="<x>"), "open: "),
    "an empty tag": (with_calls(open_pattern=None, open=["<x>", ""]), "open: "),
    "a tag without end": (with_calls(open_pattern=None, open="x" * 300), "open: "),
    "very many tags": (with_calls(open_pattern=None, open=[f"<{at:02}>" for at in range(99)]), "open: "),
    "an empty delimiter": (
        with_calls(
            open_pattern="<x>(?P<name>.*?)",
            transform=FUNCTION,
            content_args={"unquoted_keys": True, "string_delims": [["", ""]]},
        ),
        "content_args: ",
    ),
    "a tag that begins another": (with_calls(open_pattern=None, open=["<x", "<x>"]), "the beginning of another"),
    "lines": (with_calls(content="kv-lines"), "content: "),
    "other keys": (
        with_calls(transform={"function": {"name": "{content.tool}", "arguments": "{content.a}"}}),
        "transform: ",
    ),
    "no transform": (with_calls(transform=None), "transform: "),
    "sloppy JSON": (with_calls(content_args={"allow_non_json": True}), "content: "),
    "a name that runs into the tag": (
        with_calls(open_pattern=r"<x>(?P<name>\w+)_end", transform=FUNCTION),
        "may be part of the name",
    ),
    "a class that is none": (with_calls(open_pattern="<x>(?P<name>[z-a]+)>", transform=FUNCTION), "no class"),
    "a pattern of parameters without a value": (
        with_calls(
            open_pattern="<x>(?P<name>.*?)>",
            transform=FUNCTION,
            content="xml-inline",
            content_args={"tag_pattern": "<(?P<key>.*?)>"},
        ),
        "tag_pattern",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_cannot_be_followed_is_refused_with_a_warning_that_names_the_field(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, words = REFUSED[case]

    assert TemplateParser.recognizes(model(template)) is None

    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "response_template is not used for how it calls tools" in record.getMessage()
    assert words in record.getMessage()
    with pytest.raises(ValueError, match=re.escape(words)):
        TemplateParser.for_model(model(template))


def thinking(**changes: Any) -> dict[str, Any]:
    return {**CHATML, "fields": {"thinking": {**THINK, **changes}}}


IN_TWO_PARTS = {**CHANNELS["fields"]["tool_calls"], "close": None, "close_pattern": r"a\s*b"}
THINKING: dict[str, tuple[Any, str]] = {
    "no anchor": ({"fields": {"thinking": THINK}}, "start_anchor"),
    "a name in the anchor": ({"fields": {"thinking": THINK}, "start_anchor_pattern": "<(?P<a>.*?)>"}, "start_anchor"),
    "two without an opening": (
        {**CHATML, "fields": {"thinking": {"close": "</think>"}, "content": {}}},
        "fields.content.open is missing, and that of thinking too",
    ),
    "white space that counts": (thinking(content_args={"strip": False}), "fields.thinking: content"),
    "white space inside": (thinking(open=None, open_pattern=r"<a>\s*<b>"), "fields.thinking: open"),
    "a close in two parts and text that is lost": (
        {**CHANNELS, "fields": {**CHANNELS["fields"], "tool_calls": IN_TWO_PARTS}},
        "fields.tool_calls.close",
    ),
}


@pytest.mark.parametrize("case", THINKING)
def test_a_reasoning_template_that_cannot_be_followed_is_refused_with_a_warning(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    template, words = THINKING[case]

    assert TemplateReasoningParser.recognizes(model(template)) is None
    assert words in caplog.text
    assert "is not used for how it thinks" in caplog.text


def test_a_model_without_a_template_or_without_the_field_is_none_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    without = ModelText("", frozenset(), {}, {})

    assert TemplateParser.recognizes(without) is TemplateReasoningParser.recognizes(without) is None
    assert TemplateReasoningParser.recognizes(model(LISTS)) is None
    assert not caplog.records
    with pytest.raises(ValueError, match="has no response_template that says how it calls tools"):
        TemplateParser.for_model(without)


def test_each_part_of_a_template_is_used_by_itself() -> None:
    """Thoughts are read by a template whose calls cannot be, and the other way round."""
    calls_unread = with_calls(content="kv-lines")
    thoughts_unread = {**JSON_CALLS, "fields": {**JSON_CALLS["fields"], "thinking": {**THINK, "content": "json"}}}

    assert TemplateReasoningParser.recognizes(model(calls_unread)) == "its response_template says how it thinks"
    assert TemplateParser.recognizes(model(thoughts_unread)) == "its response_template says how it calls tools"


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_template_vouches_for_calls_of_any_tool(name: str) -> None:
    text = write(name, "", "", [("h", {"a": "b"})])

    assert Message(name, [text]).understood() == ("", "", [("h", {"a": "b"})])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        # The section is missing, or the end of the call.
        ("xml", "<function=f></function>", "<function=f></function>", []),
        ("xml", "<tool_call><function=f><parameter=a>1</parameter></tool_call>", "", [("f", {"a": "1"})]),
        # White space is part of a value where the expression has none beside it.
        (
            "pairs",
            "<tool_call>f<arg_key>a</arg_key><arg_value>\nb</arg_value></tool_call>",
            "",
            [("f", {"a": "\nb"})],
        ),
    ],
)
def test_tags_of_parameters_are_read_as_the_template_has_them(
    name: str, text: str, content: str, calls: list[tuple[str, Arguments]]
) -> None:
    assert Message(name, [text]).understood() == ("", content, calls)


@pytest.mark.parametrize(
    ("opening", "text", "content", "calls"),
    [
        (r"<call (?P<name>\w+)\s*", '<call f {"a": 1}</call>', "", [("f", {"a": 1})]),
        (r"<call (?P<name>.*?)>", '<call f.g>{"a": 1}</call>', "", [("f.g", {"a": 1})]),
        (r"<call (?P<name>[^>]+)>", '<call f g>{"a": 1}</call>', '<call f g>{"a": 1}</call>', []),
    ],
)
def test_a_tool_name_matches_the_expression_without_white_space(
    opening: str, text: str, content: str, calls: list[tuple[str, Arguments]]
) -> None:
    parser = TemplateParser.for_model(model(with_calls(open_pattern=opening, close="</call>", transform=FUNCTION)))

    assert Message((parser, None), [text]).understood() == ("", content, calls)


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("json", '<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
        ("channels", "<|channel|>commentary to=functions.f<|constrain|>json<|message|>", "<|call|>"),
    ],
)
def test_structural_tags_describe_the_call_format(name: str, begin: str, end: str) -> None:
    tag = made(name)[0].structural_tag(TOOLS, parallel=True, text=True)

    assert tag is not None
    assert tag["triggers"] == [begin.split("f<|")[0].split("{")[0]]
    assert (tag["tags"][0]["begin"], tag["tags"][0]["end"]) == (begin, end)
    assert Message(name, [f'{begin}{{"a": 1}}{end}']).understood() == ("", "", [("f", {"a": 1})])


def test_calls_with_nested_tags_have_no_structural_tag() -> None:
    assert made("xml")[0].structural_tag(TOOLS, parallel=True, text=True) is None


def test_text_of_the_prompt_and_of_the_answer_make_no_tag_together() -> None:
    assert Message("json", ["nk>Yes."], f"{ASKED}<thi").content == "nk>Yes."


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Hm. \n", "Hm.", ""),
        (f"<think>Hm.</think>\n{write_call('json', 'f', {})}\n Yes.", "Hm.", "\n Yes."),
        ("Yes.\n <think> Hm. </think> No. ", "Hm.", "Yes.No. "),
    ],
)
def test_white_space_around_reasoning_is_dropped(text: str, reasoning: str, content: str) -> None:
    message = Message("json", [text])

    assert (message.reasoning, message.content) == (reasoning, content)


def test_thoughts_may_be_written_in_several_ways_and_then_have_no_grammar() -> None:
    described = model(thinking(open=["<think>", "<think>\n"], close=["</think>", "</t>"]))
    parser = TemplateReasoningParser.for_model(described)

    found = [*(thinker := parser("")).feed("<think>\nHm.</t>Yes."), *thinker.finish()]

    assert found == [ReasoningDelta("Hm."), ContentDelta("Yes.")]
    assert parser("").structural_tag() is None


def test_a_template_regex_is_expanded_into_its_sequences() -> None:
    assert sequences(r"\s*<a>\s*(?P<n>[^>\n]+)(?:x|\|y)?>\s*") == [
        ("<a>", Space(), Named("n", r"[^>\n]"), "x>"),
        ("<a>", Space(), Named("n", r"[^>\n]"), "|y>"),
        ("<a>", Space(), Named("n", r"[^>\n]"), ">"),
    ]
    assert sequences(r"</a>\n|$|\Z") == [("</a>\n",)]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_special_tokens_that_the_markup_is_made_of_reach_the_parsers(name: str) -> None:
    """Also those that are a part of a tag, or stand inside of a call."""
    written = write(name, "Hm.", "Yes.", [("f", {"a": "b"})])
    between = {"<|start|>"}
    tokens = frozenset(re.findall(r"<[^<>\s=]*>", written)) - between
    text = ModelText("", tokens | between | {"<|pad|>"}, {"response_template": TEMPLATES[name]}, {})
    seen = set(TemplateParser.for_model(text).MARKERS)
    if name != "lists":
        seen |= set(TemplateReasoningParser.for_model(text).MARKERS)

    assert tokens
    assert tokens <= seen
    assert "<|pad|>" not in seen


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - {"lists"}))
def test_the_grammar_of_thoughts_goes_on_where_the_prompt_has_begun(name: str) -> None:
    _, reasoning = made(name)
    assert reasoning is not None
    opening, closing = reasoning.REGIONS.around or ("", "")
    anchor = TEMPLATES[name]["start_anchor"]
    begun = anchor if isinstance(anchor, str) else anchor[0]

    free, inside, after = (reasoning(begun + more).structural_tag() for more in ("", opening, opening + closing))

    assert [tag and tag["type"] for tag in (free, inside)] == ["optional", "sequence"]
    assert inside is not None
    assert (inside["elements"][0]["begin"], inside["elements"][0]["end"]) == ("", closing)
    assert after == {"type": "const_string", "value": ""}


class _Calls(ToolParserKit):
    TEMPLATE: ClassVar[str]

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        return made(self.TEMPLATE)[0]


CALL_F, CALL_G = Call("f", {"a": "b"}), Call("g", {})


def _kit_of(name: str) -> type[ToolParserKit]:
    both = [write_call(name, "f", {"a": "b"}), write_call(name, "g", {})]
    begun = both[0][: both[0].rindex("b")]
    calls = f"<TOOLCALL>[{', '.join(both)}]</TOOLCALL>" if name == "lists" else "\n".join(both)

    class Kit(_Calls):
        TEMPLATE = name
        CALLS = ((f"So {calls}", ["So ", CALL_F, CALL_G]), (f"{calls} Done.", [CALL_F, CALL_G, " Done."]))
        UNSOUND = tuple(text for case, text, _, found in (*MALFORMED, *UNOPENED) if case == name and not found)
        OPENINGS = (f"<TOOLCALL>[{begun}" if name == "lists" else begun, calls)

    return Kit


for _name in TEMPLATES:
    globals()[f"TestCallsOf{_name.title()}"] = _kit_of(_name)


class _Thoughts(ReasoningParserKit):
    TEMPLATE: ClassVar[str]

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        reasoning = made(self.TEMPLATE)[1]
        assert reasoning is not None
        return reasoning


class TestThoughts(_Thoughts):
    TEMPLATE = "json"
    ANSWERS = (
        Answer("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        Answer("Hm.</think>Yes.", "Hm.", "Yes.", prompt="<|im_start|>assistant\n<think>\n"),
        Answer("Yes.", "", "Yes.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        Answer("Yes.\n<think>But</think> so.<|im_end|>", "But", "Yes.so."),
        Answer("<tool_call><think></tool_call><think>Hm.", "Hm.", "<tool_call><think></tool_call>"),
    )
    OPENINGS = ("<think>", "So ", "<tool_call>")


class TestThoughtsOnChannels(_Thoughts):
    TEMPLATE = "channels"
    ANSWERS = (
        Answer(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            "Hm.",
            "Yes.",
        ),
        Answer("<|channel|>analysis<|message|>One.<|end|><|channel|>analysis<|message|>Two.<|end|>", "One.\nTwo."),
    )
    OPENINGS = ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
