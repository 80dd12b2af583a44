"""Reads tool calls that are written as JSON, in text that comes in pieces.

A reader takes characters until the call is complete or cannot be one. It *reports* a call to the sink as soon as the
name is known and the arguments have begun; from then on it passes the arguments on as they come. To a `buffered` sink
it reports the call once the arguments are complete. It keeps the text that it has not reported, so that text that
turns out to be no markup can be shown as it was written.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable
from typing import Protocol

from dynamo_text.json_value import JsonValue, Progress

_SPACE = re.compile(r"[ \t\n\r]*")


class CallSink(Protocol):
    """Receives the calls."""

    #: Whether a call may wait until its arguments are complete: what breaks off before is then no call.
    buffered: bool

    def begin_call(self, name: str, id: str | None = None) -> None:
        """A call begins."""

    def arguments(self, text: str) -> None:
        """More of the arguments of the last call: part of a JSON object, as it was written."""


class CallReader(Protocol):
    """The interface of all readers."""

    progress: Progress
    #: Whether a call was reported to the sink.
    reported: bool

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """Reads on from `at`; returns where it stopped: at the end, after the markup, or at what breaks it.

        A reader may leave text that it cannot judge yet. That text must come again with more after it, or with `last`,
        which says that there is none.
        """

    def unreported(self) -> str:
        """The text that was read and not reported."""

    def leftover(self) -> str:
        """What is to be shown as it is if the text ends here: nothing, if only the end of the markup is missing."""


class CallArguments:
    """The bare arguments of a call whose name is known: a JSON object. `before` is markup that was read already."""

    def __init__(self, sink: CallSink, name: str, id: str | None = None, before: str = "") -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._name, self._id = name, id
        self._raw = [before]
        self._value = JsonValue()
        #: Whether the object has begun, and how much of `_raw` stands before it.
        self._begun = False
        self._before = 0

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        if not self._begun:
            start, at = at, skip_space(text, at)
            self._raw.append(text[start:at])
            if at == len(text):
                return at
            if text[at] != "{":
                self.progress = Progress.BROKEN
                return at
            if not self._sink.buffered:
                self._report()
            self._begun = True
            self._before = len(self._raw)
        start, at = at, self._value.feed(text, at)
        self.progress = self._value.progress
        self._raw.append(text[start:at])
        if self.reported:
            self._sink.arguments(self._raw.pop())
        elif self.progress is Progress.DONE:
            arguments = "".join(self._raw[self._before :])
            self._report()
            self._sink.arguments(arguments)
        return at

    def _report(self) -> None:
        self._sink.begin_call(self._name, self._id)
        self.reported = True
        self._raw.clear()

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`."""
        return self.unreported()


class _Next(enum.Enum):
    """What comes next in the object of a call."""

    BRACE = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    MORE = enum.auto()


class _Role(enum.Enum):
    """What a value inside the object of a call is for."""

    KEY = enum.auto()
    NAME = enum.auto()
    #: Arguments that are an object: told as they come.
    ARGUMENTS = enum.auto()
    #: Arguments that are something else, and must be seen whole.
    OTHER_ARGUMENTS = enum.auto()
    SKIPPED = enum.auto()


