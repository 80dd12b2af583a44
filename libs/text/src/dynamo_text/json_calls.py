"""An incremental reader of tool calls written as JSON.

A reader takes characters until the call is complete or cannot be one. It *reports* a call to the sink as soon as the
name is known and the arguments have begun; from then on it passes the arguments on as they come. To a `buffered` sink
it reports the call once the arguments are complete. It keeps the text that it has not reported, so that text that
turns out to be no markup can be shown as it was written.

Readers of JSON repair slips that can be read in one way only: those of `JsonValue`, commas before the closing brackets
of the markup itself, and one closing bracket that is missing or too many at the end. The sink hears of the repairs of
a call once its arguments are complete.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterable
from typing import Protocol

from dynamo_text.json_value import MISSING_BRACKET, SURPLUS_BRACKET, TRAILING_COMMA, JsonValue, Progress

_SPACE = re.compile(r"[ \t\n\r]*")


class CallSink(Protocol):
    """Receives the calls."""

    #: Whether a call may wait until its arguments are complete: what breaks off before is then no call.
    buffered: bool

    def begin_call(self, name: str, id: str | None = None) -> None:
        """Record that a call begins."""

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call a part of a JSON object, as written or repaired."""

    def repaired(self, kind: str) -> None:
        """Count a kind of repair of the last call, which may be told again."""


class CallReader(Protocol):
    """The interface of all readers."""

    progress: Progress
    #: Whether a call was reported to the sink.
    reported: bool

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """Read on from `at`; return where it stopped: at the end, after the markup, or at what breaks it.

        A reader may leave text that it cannot judge yet. That text must come again with more after it, or with `last`,
        which says that there is none.
        """

    def complete(self) -> bool:
        """End the call where its markup goes on, or the answer ends; false if more than one bracket is missing."""
        return False

    def unreported(self) -> str:
        """Return the text that was read and not reported."""

    def leftover(self) -> str:
        """Return the text to show as it is if the text ends here: none if only the end of the markup is missing."""


