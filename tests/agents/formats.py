"""Raw formats of models, written by us: what a model of each family writes, and a chat template in its manner.

Nothing here uses the parsers, so that a mistake of theirs cannot hide in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tests.agents import templates

Call: TypeAlias = tuple[str, Mapping[str, Any]]


class Marker(str):
    """A piece of an answer that is one special token."""

    __slots__ = ()


Writer: TypeAlias = Callable[[str, str, Sequence[Call]], list[str]]


@dataclass(frozen=True)
class Format:
    """What models of a family write, and what they read."""

    name: str
    #: Reasoning, content and calls as the pieces of an answer.
    write: Writer
    template: str
    #: All special tokens of the tokenizer; the first ends an answer, the second begins a prompt.
    special: tuple[str, ...]
    #: What the template puts before each result of a tool.
    result: str
    #: The parsers of the format. `tool_call_parser: auto` must find the same.
    tool_call_parser: str
    reasoning_parser: str | None
    #: Whether it reasons where the request says nothing of it.
    thinks: bool = True
    #: Whether one answer may call several tools.
    parallel: bool = True
    #: Whether content may stand beside calls.
    content_beside_calls: bool = True

    def __str__(self) -> str:
        return self.name


def hermes(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Qwen 3: each call is JSON between tags."""
    pieces = [*_thought(reasoning), content]
    for name, arguments in calls:
        body = _json({"name": name, "arguments": arguments})
        pieces += ["\n", Marker("<tool_call>"), f"\n{body}\n", Marker("</tool_call>")]
    return pieces


