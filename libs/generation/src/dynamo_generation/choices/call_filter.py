"""The filter between parsed tool calls and the calls that the client gets."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import count

from dynamo_core import ContentDelta, ParserDelta, ToolCallArguments, ToolCallStart, new_call_id

#: Digits of the numbers that ids are counted on from.
_DIGITS = 9


class CallFilter:
    """Passes on calls of the `allowed` tools (None: all), and only the first of them unless `parallel`.

    Calls of other tools are text, in JSON. `ids` are those of the conversation and of all choices of a request: no two
    are alike.
    """

    def __init__(self, allowed: frozenset[str] | None, *, parallel: bool, ids: set[str]) -> None:
        self._allowed = allowed
        self._parallel = parallel
        self._ids = ids
        #: By the number that the parser gave a call, the one that the client is told.
        self._told: dict[int, int] = {}
        #: The number of the call that is being written as text.
        self._as_text: int | None = None

    def feed(self, deltas: Iterable[ParserDelta]) -> list[ParserDelta]:
        """Return what the client is told of some deltas."""
        out: list[ParserDelta] = []
        for delta in deltas:
            if self._as_text is not None and not _belongs(delta, self._as_text):
                out += self.finish()
            match delta:
                case ToolCallStart(index, _, name) if self._allowed is not None and name not in self._allowed:
                    self._as_text = index
                    out.append(ContentDelta(f'{{"name": {json.dumps(name)}, "arguments": '))
                case ToolCallStart(index, id, name) if self._parallel or not self._told:
                    number = self._told[index] = len(self._told)
                    out.append(ToolCallStart(number, self._own(id), name))
                case ToolCallArguments(index, text) if index == self._as_text:
                    out.append(ContentDelta(text))
                case ToolCallArguments(index, text) if index in self._told:
                    out.append(ToolCallArguments(self._told[index], text))
                case ToolCallStart() | ToolCallArguments():
                    continue
                case _:
                    out.append(delta)
        return out

    def finish(self) -> list[ParserDelta]:
        """Return the end of a call that is text, if one is open."""
        if self._as_text is None:
            return []
        self._as_text = None
        return [ContentDelta("}")]

    def _own(self, given: str) -> str:
        own = given
        if given in self._ids:
            # Kimi numbers its calls (functions.NAME:0), and its template shows the id: it knows the next number.
            stem, colon, number = given.rpartition(":")
            numbered = colon and number.isdecimal() and len(number) <= _DIGITS
            own = f"{stem}:{_free(self._ids, stem, int(number))}" if numbered else new_call_id()
        self._ids.add(own)
        return own


def _free(ids: set[str], stem: str, number: int) -> int:
    """Return the next number with which an id is new."""
    return next(each for each in count(number + 1) if f"{stem}:{each}" not in ids)


def _belongs(delta: ParserDelta, index: int) -> bool:
    return isinstance(delta, ToolCallArguments) and delta.index == index
