"""A scanner of incremental text, state by state, which holds back only undecided text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
        """Feed more text."""
        data, self._held = self._held + text, ""
        self._run(data, last=False)

    def finish(self) -> None:
        """Finish at the end of the text."""
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
    """Return whether all that is there from `at` on is the beginning of `tag`, and not yet the whole of it."""
    return len(text) - at < len(tag) and tag.startswith(text[at:])


def find_tag(text: str, at: int, tag: str, *, last: bool) -> int:
    """Return where `tag` stands or may begin, from `at` on; the end of the text if nowhere.

    With `last` nothing may begin.
    """
    found = text.find(tag, at)
    if found >= 0:
        return found
    end = len(text)
    if not last:
        for length in range(min(len(tag) - 1, end - at), 0, -1):
            if text.endswith(tag[:length]):
                return end - length
    return end


class Tags:
    """Several tags that are looked for at once. None may be the beginning of another."""

    __slots__ = ("_firsts", "_longest", "_pattern", "_prefixes", "tags")

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = tuple(dict.fromkeys(tags))
        self._longest = max(map(len, self.tags), default=0)
        # Without tags the patterns match nowhere.
        self._pattern = re.compile("|".join(map(re.escape, self.tags)) or r"(?!)")
        firsts = "".join(sorted({re.escape(tag[0]) for tag in self.tags}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._prefixes = frozenset(tag[:length] for tag in self.tags for length in range(1, len(tag)))

    def __bool__(self) -> bool:
        return bool(self.tags)

    def at(self, text: str, at: int) -> str:
        """Return the tag that stands at `at`; empty if none does."""
        match = self._pattern.match(text, at)
        return "" if match is None else match[0]

    def may_begin(self, text: str, at: int) -> bool:
        """Return whether all that is there from `at` on is the beginning of a tag, and not yet the whole of it."""
        return len(text) - at < self._longest and text[at:] in self._prefixes

    def find(self, text: str, at: int, *, last: bool) -> int:
        """Return where a tag stands or may begin, from `at` on; the end of the text if nowhere.

        With `last` none may begin.
        """
        # Most pieces have no character that begins a tag.
        start = self._firsts.search(text, at)
        if start is None:
            return len(text)
        found = self._pattern.search(text, start.start())
        if found is not None:
            return found.start()
        if not last:
            for first in self._firsts.finditer(text, max(start.start(), len(text) - self._longest + 1)):
                if text[first.start() :] in self._prefixes:
                    return first.start()
        return len(text)


def skip_white(text: str, at: int) -> int:
    """Return where white space that begins at `at` ends."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def end_of(pattern: re.Pattern[str], text: str, at: int, longest: int) -> int:
    """Return where what matches at `at` ends, within so many characters; `at` if nothing does."""
    match = pattern.match(text, at, at + longest)
    return at if match is None else match.end()