class CallArguments(CallReader):
    """The bare arguments of a call with a known name: a JSON object. `before` is markup that was already read."""

    def __init__(self, sink: CallSink, name: str, id: str | None = None, before: str = "") -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._name, self._id = name, id
        self._raw = [before]
        self._value = JsonValue()
        self._begun = False
        #: Arguments that wait for their end.
        self._waiting: list[str] = []

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
        start, at = at, self._value.feed(text, at)
        if not self.reported:
            self._raw.append(text[start:at])
        self._emit()
        return at

    def complete(self) -> bool:
        """See `CallReader.complete`."""
        closed = self._value.close()
        if closed:
            self._emit()
        return closed

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`."""
        if self.reported:
            self._sink.arguments(self._value.give_up())
        return self.unreported()

    def _emit(self) -> None:
        value = self._value
        self.progress = value.progress
        arguments = value.take()
        if not self.reported:
            self._waiting.append(arguments)
            if value.progress is not Progress.DONE:
                return
            arguments = "".join(self._waiting)
            self._report()
        self._sink.arguments(arguments)
        if value.progress is Progress.DONE:
            _count(self._sink, value.repairs)

    def _report(self) -> None:
        self._sink.begin_call(self._name, self._id)
        self.reported = True
        self._raw.clear()


class _Next(enum.Enum):
    """The next expected part of a call's object."""

    BRACE = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    MORE = enum.auto()


class _Role(enum.Enum):
    """The role of a value inside a call's object."""

    KEY = enum.auto()
    NAME = enum.auto()
    #: Arguments that are an object: told as they come.
    ARGUMENTS = enum.auto()
    #: Arguments that are something else, and must be seen whole.
    OTHER_ARGUMENTS = enum.auto()
    SKIPPED = enum.auto()


class CallObject(CallReader):
    """A call as a JSON object: a text `name`, and `arguments` or `parameters`, in any order, among other keys.

    Arguments that are an object are told as they were written, with repairs; if they are a text that holds an object,
    that; if they are null, an empty text or missing, an empty object. Anything else is no call, and neither is an
    object whose name `accepts` refuses. `before` is markup that was read already.
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
        #: Repairs that the sink has not heard of.
        self._repairs: set[str] = set()

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        end = len(text)
        while at < end and self.progress is Progress.OPEN:
            at = self._structure(text, at) if self._value is None else self._inside(self._value, text, at)
        return at

    def complete(self) -> bool:
        """See `CallReader.complete`. A call without arguments is not one that only lacks its end."""
        if self._value is not None or self._next is not _Next.MORE or not self.reported:
            return False
        self._repairs.add(MISSING_BRACKET)
        self._end()
        return True

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`. Of a call that was reported, keys after its arguments may be there in part."""
        if self._value is not None and self._role is _Role.ARGUMENTS and self.reported:
            self._sink.arguments(self._value.give_up())
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
        elif char == "}" and expected in (_Next.MORE, _Next.KEY_OR_END, _Next.KEY) and self._name is not None:
            if expected is _Next.KEY:
                self._repairs.add(TRAILING_COMMA)
            if not self.reported:
                self._report("{}")
            self._end()
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
        piece = value.take()
        if self._role is _Role.ARGUMENTS and self.reported:
            self._sink.arguments(piece)
        else:
            self._raw.append(text[start:at])
            if self._role is _Role.ARGUMENTS:
                self._early.append(piece)
            elif self._role is not _Role.SKIPPED:
                self._piece.append(piece)
        if value.progress is Progress.OPEN:
            return at
        if value.progress is Progress.BROKEN:
            self.progress = Progress.BROKEN
            return at
        self._value = None
        self._next = _Next.COLON if self._role is _Role.KEY else _Next.MORE
        self._repairs |= value.repairs
        if not self._take("".join(self._piece)):
            self.progress = Progress.BROKEN
        elif self.reported:
            self._report_repairs()
        return at

    def _end(self) -> None:
        self._raw.clear()
        self.progress = Progress.DONE
        self._report_repairs()

    def _report_repairs(self) -> None:
        if self._repairs:
            _count(self._sink, self._repairs)
            self._repairs.clear()

    def _take(self, piece: str) -> bool:
        """Take in a value that is complete; false if there is no call with such a value."""
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
            found = _object(piece)
            if found is None:
                return False
            arguments, repairs = found
            self._repairs |= repairs
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


class CallArray(CallReader):
    """Calls as the objects of a JSON array. `before` is markup that was read already."""

    def __init__(self, sink: CallSink, before: str = "") -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = sink
        self._raw = [before]
        self._opened = False
        self._comma = False
        #: Whether a bracket too many stands after the last object.
        self._surplus = False
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
            if call.progress is Progress.OPEN:
                return at
            if call.progress is Progress.DONE or (text.startswith("]", at) and call.complete()):
                self._object = None
                self._comma, self._surplus = True, False
            else:
                self.progress = call.progress
        return at

    def complete(self) -> bool:
        """See `CallReader.complete`."""
        if self._object is not None or not self._comma or self._surplus:
            return False
        self._end(MISSING_BRACKET)
        return True

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
        if char == "]" and self.reported:
            self._end(*[SURPLUS_BRACKET] * self._surplus, *[TRAILING_COMMA] * (not self._comma))
            return at + 1
        if self._opened and not self._comma:
            if char != "{":
                self.progress = Progress.BROKEN
                return at
            # The brace is the object's own.
            self._object = CallObject(self._sink, before="".join(self._raw))
            self._raw.clear()
            return at
        if char == "}" and self._comma and not self._surplus:
            self._surplus = True
        elif char != ("," if self._opened else "["):
            self.progress = Progress.BROKEN
            return at
        else:
            _count(self._sink, [SURPLUS_BRACKET] * self._surplus)
            self._opened, self._comma = True, False
        self._raw.append(char)
        return at + 1

    def _end(self, *repairs: str) -> None:
        self._raw.clear()
        self.progress = Progress.DONE
        _count(self._sink, repairs)


def skip_space(text: str, at: int) -> int:
    """Return where the white space of JSON that begins at `at` ends."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _text(piece: str) -> str | None:
    """Return what a JSON text says; None if the value is no text, or one that cannot be sent."""
    if not piece.startswith('"'):
        return None
    value: str = json.loads(piece)
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _object(piece: str) -> tuple[str, set[str]] | None:
    """Return the JSON object that stands for arguments that are not written as one, and its repairs.

    None if they are none.
    """
    if piece == "null":
        return "{}", set()
    text = _text(piece)
    if text is None:
        return None
    text = text.strip() or "{}"
    value = JsonValue()
    rest = text[value.feed(text) :].strip() if text.startswith("{") else text
    if value.progress is not Progress.DONE and (rest or not value.close()):
        return None
    if surplus_kind(rest):
        value.repairs.add(SURPLUS_BRACKET)
    elif rest:
        return None
    return value.take(), value.repairs


def surplus_kind(text: str) -> str:
    """Return the kind of repair that drops a text after the end of JSON: that of one closing bracket, or none."""
    return SURPLUS_BRACKET if text in ("}", "]") else ""


def _count(sink: CallSink, repairs: Iterable[str]) -> None:
    for kind in repairs:
        sink.repaired(kind)