class CallObject:
    """A call as a JSON object: a text `name`, and `arguments` or `parameters`, in any order, among other keys.

    Arguments that are an object are told as they were written; if they are a text that holds an object, that; if they
    are null, an empty text or missing, an empty object. Anything else is no call, and neither is an object whose name
    `accepts` refuses. `before` is markup that was read already.
    """

    def __init__(self, sink: CallSink, before: str = "", accepts: Callable[[str], bool] = bool) -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._accepts = accepts
        self._raw = [before]
        self._next = _Next.BRACE
        #: The value that is being read, what it is for, and its text if that is needed.
        self._value: JsonValue | None = None
        self._role = _Role.SKIPPED
        self._piece: list[str] = []
        self._key = ""
        self._name: str | None = None
        self._has_arguments = False
        #: Arguments that came before the name.
        self._early: list[str] = []

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            at = self._structure(text, at) if self._value is None else self._inside(self._value, text, at)
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`. Of a call that was reported, keys after its arguments may be there in part."""
        unreported = self.unreported()
        return unreported if not self.reported or unreported.strip() else ""

    def _structure(self, text: str, at: int) -> int:
        start, at = at, skip_space(text, at)
        self._raw.append(text[start:at])
        if at == len(text):
            return at
        char, expected = text[at], self._next
        if expected is _Next.VALUE:
            self._begin_value(char)
            return at
        if char == '"' and expected in (_Next.KEY, _Next.KEY_OR_END):
            self._read(_Role.KEY)
            return at
        if char == "{" and expected is _Next.BRACE:
            self._next = _Next.KEY_OR_END
        elif char == ":" and expected is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and expected is _Next.MORE:
            self._next = _Next.KEY
        elif char == "}" and expected in (_Next.MORE, _Next.KEY_OR_END) and self._name is not None:
            if not self.reported:
                self._report("{}")
            self._raw.clear()
            self.progress = Progress.DONE
            return at + 1
        else:
            self.progress = Progress.BROKEN
            return at
        self._raw.append(char)
        return at + 1

    def _begin_value(self, char: str) -> None:
        if self._key == "name":
            if self._name is not None:
                self.progress = Progress.BROKEN
                return
            self._read(_Role.NAME)
        elif self._key in ("arguments", "parameters"):
            if self._has_arguments:
                self.progress = Progress.BROKEN
                return
            self._has_arguments = True
            self._read(_Role.ARGUMENTS if char == "{" else _Role.OTHER_ARGUMENTS)
            if char == "{" and self._name is not None and not self._sink.buffered:
                self._report("")
        else:
            self._read(_Role.SKIPPED)

    def _read(self, role: _Role) -> None:
        self._value, self._role = JsonValue(), role
        self._piece.clear()

    def _inside(self, value: JsonValue, text: str, at: int) -> int:
        start, at = at, value.feed(text, at)
        piece = text[start:at]
        if self._role is _Role.ARGUMENTS and self.reported:
            self._sink.arguments(piece)
        else:
            self._raw.append(piece)
            if self._role is _Role.ARGUMENTS:
                self._early.append(piece)
            elif self._role is not _Role.SKIPPED:
                self._piece.append(piece)
        if value.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
        elif value.progress is Progress.DONE:
            self._value = None
            self._next = _Next.COLON if self._role is _Role.KEY else _Next.MORE
            if not self._take("".join(self._piece)):
                self.progress = Progress.BROKEN
        return at

    def _take(self, piece: str) -> bool:
        """Takes in a value that is complete; false if there is no call with such a value."""
        if self._role is _Role.KEY:
            self._key = json.loads(piece)
        elif self._role is _Role.NAME:
            name = _text(piece)
            if not name or not self._accepts(name):
                return False
            self._name = name
            if self._early:
                self._report("".join(self._early))
        elif self._role is _Role.ARGUMENTS:
            if self._name is not None and not self.reported:
                self._report("".join(self._early))
        elif self._role is _Role.OTHER_ARGUMENTS:
            arguments = _object(piece)
            if arguments is None:
                return False
            if self._name is None:
                self._early.append(arguments)
            else:
                self._report(arguments)
        return True

    def _report(self, arguments: str) -> None:
        assert self._name is not None  # noqa: S101 - callers have looked
        self._sink.begin_call(self._name)
        if arguments:
            self._sink.arguments(arguments)
        self.reported = True
        self._raw.clear()


class CallArray:
    """Calls as the objects of a JSON array. `before` is markup that was read already."""

    def __init__(self, sink: CallSink, before: str = "") -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._raw = [before]
        self._opened = False
        self._comma = False
        self._object: CallObject | None = None

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            call = self._object
            if call is None:
                at = self._between(text, at)
                continue
            at = call.feed(text, at)
            self.reported = self.reported or call.reported
            if call.progress is Progress.DONE:
                self._object = None
                self._comma = True
            else:
                self.progress = call.progress
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw) if self._object is None else self._object.unreported()

    def leftover(self) -> str:
        """See `CallReader.leftover`."""
        if self._object is not None:
            return self._object.leftover()
        return "" if self.reported else self.unreported()

    def _between(self, text: str, at: int) -> int:
        start, at = at, skip_space(text, at)
        self._raw.append(text[start:at])
        if at == len(text):
            return at
        char = text[at]
        if self._opened and not self._comma:
            if char != "{":
                self.progress = Progress.BROKEN
                return at
            # The brace is the object's own.
            self._object = CallObject(self._sink, before="".join(self._raw))
            self._raw.clear()
            return at
        if char == "]" and self._comma:
            self._raw.clear()
            self.progress = Progress.DONE
            return at + 1
        if char != ("," if self._opened else "["):
            self.progress = Progress.BROKEN
            return at
        self._opened, self._comma = True, False
        self._raw.append(char)
        return at + 1


def skip_space(text: str, at: int) -> int:
    """Where the white space of JSON that begins at `at` ends."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _text(piece: str) -> str | None:
    """What a JSON text says; None if the value is no text, or one that cannot be sent."""
    if not piece.startswith('"'):
        return None
    value: str = json.loads(piece)
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _object(piece: str) -> str | None:
    """The JSON object that stands for arguments that are not written as one; None if they are nothing of the kind."""
    if piece == "null":
        return "{}"
    text = _text(piece)
    if text is None:
        return None
    text = text.strip() or "{}"
    return text if is_object(text) else None


def is_object(text: str) -> bool:
    """Whether a text is a JSON object and nothing else."""
    value = JsonValue()
    return text.startswith("{") and value.feed(text) == len(text) and value.progress is Progress.DONE
