"""Tool-call formats without JSON: arguments typed by the tool's schema, or written in Python."""

from __future__ import annotations

import string
from typing import ClassVar

from dynamo_plugin_parsers_standard.formats import Body, CallFormat, Section
from dynamo_plugin_parsers_standard.gemma_calls import braces
from dynamo_plugin_parsers_standard.grammar import CallGrammar
from dynamo_plugin_parsers_standard.pythonic_calls import known_python_call, python_call, python_list
from dynamo_plugin_parsers_standard.schema_values import ANY_JSON, STRING
from dynamo_plugin_parsers_standard.state_machine import FormatParser
from dynamo_plugin_parsers_standard.tagged_parameters import TaggedSyntax, tagged


class _ParameterParser(FormatParser):
    """A parser of a format with more special tokens than those around calls."""

    INSIDE: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.MARKERS = (*cls.MARKERS, *cls.INSIDE)


def _xml(section: str) -> CallFormat:
    """Return calls as Qwen3-Coder writes them, in a section of this name."""
    opening, closing = f"<{section}>", f"</{section}>"
    syntax = TaggedSyntax(
        name_end=">",
        close="</function>",
        key_open="<parameter=",
        key_ends={">": STRING},
        value_close="</parameter>",
        stops=(closing, opening, "<function="),
        newlines=True,
    )
    return CallFormat(
        section=Section(opens=(opening,), closes=(closing,)),
        opens=("<function=",),
        bodies={"": tagged(syntax)},
        closes=(closing,),
        grammar=CallGrammar(
            f"{opening}\n<function={{name}}>\n", f"\n</function>\n{closing}", opening, between="\n", style="qwen_xml"
        ),
    )


class Qwen3CoderParser(_ParameterParser):
    """``<tool_call> <function=f> <parameter=a> 1 </parameter> </function> </tool_call>``, each tag on its own line."""

    NAME = "qwen3_coder"
    FORMAT = _xml("tool_call")


class SeedOssParser(_ParameterParser):
    """The same in a section of another name."""

    NAME = "seed_oss"
    FORMAT = _xml("seed:tool_call")


_GLM = tagged(
    TaggedSyntax(
        name_end="",
        close="</tool_call>",
        key_open="<arg_key>",
        key_ends={"</arg_key>": STRING},
        value_open="<arg_value>",
        value_close="</arg_value>",
        stops=("<tool_call>",),
        doubtful=False,
    )
)
_GLM_TAGS = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _glm(gap: str) -> CallFormat:
    """Return calls as GLM writes them, with this between their parts."""
    grammar = CallGrammar(
        f"<tool_call>{{name}}{gap}", f"{gap}</tool_call>", "<tool_call>", between=gap, style="glm_xml"
    )
    return CallFormat(opens=("<tool_call>",), bodies={"": _GLM}, grammar=grammar)


class Glm45Parser(_ParameterParser):
    """``<tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value> </tool_call>``, with newlines between."""

    NAME = "glm45"
    INSIDE = _GLM_TAGS
    FORMAT = _glm("\n")


class Glm47Parser(_ParameterParser):
    """The same without newlines. Both parsers read both."""

    NAME = "glm47"
    INSIDE = _GLM_TAGS
    FORMAT = _glm("")


class MiniMaxM2Parser(_ParameterParser):
    """``<minimax:tool_call> <invoke name="f"> <parameter name="a">1</parameter> </invoke> </minimax:tool_call>``."""

    NAME = "minimax_m2"
    FORMAT = CallFormat(
        section=Section(opens=("<minimax:tool_call>",), closes=("</minimax:tool_call>",)),
        opens=('<invoke name="',),
        bodies={
            "": tagged(
                TaggedSyntax(
                    name_end='">',
                    close="</invoke>",
                    key_open='<parameter name="',
                    key_ends={'">': STRING},
                    value_close="</parameter>",
                    stops=("</minimax:tool_call>", "<minimax:tool_call>", '<invoke name="'),
                )
            )
        },
        closes=("</minimax:tool_call>",),
        grammar=CallGrammar(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            "<minimax:tool_call>",
            "<minimax:tool_call>\n",
            "</minimax:tool_call>",
            style="minimax_xml",
        ),
    )


