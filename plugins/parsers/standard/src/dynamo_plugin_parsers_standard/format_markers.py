"""Format markers: texts in a model's files that identify its format, one entry per format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_core import ModelText


@dataclass(frozen=True, slots=True)
class FormatMarkers:
    """The texts that a model's chat template has and lacks.

    A broader format lists the markup of narrower ones as lacking.

    A `fallback` counts only where no other format of the same table fits.
    """

    needs: tuple[str, ...]
    without: tuple[str, ...] = ()
    #: Texts of which one is enough.
    one_of: tuple[str, ...] = ()
    fallback: bool = False

    def found(self, template: str) -> str | None:
        """Return why a template is of the format, or None."""
        found = [text for text in self.one_of if text in template][:1]
        if (self.one_of and not found) or any(text in template for text in self.without):
            return None
        if not all(text in template for text in self.needs):
            return None
        return f"its template has {' and '.join(map(repr, (*self.needs, *found)))}"


SignTable = Mapping[str, FormatMarkers]

_THINK = ("<think>", "</think>")
_NEMOTRON = ("detailed thinking", "<SPECIAL_10>", "<SPECIAL_12>", "truncate_history_thinking")
_OLMO = ("Olmo", "OLMo", "<functions>")


TOOL_SIGNS: SignTable = {
    "hermes": FormatMarkers(("<tool_call>", "</tool_call>"), without=("<function=", "<arg_key>")),
    "qwen3_coder": FormatMarkers(("<tool_call>", "<function=", "<parameter=")),
    "glm45": FormatMarkers(("<tool_call>", "<arg_key>", "<arg_value>"), without=("</arg_key><arg_value>",)),
    "glm47": FormatMarkers(("<tool_call>", "</arg_key><arg_value>")),
    "llama3_json": FormatMarkers(("dictionary of argument name and its value",)),
    "llama4_pythonic": FormatMarkers(
        ("<|header_start|>",),
        without=("dictionary of argument name and its value",),
        one_of=("[func_name1(params_name1=", "<|python_start|>"),
    ),
    "pythonic": FormatMarkers(("[func_name1(params_name1=",), without=("<|header_start|>",)),
    "mistral": FormatMarkers(("[TOOL_CALLS]",)),
    "deepseek_v3": FormatMarkers(("<｜tool▁call▁begin｜>", "```json")),
    "deepseek_v31": FormatMarkers(("<｜tool▁call▁begin｜>",), without=("```json", "｜DSML｜")),
    "deepseek_v32": FormatMarkers(("｜DSML｜", "function_calls")),
    "kimi_k2": FormatMarkers(("<|tool_calls_section_begin|>",)),
    "minimax_m2": FormatMarkers(("<minimax:tool_call>",)),
    "gpt_oss": FormatMarkers(("<|channel|>", "<|message|>", "<|call|>")),
    "functiongemma": FormatMarkers(("<start_function_call>",)),
    "gemma4": FormatMarkers(("<|tool_call>", "<tool_call|>")),
    "granite": FormatMarkers(("<|start_of_role|>", "<|tool_call|>"), without=("</tool_call>",)),
    "granite_20b_fc": FormatMarkers(("<function_call>",)),
    "phi4_mini": FormatMarkers(("<|tool|>", "<|/tool|>")),
    "nemotron": FormatMarkers(("<TOOLCALL>",)),
    "olmo3": FormatMarkers(("<function_calls>",)),
    "seed_oss": FormatMarkers(("<seed:tool_call>",)),
    "tool_code": FormatMarkers(("```tool_code",)),
}

REASONING_SIGNS: SignTable = {
    "qwen3": FormatMarkers(
        ("<|im_start|>", "<tool_call>"), without=("<minimax:tool_call>", "[gMASK]", *_NEMOTRON, *_OLMO), one_of=_THINK
    ),
    "deepseek_r1": FormatMarkers(("<｜Assistant｜>", "</think>"), without=("thinking is defined",)),
    "deepseek_v31": FormatMarkers(("<｜Assistant｜>", "</think>", "thinking is defined")),
    "glm45": FormatMarkers(("[gMASK]",), one_of=_THINK),
    "minimax_m2": FormatMarkers(("<minimax:tool_call>",), one_of=_THINK),
    "kimi_k2": FormatMarkers(("<|im_middle|>",), one_of=(*_THINK, "◁think▷")),
    "gpt_oss": FormatMarkers(("<|channel|>", "<|message|>", "<|start|>")),
    "granite": FormatMarkers(("<|start_of_role|>",), one_of=("my thought process", *_THINK)),
    "mistral": FormatMarkers(("[THINK]",)),
    "olmo3": FormatMarkers(("<think>",), one_of=_OLMO),
    "nemotron": FormatMarkers(("<think>",), one_of=_NEMOTRON),
    "seed_oss": FormatMarkers(("<seed:think>",)),
    "gemma4": FormatMarkers(("<|channel>", "<channel|>")),
    "think": FormatMarkers((), one_of=_THINK, fallback=True),
}


def recognize(table: SignTable, name: str, model: ModelText) -> str | None:
    """Return why a model writes in the format of this name, or None."""
    signs = table.get(name)
    reason = None if signs is None else signs.found(model.template)
    if reason is None or signs is None or not signs.fallback:
        return reason
    others = (other for other in table.values() if not other.fallback)
    return None if any(other.found(model.template) for other in others) else reason
