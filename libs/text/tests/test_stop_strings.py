"""Stop strings are compiled once, in time, and cost the same per character of text however many and long they are."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_text import stop_strings as module
from dynamo_text.stop_strings import INLINE, StopMatcher, StopStrings, compile_stops
from hypothesis import given
from hypothesis import strategies as st

stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6)


class Counted(dict[int, int]):
    """Edges that count how often they are looked up."""

    looks = 0

    def get(self, *args: Any) -> Any:
        self.looks += 1
        return super().get(*args)


def looks(stops: Sequence[str], text: str) -> int:
    """Return how many steps a text takes."""
    compiled = StopStrings(stops)
    compiled.edges = Counted(compiled.edges)
    matcher = StopMatcher(compiled)
    for char in text:
        matcher.push(char)
    return compiled.edges.looks


@given(stop_lists, st.text("ab", max_size=60))
def test_a_character_takes_two_steps_at_most_on_average(stops: list[str], text: str) -> None:
    assert looks(stops, text) <= 2 * len(text)


def test_many_long_stop_strings_that_nearly_come_take_no_more_steps_than_one() -> None:
    stops = ["a" * length + "b" for length in range(100, 132)]

    assert looks(stops, "a" * 10_000) <= 20_000


@given(stop_lists, st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_texts_that_share_stop_strings_do_not_disturb_each_other(stops: list[str], one: str, other: str) -> None:
    shared = StopStrings(stops)
    together = StopMatcher(shared), StopMatcher(shared)
    apart = StopMatcher(StopStrings(stops)), StopMatcher(StopStrings(stops))

    for first, second in zip(one.ljust(40, "b"), other.ljust(40, "b"), strict=True):
        assert together[0].push(first) == apart[0].push(first)
        assert together[1].push(second) == apart[1].push(second)
    assert [each.found for each in together] == [each.found for each in apart]


async def test_many_characters_are_compiled_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    class Noted(StopStrings):
        def __init__(self, stops: Sequence[str]) -> None:
            threads.append(threading.current_thread() is threading.main_thread())
            super().__init__(stops)

    monkeypatch.setattr(module, "StopStrings", Noted)

    assert await compile_stops(None) is None
    assert await compile_stops(["a" * INLINE]) is not None
    assert await compile_stops(["a" * INLINE, "b"]) is not None
    assert threads == [True, False]


async def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as caught:
        await compile_stops(["a", ""])

    assert caught.value.field == "stop"
