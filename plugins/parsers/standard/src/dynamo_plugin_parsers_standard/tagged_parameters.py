"""A reader of calls with parameters between tags, which emits their arguments as JSON while they come."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from dynamo_text import CallReader, Progress

from dynamo_plugin_parsers_standard.formats import CallStart
from dynamo_plugin_parsers_standard.scanner import Tags, end_of, may_begin, skip_white
from dynamo_plugin_parsers_standard.schema_values import LONGEST_NULL, STRING, ParameterTypes, Types, json_of, string
from dynamo_plugin_parsers_standard.tool_names import known_names

#: The longest name of a function or a parameter.
_LONGEST = 256
_NAME = re.compile(r"""[^\s<>"'{}()\[\]=,]*""")
_NULLABLE_STRING: Types = frozenset({"string", "null"})
_State: TypeAlias = Callable[[str, int, bool], int]


@dataclass(frozen=True, slots=True)
class TaggedSyntax:
    """The tags of one call."""

    #: After the name of the function; if empty, the name ends with white space or a tag.
    name_end: str
    close: str
    #: Before the name of a parameter.
    key_open: str
    #: After it, with the types of a value whose type the schema of the tool does not say.
    key_ends: Mapping[str, Types]
    value_close: str
    #: Between the name and the value, after white space.
    value_open: str = ""
    #: Tags that end a call, too, if its own end is missing. They are not part of it.
    stops: tuple[str, ...] = ()
    #: Whether a tool must be one of the request where a call stands outside of a section.
    doubtful: bool = True
    #: Whether the types that `key_ends` has hold where the schema allows them.
    typed: bool = False
    #: Whether a newline after the opening tag of a value, and one before the closing tag, belong to the tags.
    newlines: bool = False


