"""Finds the end of a JSON value in text that comes in pieces, and the first character that cannot be part of one."""

from __future__ import annotations

import enum
import re

#: How deep a value may be nested; deeper ones are what parsers of JSON give up on.
MAX_DEPTH = 200

_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

#: A number's states: what follows in each, by the kind of character.
_NUMBER = {
    "-": {"0": "0", "9": "i"},
    "0": {".": ".", "e": "e"},
    "i": {"0": "i", "9": "i", ".": ".", "e": "e"},
    ".": {"0": "f", "9": "f"},
    "f": {"0": "f", "9": "f", "e": "e"},
    "e": {"0": "x", "9": "x", "-": "s", "+": "s"},
    "s": {"0": "x", "9": "x"},
    "x": {"0": "x", "9": "x"},
}
#: The states in which a number may end.
_WHOLE = frozenset("0ifx")
_KINDS = {**dict.fromkeys("123456789", "9"), "0": "0", ".": ".", "e": "e", "E": "e", "-": "-", "+": "+"}
#: The state after the first character.
_FIRST = {"-": "-", "0": "0", **dict.fromkeys("123456789", "i")}


class Progress(enum.Enum):
    """How far the reading of something has come."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class _Mode(enum.Enum):
    """What comes next."""

    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    MORE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    HEX = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()


class JsonValue:
    """Reads one value by the letter of RFC 8259. Each character is looked at once; nothing of the text is kept."""

    __slots__ = ("_in_key", "_left", "_mode", "_number", "_stack", "progress")

    def __init__(self) -> None:
        self.progress = Progress.OPEN
        self._mode = _Mode.VALUE
        #: The brackets that are open, by what closes them.
        self._stack: list[str] = []
        self._in_key = False
        self._number = ""
        #: What must still come of a literal or of an escaped character.
        self._left = ""

    def feed(self, text: str, at: int = 0) -> int:
        """Reads on from `at`; returns where it stopped: at the end of the text, after the value, or at what breaks it.

        A number ends with the character after it, which is not part of it.
        """
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            mode = self._mode
            if mode is _Mode.STRING:
                at = self._string(text, at, end)
            elif mode is _Mode.NUMBER:
                at = self._in_number(text[at], at)
            elif mode is _Mode.ESCAPE or mode is _Mode.HEX or mode is _Mode.LITERAL:
                at = self._fixed(text[at], at)
            else:
                char = text[at]
                if char in " \t\n\r":
                    match = _SPACE.match(text, at)
                    at = match.end() if match is not None else at
                    if at == end:
                        break
                    char = text[at]
                at = self._structure(char, at)
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        match = _STRING.match(text, at)
        at = match.end() if match is not None else at
        if at == end:
            return at
        if text[at] == '"':
            self._mode = _Mode.COLON
            if not self._in_key:
                self._ended()
        elif text[at] == "\\":
            self._mode = _Mode.ESCAPE
        else:
            return self._break(at)
        return at + 1

    def _in_number(self, char: str, at: int) -> int:
        state = _NUMBER[self._number].get(_KINDS.get(char, ""))
        if state is not None:
            self._number = state
            return at + 1
        if self._number not in _WHOLE:
            return self._break(at)
        self._ended()
        return at

    def _fixed(self, char: str, at: int) -> int:
        """A character of which there is little choice: in an escape or a literal."""
        if self._mode is _Mode.ESCAPE:
            if char == "u":
                self._mode, self._left = _Mode.HEX, "0000"
            elif char in _ESCAPES:
                self._mode = _Mode.STRING
            else:
                return self._break(at)
            return at + 1
        if not (char in _HEX if self._mode is _Mode.HEX else char == self._left[0]):
            return self._break(at)
        self._left = self._left[1:]
        if not self._left:
            if self._mode is _Mode.HEX:
                self._mode = _Mode.STRING
            else:
                self._ended()
        return at + 1

    def _structure(self, char: str, at: int) -> int:
        mode, stack = self._mode, self._stack
        if mode is _Mode.COLON:
            if char != ":":
                return self._break(at)
            self._mode = _Mode.VALUE
        elif mode is _Mode.MORE:
            if char == stack[-1]:
                self._close()
            elif char == ",":
                self._mode = _Mode.KEY if stack[-1] == "}" else _Mode.VALUE
            else:
                return self._break(at)
        elif mode is _Mode.KEY or mode is _Mode.KEY_OR_END:
            if char == '"':
                self._mode, self._in_key = _Mode.STRING, True
            elif char == "}" and mode is _Mode.KEY_OR_END:
                self._close()
            else:
                return self._break(at)
        elif char == "]" and mode is _Mode.VALUE_OR_END:
            self._close()
        else:
            return self._begin(char, at)
        return at + 1

    def _begin(self, char: str, at: int) -> int:
        if char == '"':
            self._mode, self._in_key = _Mode.STRING, False
        elif char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._break(at)
            self._stack.append("}" if char == "{" else "]")
            self._mode = _Mode.KEY_OR_END if char == "{" else _Mode.VALUE_OR_END
        elif char in _LITERALS:
            self._mode, self._left = _Mode.LITERAL, _LITERALS[char]
        elif char in _FIRST:
            self._mode, self._number = _Mode.NUMBER, _FIRST[char]
        else:
            return self._break(at)
        return at + 1

    def _close(self) -> None:
        self._stack.pop()
        self._ended()

    def _ended(self) -> None:
        if self._stack:
            self._mode = _Mode.MORE
        else:
            self.progress = Progress.DONE

    def _break(self, at: int) -> int:
        self.progress = Progress.BROKEN
        return at
