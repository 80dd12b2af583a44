"""Calls as Gemma writes them: ``call:name{key:<escape>text<escape>,other:5}``, with keys without quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

from dynamo_text import MAX_DEPTH, CallReader, Progress

from dynamo_plugin_parsers_standard.formats import CallStart
from dynamo_plugin_parsers_standard.scanner import end_of, find_tag, may_begin, skip_white
from dynamo_plugin_parsers_standard.schema_values import STRING, ParameterTypes, Types, json_of, string

_LONGEST = 256
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s:,<>{}\[\]\"]*")
#: What a number or a word ends with.
_BARE = re.compile(r"[^,{}\[\]]*")
_SCALARS: Types = frozenset({"integer", "number", "boolean", "null"})
_CLOSES = {"{": "}", "[": "]"}
_State: TypeAlias = Callable[[str, int, bool], int]


class GemmaCall(CallReader):
    """Reads a call from its name to its closing brace; a `dynamo_text.CallReader`.

    Strings stand between two `quote` tags. The arguments are told as JSON while they come. Words and numbers, and
    strings where the schema of the tool asks for something else, are told at their end.
    """

    def __init__(self, quote: str, opened: CallStart) -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = opened.sink
        self._quote = quote
        self._tools = opened.tools
        self._state: _State = self._in_name
        #: The text that was read and not told, and the JSON that waits for the end of the call.
        self._raw = [opened.before]
        self._waiting: list[str] = []
        self._name = ""
        self._parameters: ParameterTypes | None = None
        #: The brackets that are open, and whether the innermost one has an element.
        self._open: list[str] = []
        self._filled = False
        #: A name, a key, or a value that waits for its end; and the types of the value.
        self._word = ""
        self._parts: list[str] = []
        self._types: Types | None = None

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            state = self._state
            came = state(text, at, last)
            if came == at and self._state == state:
                break
            self._raw.append(text[at:came])
            # With a buffered sink, once the last bracket is closed.
            if self._waiting and not (self._sink.buffered and self._open):
                self._report()
            at = came
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`. What waits of the arguments of a call that was reported is told."""
        if not self.reported:
            return self.unreported()
        if self._state == self._in_key and self._word:
            self._separate()
            self._waiting.append(string(self._word)[:-1])
        elif self._parts:
            self._waiting.append(json_of("".join(self._parts), self._types or STRING))
        self._report()
        return ""

    def _in_name(self, text: str, at: int, last: bool) -> int:
        if (came := self._more(_NAME, text, at)) > at:
            return came
        if text[at] != "{" or not self._word:
            return self._break(at)
        self._name = self._word
        return self._push(text, at)

    def _element(self, text: str, at: int, last: bool) -> int:
        """Read the text after a bracket or a comma."""
        if (came := skip_white(text, at)) > at:
            return came
        if text[at] == self._open[-1]:
            return self._pop(at)
        self._word = ""
        if self._open[-1] == "}":
            self._state = self._in_key
        else:
            self._separate()
            self._types = None
            self._state = self._value
        return at

    def _in_key(self, text: str, at: int, last: bool) -> int:
        if text.startswith(self._quote, at):
            # Keys may stand between quotes, too.
            return at + len(self._quote)
        if not last and may_begin(text, at, self._quote):
            return at
        if (came := self._more(_KEY, text, at)) > at:
            return came
        if text[at] != ":" or not self._word:
            return self._break(at)
        self._separate()
        self._waiting.append(f"{string(self._word)}: ")
        self._types = self._schema().of(self._word) if len(self._open) == 1 else None
        self._state = self._value
        return at + 1

    def _value(self, text: str, at: int, last: bool) -> int:
        if (came := skip_white(text, at)) > at:
            return came
        if not last and may_begin(text, at, self._quote):
            return at
        self._parts = []
        if text.startswith(self._quote, at):
            if self._types is None or "string" in self._types:
                self._types = None
                self._waiting.append('"')
            self._state = self._in_text
            return at + len(self._quote)
        if text[at] in _CLOSES:
            return self._push(text, at)
        self._types = self._types or _SCALARS
        self._state = self._in_bare
        return at

    def _in_text(self, text: str, at: int, last: bool) -> int:
        found = find_tag(text, at, self._quote, last=last)
        if self._types is not None:
            self._parts.append(text[at:found])
        elif found > at:
            self._waiting.append(string(text[at:found])[1:-1])
        if not text.startswith(self._quote, found):
            return found
        self._waiting.append('"' if self._types is None else json_of("".join(self._parts), self._types))
        self._after_value()
        return found + len(self._quote)

    def _in_bare(self, text: str, at: int, last: bool) -> int:
        match = _BARE.match(text, at)
        start, at = at, at if match is None else match.end()
        self._parts.append(text[start:at])
        if at > start or at == len(text):
            return at
        if text[at] in _CLOSES:
            return self._break(at)
        self._waiting.append(json_of("".join(self._parts).strip(), self._types or _SCALARS))
        self._after_value()
        return at

    def _next(self, text: str, at: int, last: bool) -> int:
        """Read the text after a value."""
        if (came := skip_white(text, at)) > at:
            return came
        if text[at] == self._open[-1]:
            return self._pop(at)
        if text[at] != ",":
            return self._break(at)
        self._state = self._element
        return at + 1

    def _push(self, text: str, at: int) -> int:
        if len(self._open) == MAX_DEPTH:
            return self._break(at)
        if self._open:
            self._waiting.append(text[at])
        self._open.append(_CLOSES[text[at]])
        self._filled = False
        self._state = self._element
        return at + 1

    def _pop(self, at: int) -> int:
        bracket = self._open.pop()
        if self._open:
            self._after_value()
        else:
            self.progress = Progress.DONE
            bracket = bracket if self._filled else "{}"
        self._waiting.append(bracket)
        return at + 1

    def _more(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Read more of a name."""
        end = end_of(pattern, text, at, _LONGEST - len(self._word))
        self._word += text[at:end]
        return end

    def _separate(self) -> None:
        if self._filled or len(self._open) == 1:
            self._waiting.append(", " if self._filled else "{")
        self._filled = True

    def _after_value(self) -> None:
        self._parts = []
        self._filled = True
        self._state = self._next

    def _report(self) -> None:
        if not self.reported:
            self._sink.begin_call(self._name)
            self.reported = True
        self._sink.arguments("".join(self._waiting))
        self._waiting.clear()
        self._raw.clear()

    def _break(self, at: int) -> int:
        self.progress = Progress.BROKEN
        return at

    def _schema(self) -> ParameterTypes:
        if self._parameters is None:
            self._parameters = ParameterTypes(self._tools, self._name)
        return self._parameters


def braces(quote: str) -> Callable[[CallStart], CallReader]:
    """Return the body of calls whose strings stand between these tags."""

    def body(opened: CallStart) -> CallReader:
        return GemmaCall(quote, opened)

    return body
