"""Several tags that are sought together in text that comes in pieces."""

from __future__ import annotations

import re
from functools import lru_cache


class Tags:
    """Finds whichever of some tags comes first."""

    __slots__ = ("_firsts", "_longest", "_tags", "_whole")

    def __init__(self, tags: tuple[str, ...]) -> None:
        self._tags = tags
        self._longest = max(map(len, tags))
        self._whole = re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
        self._firsts = re.compile(f"[{''.join(re.escape(tag[0]) for tag in tags)}]")

    def at(self, text: str, at: int) -> str:
        """The tag that stands here, or an empty text."""
        match = self._whole.match(text, at)
        return "" if match is None else match.group()

    def may_begin(self, text: str, at: int) -> bool:
        """Whether all that is there from `at` on is the beginning of a tag, and not yet the whole of it."""
        left = len(text) - at
        return left < self._longest and any(left < len(tag) and tag.startswith(text[at:]) for tag in self._tags)

    def find(self, text: str, at: int, *, last: bool) -> tuple[int, str]:
        """Where a tag stands, and which; or where one may begin, and an empty text; or the end of the text.

        With `last` nothing may begin.
        """
        end = len(text)
        # Most pieces have no character that begins a tag.
        first = self._firsts.search(text, at)
        if first is None:
            return end, ""
        whole = self._whole.search(text, first.start())
        if whole is not None:
            return whole.start(), whole.group()
        if not last:
            for match in self._firsts.finditer(text, max(first.start(), end - self._longest + 1)):
                if self.may_begin(text, match.start()):
                    return match.start(), ""
        return end, ""


@lru_cache(maxsize=256)
def tags(*texts: str) -> Tags:
    """Tags of these texts, made once."""
    return Tags(texts)
