"""Calls as Llama 3 writes them: the answer is nothing but ``{"name": …, "parameters": {…}}``, maybe several."""

from __future__ import annotations

import re

from dynamo_text import CallObject

from dynamo_plugin_parsers_standard.markup import MarkupParser
from dynamo_plugin_parsers_standard.names import known_names
from dynamo_plugin_parsers_standard.scan import may_begin, skip_white

_BETWEEN = re.compile(r"[\s;,]*")


class Llama3JsonParser(MarkupParser):
    """Objects at the beginning of the answer, each maybe after ``<|python_tag|>``, with ``;`` or ``,`` between them.

    Nothing but the form tells a call from an answer in JSON, so only objects with the name of a tool of the request are
    calls. From the first character that is no call on, everything is content.
    """

    NAME = "llama3_json"
    OPEN = "<|python_tag|>"

    def _begin(self) -> None:
        self._enter(self._tagged)

    def _blank(self, text: str, at: int, last: bool) -> int:
        if self._called:
            match = _BETWEEN.match(text, at)
            start, at = at, at if match is None else match.end()
            self._space.append(text[start:at])
        else:
            at = self._hold_space(text, at)
        if at == len(text):
            return at
        if text[at] == "{":
            self._read(CallObject(self._out, "".join(self._space), known_names(self.tools)))
            self._space.clear()
        elif text.startswith(self.OPEN, at):
            return self._open(at)
        elif last or not may_begin(text, at, self.OPEN):
            self._emit_space()
            self._enter(self._content)
        return at

    def _tagged(self, text: str, at: int, last: bool) -> int:
        start, at = at, skip_white(text, at)
        self._header.append(text[start:at])
        if at == len(text):
            return at
        if text[at] == "{":
            self._read(CallObject(self._out, self._take_header(), known_names(self.tools)))
        else:
            self._give_up(self._take_header())
        return at

    def _content(self, text: str, at: int, last: bool) -> int:
        self._out.content(text[at:])
        return len(text)
