"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core.errors import InvalidArgument


class StopMatcher:
    """Lets text through up to the first stop string, and holds back only what may still become one.

    The first stop string is the one that is complete first; of several that end at the same character, the longest.
    So the result does not depend on how the text was cut. The work is linear in the length of the text for any stop
    strings: each keeps how much of it the text ends with (Knuth, Morris and Pratt).

    Raises:
        InvalidArgument: a stop string is empty.
    """

    __slots__ = ("_fallbacks", "_firsts", "_held", "_include", "_states", "_stops", "found")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise InvalidArgument("a stop string must not be empty", field="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._include = include_stop
        self._held = ""
        #: The stop string that ended the text.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now. After a stop string was found: nothing."""
        if self.found is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text
        before = len(self._held)
        window = self._held + text
        for at, char in enumerate(text, start=before + 1):
            stop = self._advance(char)
            if stop is not None:
                self.found = stop
                self._held = ""
                return window[: at if self._include else at - len(stop)]
        certain = len(window) - max(self._states)
        self._held = window[certain:]
        return window[:certain]

    def finish(self) -> str:
        """What was held back: the text ended, so it becomes no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Takes one character; the longest stop string that it completes."""
        found = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            fallbacks = self._fallbacks[index]
            while state and stop[state] != char:
                state = fallbacks[state - 1]
            if stop[state] == char:
                state += 1
            self._states[index] = state
            if state == len(stop) and (found is None or state > len(found)):
                found = stop
        return found


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`: the length of its longest proper prefix that is also its suffix."""
    lengths = [0] * len(stop)
    length = 0
    for at in range(1, len(stop)):
        while length and stop[at] != stop[length]:
            length = lengths[length - 1]
        if stop[at] == stop[length]:
            length += 1
        lengths[at] = length
    return lengths
