"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from dynamo_core.errors import InvalidArgument

#: Up to this many characters of stop strings are compiled at once; a thread compiles more. It takes about a microsecond
#: for each.
INLINE = 1024
#: Bits of a character's code; the number of a node stands above them.
_CHAR_BITS = 21


class StopStrings:
    """Stop strings, compiled once for all texts that they are looked for in (Aho and Corasick).

    A node stands for a beginning of one or more stop strings; the root, 0, for the empty one. A text that has been read
    is at the node of the longest such beginning that it ends with, so a character of text costs the same on average
    for any number and length of stop strings.

    Raises:
        InvalidArgument: a stop string is empty.
    """

    __slots__ = ("depths", "edges", "ends", "fallbacks", "firsts")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise InvalidArgument("a stop string must not be empty", field="stop")
        #: By node and character (`node << 21 | code`): the node that follows, where one does.
        self.edges: dict[int, int] = {}
        #: By node: how many characters it stands for.
        self.depths = [0]
        #: By node: that of its longest end that begins a stop string too.
        self.fallbacks = [0]
        #: By node: the longest stop string that it ends with.
        self.ends: list[str | None] = [None]
        #: The characters that stop strings begin with.
        self.firsts = frozenset(stop[0] for stop in stops)
        self._link(self._grow(stops))

    def _grow(self, stops: Sequence[str]) -> dict[int, list[tuple[int, int]]]:
        """Make the nodes; return those that follow each, with their characters."""
        edges = self.edges
        children: dict[int, list[tuple[int, int]]] = {}
        for stop in stops:
            node = 0
            for char in map(ord, stop):
                following = edges.get(node << _CHAR_BITS | char)
                if following is None:
                    following = edges[node << _CHAR_BITS | char] = len(self.depths)
                    self.depths.append(self.depths[node] + 1)
                    self.fallbacks.append(0)
                    self.ends.append(None)
                    children.setdefault(node, []).append((char, following))
                node = following
            self.ends[node] = stop
        return children

    def _link(self, children: dict[int, list[tuple[int, int]]]) -> None:
        """Find out where to fall back to; shorter beginnings first, as longer ones fall back to those."""
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for char, following in children.get(node, ()):
                if node:
                    self.fallbacks[following] = self._after(self.fallbacks[node], char)
                if self.ends[following] is None:
                    self.ends[following] = self.ends[self.fallbacks[following]]
                waiting.append(following)

    def _after(self, node: int, char: int) -> int:
        while (following := self.edges.get(node << _CHAR_BITS | char)) is None and node:
            node = self.fallbacks[node]
        return following or 0


async def compile_stops(stops: Sequence[str] | None) -> StopStrings | None:
    """Return compiled stop strings, however long; None if there are none.

    Raises:
        InvalidArgument: a stop string is empty.
    """
    if not stops:
        return None
    if sum(map(len, stops)) <= INLINE:
        return StopStrings(stops)
    return await asyncio.to_thread(StopStrings, stops)


class StopMatcher:
    """Lets text through up to the first stop string, and holds back only what may still become one.

    The first stop string is the one that is complete first; of several that end at the same character, the longest.
    So the result does not depend on how the text was cut. The work is linear in the length of the text for any stop
    strings.
    """

    __slots__ = ("_held", "_include", "_node", "_stops", "found")

    def __init__(self, stops: StopStrings, *, include_stop: bool = False) -> None:
        self._stops = stops
        self._node = 0
        self._include = include_stop
        self._held = ""
        #: The stop string that ended the text.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is certain now. After a stop string was found: nothing."""
        if self.found is not None:
            return ""
        stops = self._stops
        if not self._held and stops.firsts.isdisjoint(text):
            return text
        before = len(self._held)
        window = self._held + text
        edge, fallbacks, ends, node = stops.edges.get, stops.fallbacks, stops.ends, self._node
        for at, char in enumerate(map(ord, text), start=before + 1):
            while (following := edge(node << _CHAR_BITS | char)) is None and node:
                node = fallbacks[node]
            node = following or 0
            stop = ends[node]
            if stop is not None:
                self.found = stop
                self._held = ""
                return window[: at if self._include else at - len(stop)]
        self._node = node
        certain = len(window) - stops.depths[node]
        self._held = window[certain:]
        return window[:certain]

    def finish(self) -> str:
        """Return what was held back: the text ended, so it becomes no stop string any more."""
        held, self._held = self._held, ""
        return held
