"""Calls as Llama 4 and others write them, in Python: ``[weather(city="Oslo", days=2), time()]``."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from dynamo_text import MAX_DEPTH, CallSink, Progress

from dynamo_plugin_parsers_standard.markup import MarkupParser
from dynamo_plugin_parsers_standard.names import known_names

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_LONGEST_NAME = 256
_PLAIN = re.compile(r"[^()\[\]{}'\"]*")
_IN_STRING = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_WORDS = {"true": True, "false": False, "null": None}


class PythonicParser(MarkupParser):
    """A list of calls at the beginning of the answer, with literals as named arguments; then everything is content.

    The arguments are told as JSON once the call is closed: they are not JSON before. Only calls of tools of the request
    count.
    """

    NAME = "pythonic"
    OPEN = "["

    def _begin(self) -> None:
        self._enter(self._call)

    def _complete(self) -> None:
        self._enter(self._after_call)

    def _call(self, text: str, at: int, last: bool) -> int:
        at = self._hold_space(text, at)
        if at < len(text):
            before = self._take_header() + "".join(self._space)
            self._space.clear()
            self._read(PythonCall(self._out, before, known_names(self.tools)))
        return at

    def _after_call(self, text: str, at: int, last: bool) -> int:
        at = self._hold_space(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._space.append(",")
            self._enter(self._call)
        elif text[at] == "]":
            self._space.clear()
            self._enter(self._closed)
        else:
            self._emit_space()
            self._enter(self._content)
            return at
        return at + 1

    def _closed(self, text: str, at: int, last: bool) -> int:
        at = self._hold_space(text, at)
        if at < len(text):
            self._emit_space()
            self._enter(self._content)
        return at

    def _content(self, text: str, at: int, last: bool) -> int:
        self._out.content(text[at:])
        return len(text)


class PythonCall:
    """Reads one call up to its closing parenthesis; a `dynamo_text.calls.CallReader`."""

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


def _arguments(call: str) -> str | None:
    """The named arguments between parentheses as a JSON object; None if they are not literals, or not named."""
    try:
        with warnings.catch_warnings():
            # Strings of models have escapes that Python does not know, and warns of.
            warnings.simplefilter("ignore")
            tree = ast.parse(f"f{call}", mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            return None
        values = {keyword.arg: _literal(keyword.value) for keyword in tree.keywords}
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if None in values else text


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str()):
            return node.value
        case ast.Name(id=name) if name in _WORDS:
            # Models mix the languages up.
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                raise ValueError("the key of a JSON object is a text")
            return {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    raise ValueError("not a literal")
