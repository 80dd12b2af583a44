"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from dynamo_text import CallObject

from dynamo_plugin_parsers_standard.markup import MarkupParser
from dynamo_plugin_parsers_standard.scan import may_begin

_CLOSE = "</tool_call>"


class HermesParser(MarkupParser):
    """The JSON decides where a call ends: a closing tag inside one of its strings is part of the string.

    The closing tag may be missing at the end of the text. Anything but white space between the JSON and the closing tag
    is content, and the tag with it.
    """

    NAME = "hermes"
    # Some models have the tags as special tokens.
    NEEDS_SPECIAL_TOKENS = True
    OPEN = "<tool_call>"

    def _begin(self) -> None:
        self._read(CallObject(self._out, before=self._take_header()))

    def _complete(self) -> None:
        self._enter(self._close)

    def _close(self, text: str, at: int, last: bool) -> int:
        at = self._hold_space(text, at)
        if at == len(text):
            return at
        if text.startswith(_CLOSE, at):
            self._space.clear()
            self._enter(self._blank)
            return at + len(_CLOSE)
        if last or not may_begin(text, at, _CLOSE):
            self._emit_space()
            self._enter(self._content)
        return at
