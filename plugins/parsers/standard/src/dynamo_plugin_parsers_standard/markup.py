"""What parsers of calls have in common: content, markup that opens calls, and a reader of what follows it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_core import DeltaWriter, ModelText, ParserDelta, ToolCallParser, new_call_id
from dynamo_text import CallReader, Progress

from dynamo_plugin_parsers_standard.scan import Scanner, State, find_tag, may_begin, skip_white
from dynamo_plugin_parsers_standard.signs import TOOL_SIGNS, recognize


class MarkupParser(ToolCallParser):
    """Calls that begin with a tag, anywhere in the text.

    White space before the first call and after any is part of the markup, unless other text is beside it. Markup that
    breaks off is content from the first character that was not told as part of a call; content goes on after it.
    """

    #: What opens a call.
    OPEN: str

    def __init__(self, tools: Sequence[Mapping[str, Any]], new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(tools)
        self._out = DeltaWriter(new_id)
        self._scanner = Scanner(self._blank)
        #: White space that is shown if it turns out not to stand beside a call.
        self._space: list[str] = []
        #: Markup that is shown if it turns out not to open a call.
        self._header: list[str] = []
        self._reader: CallReader | None = None
        self._called = False

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """See `ToolCallParser.recognizes`."""
        return recognize(TOOL_SIGNS, cls.NAME, model)

    @abstractmethod
    def _begin(self) -> None:
        """Goes to the state after the tag, which is in `_header`."""

    def _complete(self) -> None:
        """Goes to the state after what a reader has read."""
        self._enter(self._blank)

    def buffer_calls(self) -> None:
        """A call waits until its arguments are complete."""
        self._out.buffered = True

    def feed(self, text: str) -> list[ParserDelta]:
        """What some more text makes certain."""
        self._scanner.feed(text)
        return self._out.take()

    def finish(self) -> list[ParserDelta]:
        """What is left at the end."""
        self._scanner.finish()
        if self._reader is not None:
            self._out.content(self._reader.leftover())
        if not self._called:
            self._emit_space()
        self._out.content(self._take_header())
        return self._out.take()

    def _blank(self, text: str, at: int, last: bool) -> int:
        """Before the first text, and after a call: white space may belong to the markup."""
        at = self._hold_space(text, at)
        if at == len(text):
            return at
        if text.startswith(self.OPEN, at):
            return self._open(at)
        if last or not may_begin(text, at, self.OPEN):
            self._emit_space()
            self._enter(self._content)
        return at

    def _content(self, text: str, at: int, last: bool) -> int:
        found = find_tag(text, at, self.OPEN, last=last)
        self._out.content(text[at:found])
        return self._open(found) if text.startswith(self.OPEN, found) else found

    def _reading(self, text: str, at: int, last: bool) -> int:
        reader = self._reader
        assert reader is not None  # noqa: S101 - `_read` has set it
        at = reader.feed(text, at)
        self._called = self._called or reader.reported
        if reader.progress is Progress.DONE:
            self._reader = None
            self._complete()
        elif reader.progress is Progress.BROKEN:
            self._reader = None
            self._give_up(reader.unreported())
        return at

    def _open(self, at: int) -> int:
        self._header += [*self._space, self.OPEN]
        self._space.clear()
        self._begin()
        return at + len(self.OPEN)

    def _read(self, reader: CallReader) -> None:
        self._reader = reader
        self._enter(self._reading)

    def _give_up(self, shown: str) -> None:
        """There is no call here: what was read is content, and so is what follows."""
        self._out.content(shown)
        self._enter(self._content)

    def _take_header(self) -> str:
        header = "".join(self._header)
        self._header.clear()
        return header

    def _hold_space(self, text: str, at: int) -> int:
        start, at = at, skip_white(text, at)
        self._space.append(text[start:at])
        return at

    def _emit_space(self) -> None:
        self._out.content("".join(self._space))
        self._space.clear()

    def _enter(self, state: State) -> None:
        self._scanner.state = state
