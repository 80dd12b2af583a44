"""The grammars of calls and of reasoning, as formats of xgrammar's structural tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Line breaks as models write them after their reasoning.
_BREAK = {"type": "optional", "content": {"type": "const_string", "value": "\n\n"}}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of calls of one format: ``{name}`` stands for the name of the tool in `begin`.

    `trigger` is how a call begins, or the section of all calls, which `open` and `close` are around if there is one;
    without it no text may stand before. Between two calls there is `between`. `style` is how arguments are written, in
    the words of xgrammar. With `after_number`, a number and that text follow `begin`.
    """

    begin: str
    end: str
    trigger: str = ""
    open: str = ""
    close: str = ""
    between: str = ""
    style: str = "json"
    after_number: str = ""

    def tag(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, text: bool) -> Mapping[str, Any] | None:
        """Return what `ToolCallParser.structural_tag` gives."""
        if text and not self.trigger:
            return None
        tags = [self._call(tool["function"]) for tool in tools]
        if text and not self.open:
            return {
                "type": "triggered_tags",
                "triggers": [self.trigger],
                "tags": tags,
                "stop_after_first": not parallel,
            }
        calls: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.between,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if not self.open:
            return calls
        section = {"type": "tag", "begin": self.open, "content": calls, "end": self.close}
        if not text:
            return section
        # The end of the section is that of the answer.
        return {"type": "triggered_tags", "triggers": [self.trigger], "tags": [section], "stop_after_first": True}

    def _call(self, function: Mapping[str, Any]) -> dict[str, Any]:
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        content: dict[str, Any] = {"type": "json_schema", "json_schema": schema}
        if self.style != "json":
            content["style"] = self.style
        if self.after_number:
            number = {"type": "regex", "pattern": "[0-9]+"}
            after = {"type": "const_string", "value": self.after_number}
            content = {"type": "sequence", "elements": [number, after, content]}
        begin = self.begin.replace("{name}", function["name"])
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}


def reasoning_tag(open: str, close: str) -> Mapping[str, Any]:
    """Return reasoning up to its end.

    If there is an opening tag, which the model still has to write, there may be none.
    """
    thoughts = {"type": "tag", "begin": open, "content": {"type": "any_text"}, "end": close}
    whole = {"type": "sequence", "elements": [thoughts, _BREAK]}
    return {"type": "optional", "content": whole} if open else whole
