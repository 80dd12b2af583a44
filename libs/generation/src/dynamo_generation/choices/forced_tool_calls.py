"""Tool calls that the engine was forced to write: bare JSON, without any markup of the model."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_core import DeltaWriter, ParserDelta
from dynamo_text import CallArguments, CallArray, CallReader, Progress, skip_space, surplus_kind

from dynamo_generation.choices.parsed_choice import TextParser


class ForcedCalls:
    """Reads a list of calls, or if a function is named the arguments of its one call.

    An engine that knows nothing of guided decoding writes what it likes: text that does not begin as it should goes to
    the model's own parser, and without one it is content. What follows the JSON is content, apart from white space.
    """

    def __init__(self, name: str | None, own: TextParser | None) -> None:
        self._out = DeltaWriter()
        self._own = own
        #: Set before `finish` if the model did not end the answer itself.
        self.cut_off = False
        #: One bracket too many after the JSON: dropped if there is no text after it.
        self._surplus = ""
        #: Whether there is text after the JSON.
        self._after = False
        #: None once it has turned out that this is not what was asked for.
        self._reader: CallReader | None = CallArray(self._out) if name is None else CallArguments(self._out, name)

    def buffer_calls(self) -> None:
        """Hold a call until its arguments are complete."""
        self._out.buffered = True
        if self._own is not None:
            self._own.buffer_calls()

    @property
    def malformed(self) -> int:
        """The number of unsound calls in the model's own form."""
        return 0 if self._own is None else self._own.malformed

    @property
    def repairs(self) -> Mapping[str, int]:
        """The number of repaired calls, by kinds of repairs."""
        return self._out.repairs if self._own is None else {**self._own.repairs, **self._out.repairs}

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        """Return what a special token makes certain: before any call, that this is not the JSON that was asked for."""
        reader, own = self._reader, self._own
        if own is None or (reader is not None and reader.reported):
            return self.feed(marker)
        self._reader = None
        left = "" if reader is None else reader.leftover()
        return [*(own.feed(left) if left else ()), *own.feed_marker(marker)]

    def feed(self, text: str) -> list[ParserDelta]:
        """Return what some more text makes certain."""
        reader = self._reader
        if reader is None:
            return self._pass_on(text)
        at = reader.feed(text) if reader.progress is Progress.OPEN else 0
        return self._rest(reader, text, at) if at < len(text) else self._out.take()

    def finish(self) -> list[ParserDelta]:
        """Return what is left at the end."""
        reader, own = self._reader, self._own
        left = ""
        if reader is not None and reader.progress is Progress.OPEN and (self.cut_off or not reader.complete()):
            left = reader.leftover()
        if self._surplus and not self._after:
            self._out.repaired(surplus_kind(self._surplus))
        if own is not None and (reader is None or not reader.reported):
            own.cut_off = self.cut_off
            return [*own.feed(left), *own.finish()]
        self._out.content(left)
        return self._out.take()

    def _rest(self, reader: CallReader, text: str, at: int) -> list[ParserDelta]:
        """Return text that is not part of the JSON."""
        if not reader.reported:
            self._reader = None
            return self._pass_on(reader.unreported() + text[at:])
        if reader.progress is Progress.BROKEN and not self._after:
            self._out.content(reader.unreported())
            self._after = True
        if not self._after:
            at = skip_space(text, at)
            if not self._surplus and surplus_kind(text[at : at + 1]):
                self._surplus = text[at]
                at = skip_space(text, at + 1)
            self._after = at < len(text)
            self._out.content(self._surplus if self._after else "")
        self._out.content(text[at:])
        return self._out.take()

    def _pass_on(self, text: str) -> list[ParserDelta]:
        """Return text before which there was no call."""
        if self._own is not None:
            return self._own.feed(text)
        self._out.content(text)
        return self._out.take()
