"""The state machine that parses every tool-call format that is data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from dynamo_core import DeltaWriter, ModelText, ParserDelta, ToolCallParser
from dynamo_text import CallReader, Progress, surplus_kind

from dynamo_plugin_parsers_standard.format_markers import TOOL_SIGNS, recognize
from dynamo_plugin_parsers_standard.formats import Body, CallFormat, CallStart
from dynamo_plugin_parsers_standard.scanner import Scanner, State, Tags, skip_white

#: The longest word of a header.
_LONGEST = 256
_SURPLUS_TAG = "surplus_tag"


class _Compiled:
    """The tags and the gaps of a format, ready to be looked for."""

    def __init__(self, form: CallFormat) -> None:
        section = form.section
        begins = () if section is None else section.opens
        self.section_opens = Tags(begins)
        self.section_closes = Tags(() if section is None else section.closes)
        self.opens = Tags(form.opens)
        self.begins = Tags((*begins, *(form.opens if section is None or section.optional else ())))
        self.in_section = Tags((*begins, *form.opens, *(() if section is None else section.closes)))
        self.header = Tags(() if form.header is None else tuple(form.header.tags))
        #: Closing tags that may be doubled: what may open a call is no end.
        closes = (*form.closes, *self.section_closes.tags)
        self.doubles = Tags(tag for tag in closes if not any(each.startswith(tag) for each in form.opens))
        #: Where a call ends at the latest.
        self.ends = Tags((*self.in_section.tags, *form.closes, *form.separators))
        self.gap = re.compile(rf"[\s{re.escape(form.separators)}]*")


class FormatParser(ToolCallParser):
    """Calls in the format of the class.

    White space before the first call and after any is part of the markup, unless other text is beside it. Markup that
    breaks off is content from the first character that was not told as part of a call; content goes on after it.

    Of the end of a call one bracket may be missing, and one bracket and one closing tag too many.
    """

    FORMAT: ClassVar[CallFormat]
    _compiled: ClassVar[_Compiled]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "FORMAT" in vars(cls):
            cls.MARKERS = cls.FORMAT.tags()
            cls._compiled = _Compiled(cls.FORMAT)

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """See `ToolCallParser.recognizes`."""
        return recognize(TOOL_SIGNS, cls.NAME, model)

    @classmethod
    def structural_tag(
        cls, tools: Sequence[Mapping[str, Any]], *, parallel: bool, text: bool
    ) -> Mapping[str, Any] | None:
        """Return the grammar of calls in the format."""
        grammar = cls.FORMAT.grammar
        return None if grammar is None else grammar.tag(tools, parallel=parallel, text=text)

    def __init__(self, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools)
        self._out = DeltaWriter(new_id or self.FORMAT.new_id)
        self.repairs = self._out.repairs
        self._scanner = Scanner(self._outside)
        #: White space and separators that are shown if it turns out that they do not stand beside a call.
        self._space: list[str] = []
        #: Markup that is shown if it turns out not to open a call.
        self._header: list[str] = []
        #: The words of the header, by their kinds, and the kind of the word that is being read.
        self._words: dict[str, list[str]] = {}
        self._kind = ""
        self._reader: CallReader | None = None
        #: Whether the call that is being read began with a tag.
        self._tagged = False
        self._called = False
        #: The closing tags that may still follow the last call.
        self._closes = Tags(())
        #: The kinds of what `_space` has too many after that call, and of what it may still have.
        self._surplus: list[str] = []
        self._spare: set[str] = set()
        #: Whether the opening tag of a section is part of `_header`, and whether calls have been told of one.
        self._section_begun = False
        self._in_section = False

    def buffer_calls(self) -> None:
        """Hold a call until its arguments are complete."""
        self._out.buffered = True

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        self._scanner.feed(text)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        self._scanner.finish()
        if self._reader is not None and (self.cut_off or not self._reader.complete()):
            self._break_off(self._reader.leftover())
        if not self._called:
            self._emit_space()
        self._drop_space()
        self._break_off(self._take_header())
        return self._out.take()

    def _outside(self, text: str, at: int, last: bool) -> int:
        """Read the text outside of calls: white space may belong to the markup."""
        compiled, form = self._compiled, self.FORMAT
        start, at = at, self._skip_gap(text, at)
        self._space.append(text[start:at])
        if at == len(text):
            return at
        if self._in_section and (close := compiled.section_closes.at(text, at)):
            self._drop_space()
            self._in_section = False
            return at + len(close)
        if close := self._closes.at(text, at):
            self._drop_space()
            self._closes = _closing(tuple(tag for tag in self._closes.tags if tag != close))
            return at + len(close)
        begins = compiled.in_section if self._in_section else compiled.begins
        if begins.at(text, at):
            return self._begin(text, at)
        bodies = form.bodies if form.repeats and self._closes else form.bare
        if text[at] in bodies:
            self._tagged = bodies is form.bodies
            self._read(bodies[text[at]], "".join(self._space))
            self._drop_space()
        elif too_many := self._too_many(text, at):
            self._space.append(too_many)
            at += len(too_many)
        elif last or not (begins.may_begin(text, at) or self._may_close(text, at)):
            self._emit_space()
            self._enter(self._content)
        return at

    def _may_close(self, text: str, at: int) -> bool:
        doubles = _SURPLUS_TAG in self._spare and self._compiled.doubles.may_begin(text, at)
        return doubles or self._closes.may_begin(text, at)

    def _too_many(self, text: str, at: int) -> str:
        """Return the bracket or closing tag that stands at `at` and is one too many; empty if none does."""
        found, kind = text[at], surplus_kind(text[at])
        if not kind:
            found, kind = self._compiled.doubles.at(text, at), _SURPLUS_TAG
        if not found or kind not in self._spare:
            return ""
        self._spare.discard(kind)
        self._surplus.append(kind)
        return found

    def _skip_gap(self, text: str, at: int) -> int:
        if not self._called:
            return skip_white(text, at)
        match = self._compiled.gap.match(text, at)
        return at if match is None else match.end()

    def _content(self, text: str, at: int, last: bool) -> int:
        if self.FORMAT.only_first:
            self._out.content(text[at:])
            return len(text)
        begins = self._compiled.in_section if self._in_section else self._compiled.begins
        found = begins.find(text, at, last=last)
        self._out.content(text[at:found])
        return self._begin(text, found) if begins.at(text, found) else found

    def _begin(self, text: str, at: int) -> int:
        """Go on after the tag at `at`, which begins or ends a section, or opens a call."""
        compiled = self._compiled
        if tag := compiled.section_closes.at(text, at):
            self._in_section = False
            self._enter(self._outside)
            return at + len(tag)
        if tag := compiled.section_opens.at(text, at):
            self._section_begun = True
            self._hold(tag)
            self._enter(self._section)
            return at + len(tag)
        return self._open(text, at)

    def _section(self, text: str, at: int, last: bool) -> int:
        """Read the text after the opening tag of a section."""
        at = self._header_space(text, at)
        if at == len(text):
            return at
        if self._compiled.opens.at(text, at):
            return self._open(text, at)
        if last or not self._compiled.opens.may_begin(text, at):
            self._give_up(self._take_header())
        return at

    def _open(self, text: str, at: int) -> int:
        tag = self._compiled.opens.at(text, at)
        self._hold(tag)
        self._words.clear()
        self._kind = "" if self.FORMAT.header is None else self.FORMAT.header.first
        self._tagged = True
        self._enter(self._opened)
        return at + len(tag)

    def _opened(self, text: str, at: int, last: bool) -> int:
        """Read the text after the opening tag of a call."""
        at = self._header_space(text, at)
        if at == len(text):
            return at
        form = self.FORMAT
        body = form.bodies.get(text[at]) or (None if form.header else form.bodies.get(""))
        if body is not None:
            self._read(body, self._take_header())
        elif form.header is not None:
            self._enter(self._word)
        else:
            self._give_up(self._take_header())
        return at

    def _word(self, text: str, at: int, last: bool) -> int:
        assert self.FORMAT.header is not None  # noqa: S101 - `_opened` has looked
        match = self.FORMAT.header.word.match(text, at)
        start, at = at, at if match is None else match.end()
        word = self._words.setdefault(self._kind, [])
        word.append(text[start:at])
        self._header.append(text[start:at])
        if sum(map(len, word)) > _LONGEST:
            self._give_up(self._take_header())
        elif at < len(text):
            self._enter(self._after_word)
        return at

    def _after_word(self, text: str, at: int, last: bool) -> int:
        header, tags = self.FORMAT.header, self._compiled.header
        assert header is not None  # noqa: S101 - `_opened` has looked
        at = self._header_space(text, at)
        if at == len(text):
            return at
        tag = tags.at(text, at)
        kind = header.tags.get(tag, "")
        if tag and kind and any(self._words[self._kind]) and kind not in self._words:
            self._header.append(tag)
            self._kind = kind
            self._enter(self._next_word)
            return at + len(tag)
        body = self.FORMAT.bodies[""]
        name, call_id = header.understand({kind: "".join(word) for kind, word in self._words.items()})
        if name and tag and not kind:
            self._header.append(tag)
            self._read(body, self._take_header(), name, call_id)
            return at + len(tag)
        if name and header.body_without_tag and text[at] == "{":
            self._read(body, self._take_header(), name, call_id)
        elif last or tag or not tags.may_begin(text, at):
            self._give_up(self._take_header())
        return at

    def _next_word(self, text: str, at: int, last: bool) -> int:
        at = self._header_space(text, at)
        if at < len(text):
            self._enter(self._word)
        return at

    def _reading(self, text: str, at: int, last: bool) -> int:
        reader = self._reader
        assert reader is not None  # noqa: S101 - `_read` has set it
        at = reader.feed(text, at, last)
        if reader.reported:
            self._report()
        if reader.progress is Progress.DONE:
            self._end_call()
        elif reader.progress is Progress.BROKEN and at < len(text):
            self._enter(self._breaking)
        elif reader.progress is Progress.BROKEN:
            self._break(reader)
        return at

    def _breaking(self, text: str, at: int, last: bool) -> int:
        """Handle text that the reader cannot read: a tag may end the call, if one bracket is missing before it."""
        reader, ends = self._reader, self._compiled.ends
        assert reader is not None  # noqa: S101 - `_reading` has looked
        if not last and ends.may_begin(text, at):
            return at
        if ends.at(text, at) and reader.complete():
            self._end_call()
        else:
            self._break(reader)
        return at

    def _break(self, reader: CallReader) -> None:
        self._reader = None
        self._tagged = self._tagged or reader.reported
        self._give_up(reader.unreported())

    def _report(self) -> None:
        self._called = True
        self._in_section = self._in_section or self._section_begun
        self._section_begun = False

    def _end_call(self) -> None:
        self._report()
        self._reader = None
        self._closes = _closing(self.FORMAT.closes)
        self._spare = {_SURPLUS_TAG, surplus_kind("}")}
        self._enter(self._outside)

    def _read(self, body: Body, before: str, name: str = "", id: str | None = None) -> None:
        in_section = self._in_section or self._section_begun
        self._reader = body(CallStart(self._out, self.tools, before, name, id, in_section))
        self._enter(self._reading)

    def _give_up(self, shown: str) -> None:
        """Give up on a call: the text read is content, and so is what follows."""
        self.malformed += self._tagged or self._section_begun
        self._section_begun = False
        self._out.content(shown)
        self._enter(self._content)

    def _break_off(self, shown: str) -> None:
        """Handle a text that ends within a possible call."""
        if shown:
            self._give_up(shown)

    def _hold(self, tag: str) -> None:
        self._header += [*self._space, tag]
        self._drop_space()

    def _take_header(self) -> str:
        header = "".join(self._header)
        self._header.clear()
        return header

    def _header_space(self, text: str, at: int) -> int:
        start, at = at, skip_white(text, at)
        self._header.append(text[start:at])
        return at

    def _emit_space(self) -> None:
        self._out.content("".join(self._space))
        self._space.clear()
        self._surplus.clear()
        self._spare.clear()

    def _drop_space(self) -> None:
        """Drop the space beside a call, which belongs to its markup."""
        for kind in self._surplus:
            self._out.repaired(kind)
        self._space.clear()
        self._surplus.clear()

    def _enter(self, state: State) -> None:
        self._scanner.state = state


@functools.cache
def _closing(tags: tuple[str, ...]) -> Tags:
    return Tags(tags)
