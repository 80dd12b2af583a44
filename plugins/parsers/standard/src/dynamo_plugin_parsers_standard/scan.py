"""Walks through text that comes in pieces, from state to state, holding back only what no state can decide yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

#: Looks at a text from a position on and returns how far it came. Returning the same position without going to another
#: state says that more text is needed; with `last` there is none, and it must go on.
State: TypeAlias = Callable[[str, int, bool], int]

_SPACE = re.compile(r"\s*")


class Scanner:
    """Runs states over the pieces of a text. What one leaves is looked at again with the next piece: keep it short."""

    __slots__ = ("_held", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self._held = ""

    def feed(self, text: str) -> None:
        """Some more text."""
        data, self._held = self._held + text, ""
        self._run(data, last=False)

    def finish(self) -> None:
        """The end of the text."""
        data, self._held = self._held, ""
        self._run(data, last=True)

    def _run(self, data: str, *, last: bool) -> None:
        at, end = 0, len(data)
        while at < end:
            state = self.state
            came = state(data, at, last)
            if came == at and self.state == state:
                self._held = data[at:]
                return
            at = came


def may_begin(text: str, at: int, tag: str) -> bool:
    """Whether all that is there from `at` on is the beginning of `tag`, and not yet the whole of it."""
    return len(text) - at < len(tag) and tag.startswith(text[at:])


def find_tag(text: str, at: int, tag: str, *, last: bool) -> int:
    """Where `tag` stands or may begin, from `at` on; the end of the text if nowhere. With `last` nothing may begin."""
    found = text.find(tag, at)
    if found >= 0:
        return found
    end = len(text)
    if not last:
        for length in range(min(len(tag) - 1, end - at), 0, -1):
            if text.endswith(tag[:length]):
                return end - length
    return end


def skip_white(text: str, at: int) -> int:
    """Where white space that begins at `at` ends."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
