"""A reader of calls written in Python: ``weather(city="Oslo", days=2)``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from dynamo_text import MAX_DEPTH, CallReader, CallSink, Progress

from dynamo_plugin_parsers_standard.formats import CallStart
from dynamo_plugin_parsers_standard.scanner import skip_white
from dynamo_plugin_parsers_standard.schema_values import json_of_literal, python_expression
from dynamo_plugin_parsers_standard.tool_names import known_names

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_LONGEST_NAME = 256
_PLAIN = re.compile(r"[^()\[\]{}'\"#]*")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}


class PythonCall(CallReader):
    """Reads one call up to its closing parenthesis; a `dynamo_text.CallReader`.

    The arguments are literals with names. They are told as JSON at the end: they are not JSON before.
    """

    def __init__(self, sink: CallSink, before: str, accepts: Callable[[str], bool]) -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._before = before
        self._accepts = accepts
        self._name = ""
        #: Everything after the name.
        self._parts: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        if not self._depth:
            at = self._in_name(text, at)
        start, end = at, len(text)
        while at < end and self._depth and self.progress is Progress.OPEN:
            at = self._in_quotes(text, at) if self._quote else self._outside(text, at)
        self._parts.append(text[start:at])
        if self.progress is Progress.DONE:
            self._report()
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "" if self.reported else "".join([self._before, self._name, *self._parts])

    def leftover(self) -> str:
        """See `CallReader.leftover`."""
        return self.unreported()

    def _in_name(self, text: str, at: int) -> int:
        match = _NAME.match(text, at)
        start, at = at, at if match is None else match.end()
        self._name += text[start:at]
        if len(self._name) > _LONGEST_NAME:
            self.progress = Progress.BROKEN
        elif at < len(text):
            if text[at] == "(" and self._accepts(self._name):
                self._parts.append("(")
                self._depth = 1
                return at + 1
            self.progress = Progress.BROKEN
        return at

    def _outside(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        at = at if match is None else match.end()
        if at == len(text):
            return at
        char = text[at]
        if char in _IN_STRING:
            self._quote = char
        elif char in "([{":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self.progress = Progress.BROKEN
        elif char == "#":
            # A comment would be lost.
            self.progress = Progress.BROKEN
            return at
        else:
            self._depth -= 1
            if not self._depth:
                self.progress = Progress.DONE
        return at + 1

    def _in_quotes(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _IN_STRING[self._quote].match(text, at)
        at = at if match is None else match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._quote = ""
        return at + 1

    def _report(self) -> None:
        arguments = _arguments("".join(self._parts))
        if arguments is None:
            self.progress = Progress.BROKEN
            return
        self._sink.begin_call(self._name)
        self._sink.arguments(arguments)
        self.reported = True


class PythonCalls(CallReader):
    """Reads calls as a list, from its opening bracket to its closing one; a `dynamo_text.CallReader`."""

    def __init__(self, sink: CallSink, before: str, accepts: Callable[[str], bool]) -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._accepts = accepts
        self._raw = [before]
        self._call: PythonCall | None = None
        #: What may come: the opening bracket, a call, or what follows one.
        self._expected = "["

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            call = self._call
            if call is None:
                at = self._between(text, at)
                continue
            at = call.feed(text, at, last)
            self.reported = self.reported or call.reported
            if call.progress is Progress.DONE:
                self._call = None
                self._expected = ",]"
            else:
                self.progress = call.progress
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw) if self._call is None else self._call.unreported()

    def leftover(self) -> str:
        """See `CallReader.leftover`."""
        return "" if self._call is None and self.reported else self.unreported()

    def _between(self, text: str, at: int) -> int:
        start, at = at, skip_white(text, at)
        self._raw.append(text[start:at])
        if at == len(text):
            return at
        if not self._expected:
            self._call = PythonCall(self._sink, "".join(self._raw), self._accepts)
            self._raw.clear()
            return at
        if text[at] not in self._expected:
            self.progress = Progress.BROKEN
            return at
        if text[at] == "]":
            self._raw.clear()
            self.progress = Progress.DONE
        else:
            self._raw.append(text[at])
            self._expected = ""
        return at + 1


def python_call(opened: CallStart) -> CallReader:
    """Parse a call written in Python."""
    return PythonCall(opened.sink, opened.before, bool)


def known_python_call(opened: CallStart) -> CallReader:
    """Return the same, of a tool of the request."""
    return PythonCall(opened.sink, opened.before, known_names(opened.tools))


def python_list(opened: CallStart) -> CallReader:
    """Parse calls that are a list in Python, of tools of the request."""
    return PythonCalls(opened.sink, opened.before, known_names(opened.tools))


def _arguments(call: str) -> str | None:
    """Return the named arguments between parentheses as a JSON object; None if they are not literals, or not named."""
    tree = python_expression(f"f{call}")
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        return None
    names: list[ast.expr | None] = [ast.Constant(keyword.arg) for keyword in tree.keywords]
    return json_of_literal(ast.Dict(names, [keyword.value for keyword in tree.keywords]))
