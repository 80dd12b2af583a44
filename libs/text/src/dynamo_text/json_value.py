"""An incremental finder of the end of a JSON value, which repairs slips with only one reading."""

from __future__ import annotations

import enum
import json
import re

#: How deep a value may be nested; deeper ones are what parsers of JSON give up on.
MAX_DEPTH = 200

_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
#: The escape of one half of a surrogate pair, after which that of the other half follows.
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB].{2}")
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
    """The progress of reading a value."""

    OPEN = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


#: Kinds of repairs.
CONTROL_CHARACTER, BACKSLASH, TRAILING_COMMA = "control_character", "backslash", "trailing_comma"
MISSING_BRACKET, SURPLUS_BRACKET = "missing_bracket", "surplus_bracket"


class _Mode(enum.Enum):
    """The next expected part."""

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
    """Reads one value by the letter of RFC 8259, but for repairs. Each character is looked at once.

    Control characters inside strings become escapes, a backslash that begins no escape becomes two (before an
    apostrophe none), and a comma before a closing bracket is dropped. `take` returns the value so far, as it was
    written or repaired; the beginning of an escape, and a comma and the space after it, wait there for what follows.
    """

    __slots__ = (
        "_from",
        "_held",
        "_hold",
        "_in_key",
        "_left",
        "_mode",
        "_number",
        "_out",
        "_stack",
        "progress",
        "repairs",
    )

    def __init__(self) -> None:
        self.progress = Progress.OPEN
        #: The kinds of repairs so far.
        self.repairs: set[str] = set()
        self._mode = _Mode.VALUE
        #: The brackets that are open, by what closes them.
        self._stack: list[str] = []
        self._in_key = False
        self._number = ""
        #: What must still come of a literal or of an escaped character.
        self._left = ""
        #: What `take` returns next, and where text that belongs there begins in the piece that is being read.
        self._out: list[str] = []
        self._from = 0
        #: What waits: where it begins in that piece (-1: nothing waits), and what of it came before that piece.
        self._hold = -1
        self._held: list[str] = []

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from `at`; return where it stopped: at the end of the text, after the value, or at what breaks it.

        A number ends with the character after it, which is not part of it.
        """
        end = len(text)
        self._from = at
        self._hold = at if self._held else -1
        while at < end and self.progress is Progress.OPEN:
            mode = self._mode
            if mode is _Mode.STRING:
                at = self._string(text, at, end)
            elif mode is _Mode.NUMBER:
                at = self._in_number(text[at], at)
            elif mode is _Mode.ESCAPE or mode is _Mode.HEX or mode is _Mode.LITERAL:
                at = self._fixed(text, at)
            else:
                char = text[at]
                if char in " \t\n\r":
                    match = _SPACE.match(text, at)
                    at = match.end() if match is not None else at
                    if at == end:
                        break
                    char = text[at]
                at = self._structure(text, at)
        if self._hold < 0:
            self._out.append(text[self._from : at])
        else:
            self._out.append(text[self._from : self._hold])
            self._held.append(text[self._hold : at])
        return at

    def take(self) -> str:
        """Return what has become certain of the value since the last call."""
        out = self._out
        if len(out) == 1:
            return out.pop()
        self._out = []
        return "".join(out)

    def give_up(self) -> str:
        """Return what still waits, where the text ends in the value."""
        held = "".join(self._held)
        self._held.clear()
        return self.take() + held

    def close(self) -> bool:
        """Close the outermost bracket where nothing else is missing; false if more is."""
        if self._mode is _Mode.NUMBER and self._number in _WHOLE:
            self._ended()
        if self._mode is not _Mode.MORE or len(self._stack) != 1:
            return False
        self._out.append(self._stack[0])
        self.repairs.add(MISSING_BRACKET)
        self._close()
        return True

    def _string(self, text: str, at: int, end: int) -> int:
        if self._hold >= 0 and text[at] != "\\":
            # Half of a surrogate pair, without the other half.
            self._release()
        match = _STRING.match(text, at)
        at = match.end() if match is not None else at
        if at == end:
            return at
        char = text[at]
        if char == '"':
            self._mode = _Mode.COLON
            if not self._in_key:
                self._ended()
        elif char == "\\":
            self._mode = _Mode.ESCAPE
            if self._hold < 0:
                self._hold = at
        else:
            self._hold = at
            self._replace(text, at + 1, json.dumps(char)[1:-1], CONTROL_CHARACTER)
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

    def _fixed(self, text: str, at: int) -> int:
        """Return a character of which there is little choice: in an escape or a literal."""
        char = text[at]
        if self._mode is _Mode.ESCAPE:
            if char == "u":
                self._mode, self._left = _Mode.HEX, "0000"
            elif char in _ESCAPES:
                self._mode = _Mode.STRING
                self._release()
            else:
                return self._unescape(text, at)
            return at + 1
        if not (char in _HEX if self._mode is _Mode.HEX else char == self._left[0]):
            return self._unescape(text, at) if self._mode is _Mode.HEX else self._break(at)
        self._left = self._left[1:]
        if not self._left:
            if self._mode is _Mode.HEX:
                self._mode = _Mode.STRING
                if not _HIGH_SURROGATE.fullmatch(self._waiting(text, at + 1)):
                    self._release()
            else:
                self._ended()
        return at + 1

    def _unescape(self, text: str, at: int) -> int:
        """Repair what waits: its last backslash begins no escape, since the character at `at` follows."""
        before, _, begun = self._waiting(text, at).rpartition("\\")
        self._replace(text, at, before + ("" if text[at] == "'" and not begun else f"\\\\{begun}"), BACKSLASH)
        self._mode = _Mode.STRING
        return at

    def _structure(self, text: str, at: int) -> int:
        mode, stack, char = self._mode, self._stack, text[at]
        if mode is _Mode.COLON:
            if char != ":":
                return self._break(at)
            self._mode = _Mode.VALUE
        elif mode is _Mode.MORE:
            if char == stack[-1]:
                self._close()
            elif char == ",":
                self._mode = _Mode.KEY if stack[-1] == "}" else _Mode.VALUE
                self._hold = at
            else:
                return self._break(at)
        elif self._hold >= 0 and char == stack[-1]:
            self._replace(text, at, self._waiting(text, at)[1:], TRAILING_COMMA)
            self._close()
        elif mode is _Mode.KEY or mode is _Mode.KEY_OR_END:
            if self._hold >= 0:
                self._release()
            if char == '"':
                self._mode, self._in_key = _Mode.STRING, True
            elif char == "}" and mode is _Mode.KEY_OR_END:
                self._close()
            else:
                return self._break(at)
        elif char == "]" and mode is _Mode.VALUE_OR_END:
            self._close()
        else:
            if self._hold >= 0:
                self._release()
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

    def _waiting(self, text: str, at: int) -> str:
        """Return what waits, up to `at`."""
        return "".join(self._held) + text[self._hold : at]

    def _release(self) -> None:
        """Add the waiting text to the value as it is."""
        if self._held:
            self._out += self._held
            self._held.clear()
        self._hold = -1

    def _replace(self, text: str, at: int, new: str, repair: str) -> None:
        """Put something else in the place of what waits, up to `at`."""
        self._out += (text[self._from : self._hold], new)
        self._held.clear()
        self._from, self._hold = at, -1
        self.repairs.add(repair)

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
