"""The tracker counts every attempt in and out, whatever the order."""

from __future__ import annotations

from dynamo_core.contracts.router import Route
from dynamo_core.protocol.events import PlacedLoad, PlacedLoads
from dynamo_core.protocol.records import Instance
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from hypothesis import given
from hypothesis import strategies as st

steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(1, 3), st.integers(0, 1), st.integers(0, 50)),
        st.tuples(st.just("first"), st.integers(0, 99), st.just(0), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 99), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_the_tracker_matches_a_reference_list(steps: list[tuple[str, int, int, int]]) -> None:
    tracker = LoadTracker()
    running: list[tuple[Reservation, int, int, int]] = []

    for number, (action, which, rank, tokens) in enumerate(steps):
        if action == "enter":
            reservation = tracker.reserve(
                Route(Instance(instance_id=which), rank),
                f"r{number}",
                prompt_tokens=tokens,
                block_size=16,
                hashes=range(tokens // 16),
            )
            running.append((reservation, which, rank, tokens))
        elif running:
            at = which % len(running)
            reservation, instance, rank, tokens = running[at]
            if action == "first":
                reservation.first_item()
                running[at] = (reservation, instance, rank, 0)
            else:
                reservation.release()
                reservation.release()
                del running[at]
        for instance in (1, 2, 3):
            assert tracker.requests(instance) == sum(entry[1] == instance for entry in running)
            for rank in (0, 1):
                here = [entry for entry in running if entry[1:3] == (instance, rank)]
                assert tracker.prefill_tokens(instance, rank) == sum(entry[3] for entry in here)
    for entry in running:
        entry[0].release()

    assert tracker.total_requests == 0
    assert tracker.blocks(1) == tracker.blocks(2) == tracker.blocks(3) == 0


def test_own_requests_and_those_of_peers_are_separate() -> None:
    tracker = LoadTracker()
    reservation = tracker.reserve(
        Route(Instance(instance_id=1), 0), "r", prompt_tokens=40, block_size=16, hashes=range(2)
    )
    other = PlacedLoad(worker_id=1, dp_rank=0, requests=3, prefill_tokens=50, blocks=4)
    tracker.peers.apply(PlacedLoads(frontend=7, number=0, whole=True, loads=[other]), 0.0)

    assert (tracker.requests(1), tracker.own_requests(1)) == (4, 1)
    assert (tracker.prefill_tokens(1), tracker.own_prefill_tokens(1, 0)) == (90, 40)
    reservation.release()


def test_cached_blocks_are_not_prefilled_again() -> None:
    tracker = LoadTracker()

    tracker.reserve(Route(Instance(instance_id=1), overlap=2), "r", prompt_tokens=40, block_size=16, hashes=[1, 2])

    assert tracker.prefill_tokens(1) == 8
    assert tracker.blocks(1) == 2


class Watcher:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def entered(self, attempt_id: str) -> None:
        self.told.append(f"entered {attempt_id}")

    def prefilled(self) -> None:
        self.told.append("prefilled")

    def left(self) -> None:
        self.told.append("left")


def test_the_watcher_of_a_route_gets_the_requests_events() -> None:
    tracker, watcher = LoadTracker(), Watcher()
    route = Route(Instance(instance_id=1), watcher=watcher)
    assert watcher.told == []

    reservation = tracker.reserve(route, "r-0", prompt_tokens=4, block_size=None, hashes=())
    reservation.first_item()
    reservation.release()
    reservation.release()
    reservation.first_item()

    assert watcher.told == ["entered r-0", "prefilled", "left"]
