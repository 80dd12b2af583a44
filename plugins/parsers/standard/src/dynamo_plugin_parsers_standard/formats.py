"""Tool-call formats as data: tags, separators, and the reader of a call's body."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dynamo_core import new_call_id
from dynamo_text import CallArguments, CallArray, CallObject, CallReader, CallSink

from dynamo_plugin_parsers_standard.grammar import CallGrammar
from dynamo_plugin_parsers_standard.tool_names import known_names


@dataclass(frozen=True, slots=True)
class CallStart:
    """The known parts of a call at the start of its body. `before` is its markup so far."""

    sink: CallSink
    tools: Sequence[Mapping[str, Any]]
    before: str
    name: str = ""
    id: str | None = None
    #: Whether the call stands in a section.
    in_section: bool = False


#: Makes the reader of a body.
Body: TypeAlias = Callable[[CallStart], CallReader]


def json_object(opened: CallStart) -> CallReader:
    """Parse a call that is an object with its name and its arguments."""
    return CallObject(opened.sink, opened.before)


def known_object(opened: CallStart) -> CallReader:
    """Return the same, of a tool of the request."""
    return CallObject(opened.sink, opened.before, known_names(opened.tools))


def json_array(opened: CallStart) -> CallReader:
    """Parse calls that are objects in a list."""
    return CallArray(opened.sink, opened.before)


def json_arguments(opened: CallStart) -> CallReader:
    """Parse a body that is the object of the arguments. The header had the name."""
    return CallArguments(opened.sink, opened.name, opened.id, opened.before)


def name_and_id(words: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the name and the id of a call, where the header has them as words."""
    return words.get("name", ""), words.get("id") or None


@dataclass(frozen=True, slots=True)
class Header:
    """Words with tags between them, from the tag that opens a call to its body. White space may stand anywhere."""

    #: What the word before each tag is followed by: the kind of the next word, or, if empty, the body.
    tags: Mapping[str, str]
    #: The kind of the first word.
    first: str = "name"
    #: Whether the body may follow a word without a tag.
    body_without_tag: bool = False
    word: re.Pattern[str] = re.compile(r"[\w.-]*")
    #: The name and the id of the call, from the words by their kinds. An empty name is no call.
    understand: Callable[[Mapping[str, str]], tuple[str, str | None]] = name_and_id


@dataclass(frozen=True, slots=True)
class Section:
    """Tags around the calls of an answer. The closing one may be missing, and so may both."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    #: Whether calls may stand outside of sections.
    optional: bool = True


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of calls: an opening tag, a header if the format has one, a body, closing tags."""

    opens: tuple[str, ...]
    #: The reader of the body, by the body's first character; "" stands for any.
    bodies: Mapping[str, Body]
    header: Header | None = None
    #: Tags after the body, in any order. Each may be missing.
    closes: tuple[str, ...] = ()
    section: Section | None = None
    #: Bodies that need no opening tag before them, by the first character.
    bare: Mapping[str, Body] = field(default_factory=dict)
    #: Whether more bodies may follow the first one before the closing tag.
    repeats: bool = False
    #: Characters beside white space that may stand between two calls.
    separators: str = ""
    #: Whether only the beginning of an answer has calls. From the first text that is no call on, all is content.
    only_first: bool = False
    new_id: Callable[[], str] = new_call_id
    #: What engines with guided decoding write it by.
    grammar: CallGrammar | None = None

    def tags(self) -> tuple[str, ...]:
        """Return all tags of the format."""
        section = () if self.section is None else (*self.section.opens, *self.section.closes)
        header = () if self.header is None else tuple(self.header.tags)
        return (*section, *self.opens, *header, *self.closes)