def qwen3_coder(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Qwen 3 Coder: parameters as tags, strings as they are."""
    pieces = [content]
    for name, arguments in calls:
        pieces += ["\n", Marker("<tool_call>"), f"\n<function={name}>\n"]
        pieces += [f"<parameter={key}>\n{_value(value)}\n</parameter>\n" for key, value in arguments.items()]
        pieces += ["</function>\n", Marker("</tool_call>")]
    return pieces


def deepseek_v31(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return DeepSeek V3.1 without thinking, which is its default: the prompt has ended the reasoning."""
    pieces = [content]
    if calls:
        pieces.append(Marker("<｜tool▁calls▁begin｜>"))
        for name, arguments in calls:
            pieces += [Marker("<｜tool▁call▁begin｜>"), name, Marker("<｜tool▁sep｜>"), _json(arguments)]
            pieces.append(Marker("<｜tool▁call▁end｜>"))
        pieces.append(Marker("<｜tool▁calls▁end｜>"))
    return pieces


def glm45(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return GLM 4.5: keys and values in turn, each in tags."""
    pieces = ["\n", *_thought(reasoning, before="", after="\n"), content]
    for name, arguments in calls:
        pieces += ["\n", Marker("<tool_call>"), f"{name}\n"]
        for key, value in arguments.items():
            pieces += [Marker("<arg_key>"), key, Marker("</arg_key>"), "\n"]
            pieces += [Marker("<arg_value>"), _value(value), Marker("</arg_value>"), "\n"]
        pieces.append(Marker("</tool_call>"))
    return pieces


def kimi_k2(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Kimi K2: a section of calls, each with an id that holds the name."""
    pieces = [*_thought(reasoning, before="", after=""), content]
    if calls:
        pieces.append(Marker("<|tool_calls_section_begin|>"))
        for number, (name, arguments) in enumerate(calls):
            pieces += [Marker("<|tool_call_begin|>"), f"functions.{name}:{number}"]
            pieces += [Marker("<|tool_call_argument_begin|>"), _json(arguments), Marker("<|tool_call_end|>")]
        pieces.append(Marker("<|tool_calls_section_end|>"))
    return pieces


def minimax_m2(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return MiniMax M2: the prompt has begun the reasoning."""
    pieces = [f"{reasoning}\n", Marker("</think>"), f"\n\n{content}"]
    if calls:
        pieces += ["\n", Marker("<minimax:tool_call>"), "\n"]
        for name, arguments in calls:
            pieces.append(f'<invoke name="{name}">\n')
            pieces += [f'<parameter name="{key}">{_value(value)}</parameter>\n' for key, value in arguments.items()]
            pieces.append("</invoke>\n")
        pieces.append(Marker("</minimax:tool_call>"))
    return pieces


def gpt_oss(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Harmony: a message for each channel. The prompt has begun the first; a call ends the answer."""
    start, channel, message, end = (Marker(f"<|{word}|>") for word in ("start", "channel", "message", "end"))
    pieces = [channel, "analysis", message, reasoning]
    if content:
        pieces += [end, start, "assistant", channel, "commentary" if calls else "final", message, content]
    for name, arguments in calls:
        pieces += [end, start, "assistant", channel, f"commentary to=functions.{name} "]
        pieces += [Marker("<|constrain|>"), "json", message, _json(arguments)]
    return pieces


def mistral(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Mistral since its tokenizer of version 11: a name and arguments after a token each."""
    pieces = [Marker("[THINK]"), reasoning, Marker("[/THINK]"), content]
    for name, arguments in calls:
        pieces += [Marker("[TOOL_CALLS]"), name, Marker("[ARGS]"), _json(arguments)]
    return pieces


def llama3_json(reasoning: str, content: str, calls: Sequence[Call]) -> list[str]:
    """Return Llama 3: nothing but JSON, or nothing but text."""
    if not calls:
        return [content]
    return ["; ".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)]


def _thought(reasoning: str, *, before: str = "\n", after: str = "\n\n") -> list[str]:
    return [Marker("<think>"), f"{before}{reasoning}{before}", Marker("</think>"), after]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


_IM = ("<|im_end|>", "<|im_start|>")
_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DEEPSEEK = (
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{what}▁{edge}｜>" for what in ("calls", "call", "outputs", "output") for edge in ("begin", "end")),
    "<｜tool▁sep｜>",
)
_GLM = ("<|user|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>")
_GLM_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KIMI = (
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    *(f"<|tool_{what}|>" for what in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")),
    "<|tool_call_argument_begin|>",
)
_MINIMAX = ("[e~[", "]~!b[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>")
_HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
_MISTRAL = (
    "</s>",
    "<s>",
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")

FORMATS = {
    each.name: each
    for each in (
        Format("hermes", hermes, templates.HERMES, (*_IM, *_THINK, *_TOOL_CALL), "<tool_response>", "hermes", "qwen3"),
        Format(
            "qwen3_coder",
            qwen3_coder,
            templates.QWEN3_CODER,
            (*_IM, *_TOOL_CALL),
            "<tool_response>",
            "qwen3_coder",
            None,
        ),
        Format(
            "deepseek_v31",
            deepseek_v31,
            templates.DEEPSEEK_V31,
            (*_DEEPSEEK, *_THINK),
            "<｜tool▁output▁begin｜>",
            "deepseek_v31",
            "deepseek_v31",
            thinks=False,
        ),
        Format(
            "glm45",
            glm45,
            templates.GLM45,
            (*_GLM, *_THINK, *_TOOL_CALL, *_GLM_ARGUMENTS),
            "<tool_response>",
            "glm45",
            "glm45",
        ),
        Format(
            "kimi_k2",
            kimi_k2,
            templates.KIMI_K2,
            (*_KIMI, *_THINK),
            "<|im_system|>tool<|im_middle|>",
            "kimi_k2",
            "kimi_k2",
        ),
        Format(
            "minimax_m2",
            minimax_m2,
            templates.MINIMAX_M2,
            (*_MINIMAX, *_THINK),
            "\n<response>",
            "minimax_m2",
            "minimax_m2",
        ),
        Format(
            "gpt_oss",
            gpt_oss,
            templates.GPT_OSS,
            _HARMONY,
            " to=assistant<|channel|>commentary",
            "gpt_oss",
            "gpt_oss",
            parallel=False,
        ),
        Format("mistral", mistral, templates.MISTRAL, _MISTRAL, "[TOOL_RESULTS]", "mistral", "mistral"),
        Format(
            "llama3_json",
            llama3_json,
            templates.LLAMA3_JSON,
            _LLAMA,
            "<|start_header_id|>ipython",
            "llama3_json",
            None,
            content_beside_calls=False,
        ),
    )
}
