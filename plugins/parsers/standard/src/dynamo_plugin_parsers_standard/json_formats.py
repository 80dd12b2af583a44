"""The formats whose calls are JSON."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping

from dynamo_plugin_parsers_standard.formats import (
    CallFormat,
    Header,
    Section,
    json_arguments,
    json_array,
    json_object,
    known_object,
)
from dynamo_plugin_parsers_standard.grammar import CallGrammar
from dynamo_plugin_parsers_standard.state_machine import FormatParser

#: How a call begins that is an object, up to the arguments.
OBJECT = '{"name": "{name}", "arguments": '
_ALPHABET = string.ascii_letters + string.digits
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


def list_grammar(open_tag: str, close_tag: str = "") -> CallGrammar:
    """Return the grammar of calls that are a list between two tags."""
    return CallGrammar(OBJECT, "}", open_tag, f"{open_tag}[", f"]{close_tag}", between=", ")


def new_mistral_id() -> str:
    """Return an id as the templates of Mistral demand it: nine letters and digits."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


def kimi_name_and_id(words: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the name in an id such as ``functions.weather:0``, and the id as it is: the template demands it back."""
    call_id = words.get("id", "")
    match = _KIMI_ID.fullmatch(call_id)
    return ("" if match is None else match["name"]), call_id


class HermesParser(FormatParser):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, with one call between the tags, several, or a list.

    The JSON decides where a call ends: a closing tag inside one of its strings is part of the string. Anything but
    white space between the JSON and the closing tag is content, and the tag with it.
    """

    NAME = "hermes"
    FORMAT = CallFormat(
        opens=("<tool_call>",),
        bodies={"{": json_object, "[": json_array},
        closes=("</tool_call>",),
        repeats=True,
        grammar=CallGrammar(f"<tool_call>\n{OBJECT}", "}\n</tool_call>", "<tool_call>", between="\n"),
    )


class Llama3JsonParser(FormatParser):
    """Objects at the beginning of the answer, each maybe after ``<|python_tag|>``, with ``;`` or ``,`` between them.

    Nothing but the form tells a call from an answer in JSON, so only objects with the name of a tool of the request are
    calls. From the first character that is no call on, everything is content.
    """

    NAME = "llama3_json"
    FORMAT = CallFormat(
        opens=("<|python_tag|>",),
        bodies={"{": known_object},
        bare={"{": known_object},
        separators=";,",
        only_first=True,
        # A call stands at the beginning, where no text is.
        grammar=CallGrammar('{"name": "{name}", "parameters": ', "}", between="; "),
    )


class MistralParser(FormatParser):
    """``[TOOL_CALLS] [{…}, …]``, or in newer models ``[TOOL_CALLS]name[ARGS]{…}``.

    In the newer form an id may stand between name and arguments: ``name[CALL_ID]abc[ARGS]{…}``.
    """

    NAME = "mistral"
    FORMAT = CallFormat(
        opens=("[TOOL_CALLS]",),
        bodies={"{": json_object, "[": json_array, "": json_arguments},
        header=Header(
            tags={"[CALL_ID]": "id", "[ARGS]": ""}, body_without_tag=True, word=re.compile(r"[A-Za-z0-9_.-]*")
        ),
        new_id=new_mistral_id,
        grammar=CallGrammar("[TOOL_CALLS]{name}[ARGS]", "", "[TOOL_CALLS]"),
    )


_DEEPSEEK = Section(opens=("<｜tool▁calls▁begin｜>",), closes=("<｜tool▁calls▁end｜>",))
_DEEPSEEK_SIGN = "<｜tool▁calls▁begin｜>"
#: What a grammar of calls is triggered by, and what stands around the calls.
_DEEPSEEK_SECTION = (_DEEPSEEK_SIGN, _DEEPSEEK_SIGN, "<｜tool▁calls▁end｜>")


class DeepSeekV3Parser(FormatParser):
    """The kind of tool, its name, and the arguments as a block of Markdown, in a section."""

    NAME = "deepseek_v3"
    FORMAT = CallFormat(
        section=_DEEPSEEK,
        opens=("<｜tool▁call▁begin｜>",),
        header=Header(first="kind", tags={"<｜tool▁sep｜>": "name", "```json": ""}),
        bodies={"": json_arguments},
        closes=("```", "<｜tool▁call▁end｜>"),
        grammar=CallGrammar(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            *_DEEPSEEK_SECTION,
            between="\n",
        ),
    )


class DeepSeekV31Parser(FormatParser):
    """The name and the arguments, in a section."""

    NAME = "deepseek_v31"
    FORMAT = CallFormat(
        section=_DEEPSEEK,
        opens=("<｜tool▁call▁begin｜>",),
        header=Header(tags={"<｜tool▁sep｜>": ""}),
        bodies={"": json_arguments},
        closes=("<｜tool▁call▁end｜>",),
        grammar=CallGrammar("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>", *_DEEPSEEK_SECTION),
    )


class KimiK2Parser(FormatParser):
    """An id with the name in it, ``functions.weather:0``, and the arguments, in a section."""

    NAME = "kimi_k2"
    FORMAT = CallFormat(
        section=Section(
            opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
            closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        ),
        opens=("<|tool_call_begin|>",),
        header=Header(
            first="id",
            tags={"<|tool_call_argument_begin|>": ""},
            word=re.compile(r"[\w.:-]*"),
            understand=kimi_name_and_id,
        ),
        bodies={"": json_arguments},
        closes=("<|tool_call_end|>",),
        grammar=CallGrammar(
            "<|tool_call_begin|>functions.{name}:",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            after_number="<|tool_call_argument_begin|>",
        ),
    )


class GraniteParser(FormatParser):
    """A list after ``<|tool_call|>`` or ``<tool_call>``."""

    NAME = "granite"
    FORMAT = CallFormat(
        opens=("<|tool_call|>", "<tool_call>"),
        bodies={"[": json_array},
        closes=("</tool_call>",),
        grammar=list_grammar("<|tool_call|>"),
    )


class Granite20bFcParser(FormatParser):
    """Objects, each after ``<function_call>``."""

    NAME = "granite_20b_fc"
    FORMAT = CallFormat(
        opens=("<function_call>",),
        bodies={"{": json_object},
        grammar=CallGrammar(f"<function_call>{OBJECT}", "}", "<function_call>", between="\n"),
    )


class Phi4MiniParser(FormatParser):
    """A list after ``functools``, or between ``<|tool_call|>`` and ``<|/tool_call|>``."""

    NAME = "phi4_mini"
    FORMAT = CallFormat(
        opens=("functools", "<|tool_call|>"),
        bodies={"[": json_array},
        closes=("<|/tool_call|>",),
        grammar=list_grammar("<|tool_call|>", "<|/tool_call|>"),
    )


class NemotronParser(FormatParser):
    """A list between ``<TOOLCALL>`` and ``</TOOLCALL>``."""

    NAME = "nemotron"
    FORMAT = CallFormat(
        opens=("<TOOLCALL>",),
        bodies={"[": json_array},
        closes=("</TOOLCALL>",),
        grammar=list_grammar("<TOOLCALL>", "</TOOLCALL>"),
    )


#: The parsers of this module.
JSON_PARSERS: tuple[type[FormatParser], ...] = (
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
    GraniteParser,
    Granite20bFcParser,
    Phi4MiniParser,
    NemotronParser,
)
