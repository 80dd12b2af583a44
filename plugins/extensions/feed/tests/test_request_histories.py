"""Where requests stand is what their events say, however they come and whatever is lost of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from dynamo_core import (
    RequestAdmitted,
    RequestEvent,
    RequestFirstToken,
    RequestMoved,
    RequestReceived,
    RequestRefused,
)
from dynamo_plugin_extension_feed import request_histories
from dynamo_plugin_extension_feed.request_histories import ANSWERING, PREFILLING, WAITING, RequestHistories
from dynamo_testing.extension.sample_events import finished, received
from hypothesis import given
from hypothesis import strategies as st

MAKE: Mapping[str, Callable[[str], RequestEvent]] = {
    "received": lambda name: received(name, model=f"model-{name[0]}"),
    "admitted": lambda name: RequestAdmitted(name, time.monotonic(), f"{name}-call", "m", 30, 0.0),
    "refused": lambda name: RequestRefused(name, time.monotonic(), "m", "admit", "ServiceOverloaded", "", None, 0.0),
    "first_token": lambda name: RequestFirstToken(name, time.monotonic()),
    "moved": lambda name: RequestMoved(name, time.monotonic(), f"{name}-call", "m", None, 0, "EngineShutdown", ""),
    "finished": finished,
}
#: Some of which were never received, and some of which never end.
happenings = st.lists(st.tuples(st.sampled_from(["a1", "a2", "b1", "b2"]), st.sampled_from(sorted(MAKE))), max_size=60)


@given(happenings)
def test_open_requests_are_counted_by_the_stage_of_their_events(all_of_them: Sequence[tuple[str, str]]) -> None:
    own = RequestHistories(kept=3)
    told: dict[str, list[str]] = {}
    for name, kind in all_of_them:
        if name in told or kind == "received":
            told.setdefault(name, []).append(kind)
        ended = own.add(MAKE[kind](name))
        assert (ended is not None) == (name in told and kind == "finished")
        if ended is not None:
            kinds = told.pop(name)
            assert ended.refused == ("refused" in kinds)
            assert ended.moved == kinds.count("moved")

    expected: dict[str, Counter[str]] = {}
    for name, kinds in told.items():
        stands = ANSWERING if "first_token" in kinds else PREFILLING if "admitted" in kinds else WAITING
        expected.setdefault(f"model-{name[0]}", Counter())[stands] += 1
    assert own.standing() == expected


def test_requests_with_a_lost_end_are_dropped_from_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_histories, "OPEN", 2)
    own = RequestHistories(kept=3)
    for name in ("a1", "a2", "b1"):
        own.add(MAKE["received"](name))

    assert own.standing() == {"model-a": {WAITING: 1}, "model-b": {WAITING: 1}}
    assert own.find("a1") is None


def test_a_request_that_moves_for_ever_keeps_a_bounded_number_of_events_and_its_end() -> None:
    own = RequestHistories(kept=3)
    own.add(MAKE["received"]("a1"))
    for _ in range(1000):
        own.add(MAKE["moved"]("a1"))

    ended = own.add(finished("a1"))

    assert ended is not None
    assert ended.moved == 1000
    assert len(ended.events) == request_histories.EVENTS + 1
    assert isinstance(ended.events[0], RequestReceived)