class TaggedCall(CallReader):
    """Reads one call from its name on; a `dynamo_text.CallReader`.

    A closing tag ends a value only if another parameter or the end of the call follows. Any other tag in a value is
    part of it. A value without a closing tag ends at the tag of a parameter that the tool has and that was not given
    yet, and at the end of the call. A call is told once its first value begins; from then on the text belongs to its
    arguments until the call ends. A repeated parameter stands in the arguments again: the last one counts for readers
    of JSON.

    The schema of the tool decides about the types of values. A string is told as it comes, other values at their end.
    """

    def __init__(self, syntax: TaggedSyntax, opened: CallStart, accepts: Callable[[str], bool] = bool) -> None:
        self.progress = Progress.OPEN
        self.reported = False
        self._sink = opened.sink
        self._syntax = syntax
        self._tools = opened.tools
        self._accepts = accepts
        self._tags = _tags(syntax.value_close, syntax.key_open, syntax.close)
        self._state: _State = self._in_name
        #: The text that was read and not reported.
        self._raw = [opened.before]
        #: Arguments that wait for the end of the call.
        self._waiting: list[str] = []
        self._word = ""
        self._name = ""
        self._parameters: ParameterTypes | None = None
        #: The keys so far, and the types that the tag of the last key has.
        self._given: set[str] = set()
        self._tag_types: Types = STRING
        self._closed = True
        #: Text that is part of the value unless the value turns out to end before it.
        self._pending: list[str] = []
        #: Of the value: its types, and what of it waits for its end; None where a string is told as it comes.
        self._types: Types = STRING
        self._parts: list[str] | None = None
        self._length = 0
        self._first = False
        #: A newline that belongs to the closing tag, if that follows.
        self._newline = ""

    def feed(self, text: str, at: int = 0, last: bool = False) -> int:
        """See `CallReader.feed`."""
        start, end = at, len(text)
        while at < end and self.progress is Progress.OPEN:
            state = self._state
            came = state(text, at, last)
            if came == at and self._state == state:
                break
            if self._given and state != self._in_value:
                self._pending.append(text[at:came])
            at = came
        if not self.reported:
            self._raw.append(text[start:at])
        return at

    def unreported(self) -> str:
        """See `CallReader.unreported`."""
        return "" if self.reported else "".join(self._raw)

    def leftover(self) -> str:
        """See `CallReader.leftover`. What waits of the value of a call that was reported is told."""
        if self._state == self._after_close:
            self._end_call()
        elif self.reported:
            if self._state in (self._in_key, self._before_value):
                self._take("".join(self._pending))
            self._end_value(cut_off=True)
        return self.unreported()

    def _in_name(self, text: str, at: int, last: bool) -> int:
        if not self._word and (came := skip_white(text, at)) > at:
            return came
        if (came := self._more(_NAME, text, at)) > at:
            return came
        found = self._tag(text, at, (self._syntax.name_end,), last) if self._syntax.name_end else None
        if found == "":
            return at
        if not self._word or not self._accepts(self._word) or (found is None and self._syntax.name_end):
            return self._fail(at)
        self._name = self._word
        self._state = self._between
        return at + len(self._syntax.name_end)

    def _between(self, text: str, at: int, last: bool) -> int:
        """Read the text after the name or the closing tag of a value."""
        if (came := skip_white(text, at)) > at:
            return came
        syntax = self._syntax
        stops = syntax.stops if self._given else ()
        found = self._tag(text, at, (syntax.key_open, syntax.close, *stops), last)
        if found is None:
            return self._fail(at)
        if found == syntax.key_open:
            self._begin_key(closed=True)
        elif found:
            self._end_call()
        return at if found in stops else at + len(found)

    def _in_key(self, text: str, at: int, last: bool) -> int:
        ends = self._syntax.key_ends
        if (came := self._more(_key_before(next(iter(ends))[0]), text, at)) > at:
            return came
        found = self._tag(text, at, ends, last)
        if found == "":
            return at
        key = self._word.strip()
        if not key or found is None or not (self._closed or self._may_follow(key)):
            return self._fail(at)
        self._tag_types = ends[found]
        if self._syntax.value_open:
            self._state = self._before_value
        else:
            self._begin_value()
        return at + len(found)

    def _before_value(self, text: str, at: int, last: bool) -> int:
        if (came := skip_white(text, at)) > at:
            return came
        found = self._tag(text, at, (self._syntax.value_open,), last)
        if found is None:
            return self._fail(at)
        if found:
            self._begin_value()
        return at + len(found)

    def _in_value(self, text: str, at: int, last: bool) -> int:
        found = self._tags.find(text, at, last=last)
        self._take(text[at:found])
        tag = self._tags.at(text, found)
        if not tag:
            return found
        self._pending = [tag]
        if tag == self._syntax.value_close:
            self._state = self._between
        elif tag == self._syntax.key_open:
            self._begin_key(closed=False)
        else:
            self._state = self._after_close
        return found + len(tag)

    def _after_close(self, text: str, at: int, last: bool) -> int:
        """Read the text after the end of a call in a value without a closing tag."""
        if (came := skip_white(text, at)) > at:
            return came
        found = self._tag(text, at, self._syntax.stops, last)
        if found is None:
            return self._fail(at)
        if found:
            self._end_call()
        return at

    def _fail(self, at: int) -> int:
        """Handle text that must not follow here: there is no call, or the value goes on."""
        if not self._given:
            self.progress = Progress.BROKEN
            return at
        self._state = self._in_value
        self._take("".join(self._pending))
        return at

    def _more(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        """Read more of a name."""
        end = end_of(pattern, text, at, _LONGEST - len(self._word))
        self._word += text[at:end]
        return end

    def _tag(self, text: str, at: int, tags: Iterable[str], last: bool) -> str | None:
        """Return the tag that stands here; an empty text if one may begin here; None otherwise."""
        for tag in tags:
            if text.startswith(tag, at):
                return tag
        return "" if not last and any(may_begin(text, at, tag) for tag in tags) else None

    def _begin_key(self, *, closed: bool) -> None:
        self._word = ""
        self._closed = closed
        self._state = self._in_key

    def _may_follow(self, key: str) -> bool:
        return key not in self._given and self._schema().declares(key)

    def _schema(self) -> ParameterTypes:
        if self._parameters is None:
            self._parameters = ParameterTypes(self._tools, self._name)
        return self._parameters

    def _begin_value(self) -> None:
        key = self._word.strip()
        if self._given:
            self._end_value()
        else:
            self._report_early()
        self._emit(f"{', ' if self._given else '{'}{string(key)}: ")
        self._given.add(key)
        types, by_tag = self._schema().of(key), self._tag_types
        self._types = by_tag if types is None or (self._syntax.typed and by_tag <= types) else types
        self._parts = None if self._types == STRING else []
        if self._parts is None:
            self._emit('"')
        self._length = 0
        self._first = self._syntax.newlines
        self._newline = ""
        self._state = self._in_value

    def _take(self, text: str) -> None:
        """Take more of the value."""
        if not text:
            return
        if self._first:
            self._first = False
            text = text.removeprefix("\n")
        if self._syntax.newlines:
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._parts is None:
            self._emit(string(text)[1:-1])
            return
        self._parts.append(text)
        self._length += len(text)
        if self._types == _NULLABLE_STRING and self._length > LONGEST_NULL:
            self._emit(string("".join(self._parts))[:-1])
            self._parts = None

    def _end_value(self, *, cut_off: bool = False) -> None:
        if self._parts is not None:
            self._emit(json_of("".join(self._parts), self._types))
        elif not cut_off:
            self._emit('"')
        self._parts = None

    def _end_call(self) -> None:
        if self._given:
            self._end_value()
            self._emit("}")
        else:
            self._report_early()
            self._emit("{}")
        if self._sink.buffered:
            self._report()
            self._sink.arguments("".join(self._waiting))
        self.progress = Progress.DONE

    def _report_early(self) -> None:
        if not self._sink.buffered:
            self._report()

    def _report(self) -> None:
        self._sink.begin_call(self._name)
        self.reported = True
        self._raw.clear()

    def _emit(self, text: str) -> None:
        if self._sink.buffered:
            self._waiting.append(text)
        else:
            self._sink.arguments(text)


def tagged(syntax: TaggedSyntax) -> Callable[[CallStart], CallReader]:
    """Return the body of calls in these tags."""

    def body(opened: CallStart) -> CallReader:
        doubtful = syntax.doubtful and not opened.in_section
        return TaggedCall(syntax, opened, known_names(opened.tools) if doubtful else bool)

    return body


@functools.cache
def _tags(*texts: str) -> Tags:
    return Tags(texts)


@functools.cache
def _key_before(end: str) -> re.Pattern[str]:
    """Return the characters of a key that ends with a character. A tag cannot hide in it."""
    return re.compile(f"[^<\\n{re.escape(end)}]*")