class DeepSeekV32Parser(_ParameterParser):
    """DeepSeek-V3.2: the same in other tags, with a word in a parameter's tag that tells strings from JSON."""

    NAME = "deepseek_v32"
    INSIDE = ("｜DSML｜",)
    FORMAT = CallFormat(
        section=Section(opens=("<｜DSML｜function_calls>",), closes=("</｜DSML｜function_calls>",)),
        opens=('<｜DSML｜invoke name="',),
        bodies={
            "": tagged(
                TaggedSyntax(
                    name_end='">',
                    close="</｜DSML｜invoke>",
                    key_open='<｜DSML｜parameter name="',
                    key_ends={'" string="true">': STRING, '" string="false">': ANY_JSON, '">': ANY_JSON},
                    value_close="</｜DSML｜parameter>",
                    stops=("</｜DSML｜function_calls>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="'),
                    typed=True,
                )
            )
        },
        closes=("</｜DSML｜function_calls>",),
        grammar=CallGrammar(
            '<｜DSML｜invoke name="{name}">\n',
            "</｜DSML｜invoke>\n",
            "<｜DSML｜function_calls>",
            "<｜DSML｜function_calls>\n",
            "</｜DSML｜function_calls>",
            style="deepseek_xml",
        ),
    )


class PythonicParser(FormatParser):
    """A list of calls in Python at the beginning of the answer. Only calls of tools of the request count."""

    NAME = "pythonic"
    FORMAT = CallFormat(opens=(), bodies={}, bare={"[": python_list}, only_first=True)


class Llama4PythonicParser(FormatParser):
    """The same; and the list anywhere in the text where it stands between tags."""

    NAME = "llama4_pythonic"
    FORMAT = CallFormat(
        opens=("<|python_start|>",),
        bodies={"[": python_list},
        closes=("<|python_end|>",),
        bare={"[": python_list},
    )


def _lines(opening: str, body: Body, closing: str) -> CallFormat:
    """Return calls in Python, each on a line, between two tags."""
    letters = f"{string.ascii_letters}_"
    return CallFormat(opens=(opening,), bodies=dict.fromkeys(letters, body), closes=(closing,), repeats=True)


class Olmo3Parser(FormatParser):
    """Calls in Python, each on a line, between ``<function_calls>`` and ``</function_calls>``."""

    NAME = "olmo3"
    FORMAT = _lines("<function_calls>", python_call, "</function_calls>")


class ToolCodeParser(FormatParser):
    """The same in a block of code, as Gemma 3 writes calls if its prompt says so. Only tools of the request count."""

    NAME = "tool_code"
    FORMAT = _lines("```tool_code", known_python_call, "```")


def _braces(opening: str, quote: str, closing: str) -> CallFormat:
    return CallFormat(
        section=Section(opens=(opening,), closes=(closing,), optional=False),
        opens=("call:",),
        bodies={"": braces(quote)},
    )


class FunctionGemmaParser(_ParameterParser):
    """``<start_function_call>call:f{a:<escape>text<escape>}<end_function_call>``."""

    NAME = "functiongemma"
    INSIDE = ("<escape>",)
    FORMAT = _braces("<start_function_call>", "<escape>", "<end_function_call>")


class Gemma4Parser(_ParameterParser):
    """The same in other tags: ``<|tool_call>call:f{a:<|"|>text<|"|>}<tool_call|>``."""

    NAME = "gemma4"
    INSIDE = ('<|"|>',)
    FORMAT = _braces("<|tool_call>", '<|"|>', "<tool_call|>")


#: The parsers of this module.
PARAMETER_PARSERS: tuple[type[FormatParser], ...] = (
    Qwen3CoderParser,
    SeedOssParser,
    Glm45Parser,
    Glm47Parser,
    MiniMaxM2Parser,
    DeepSeekV32Parser,
    PythonicParser,
    Llama4PythonicParser,
    Olmo3Parser,
    ToolCodeParser,
    FunctionGemmaParser,
    Gemma4Parser,
)
