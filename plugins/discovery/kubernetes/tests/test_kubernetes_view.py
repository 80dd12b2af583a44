"""Whatever order listings and changes come in, the view ends up with what is in the store and alive."""

from __future__ import annotations

from dynamo_core import WatchEvent, WatchKind
from dynamo_leases import NO_LEASE
from dynamo_plugin_discovery_kubernetes.objects import LeaseFact, RecordFact
from dynamo_plugin_discovery_kubernetes.view import CLEAR_AFTER, SKEW, View
from dynamo_testing.discovery.watched_records import Told
from hypothesis import given
from hypothesis import strategies as st

TTL = 10.0
PUT, DELETE, STALE, FRESH = WatchKind.PUT, WatchKind.DELETE, WatchKind.STALE, WatchKind.FRESH


def lease(number: int, version: int, renewed_at: float = 0.0) -> LeaseFact:
    return LeaseFact(number, f"uid-{number}", version, TTL, str(renewed_at), renewed_at)


def record(version: int, holder: int, key: str, value: bytes = b"") -> RecordFact:
    return RecordFact(f"{holder}-{key}", version, holder, key, value)


def read(view: View, leases: list[LeaseFact], records: list[RecordFact], version: int, now: float) -> list[WatchEvent]:
    asked_at = view.lease_version, view.record_version
    return view.listed((version, leases), (version, records), asked_at, now, now)


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "delete", "beat", "beat", "close", "hear", "read", "fail", "wait"]),
        st.integers(0, 2),
        st.sampled_from("ab"),
    ),
    max_size=40,
)


class Model:
    """Leases and records, a view of them, and the changes it has yet to hear of. A step is a method."""

    def __init__(self) -> None:
        self.view, self.told = View(TTL), Told()
        self.leases: dict[int, LeaseFact] = {}
        self.records: dict[str, RecordFact] = {}
        self.waiting: list[LeaseFact | RecordFact | tuple[int, int | str]] = []
        self.version, self.now, self.following = 1, 0.0, False

    def put(self, holder: int, key: str) -> None:
        if holder == NO_LEASE or holder in self.leases:
            fact = record(self.version, holder, key, str(self.version).encode())
            self.records[fact.name] = fact
            self.waiting.append(fact)

    def delete(self, holder: int, key: str) -> None:
        self._forget(f"{holder}-{key}")

    def beat(self, holder: int, _: str) -> None:
        if holder != NO_LEASE:
            self.leases[holder] = lease(holder, self.version, self.now)
            self.waiting.append(self.leases[holder])

    def close(self, holder: int, _: str) -> None:
        if self.leases.pop(holder, None) is not None:
            self.waiting.append((self.version, holder))
            for gone in [one for one in self.records if one.startswith(f"{holder}-")]:
                self.version += 1
                self._forget(gone)

    def hear(self, *_: object) -> None:
        if not self.following or not self.waiting:
            return
        match self.waiting.pop(0):
            case LeaseFact() as fact:
                self.view.lease_changed(fact.version, fact.number, fact, self.now, self.now)
            case RecordFact() as fact:
                self.view.record_changed(fact.version, fact.name, fact, self.now)
            case (at, int(number)):
                self.view.lease_changed(at, number, None, self.now, self.now)
            case (at, str(name)):
                self.view.record_changed(at, name, None, self.now)
        self.told.add(self.view.settle())

    def read(self, *_: object) -> None:
        facts = list(self.leases.values()), list(self.records.values())
        self.told.add(read(self.view, *facts, self.version, self.now))
        if not self.following:
            self.waiting, self.following = [], True

    def fail(self, *_: object) -> None:
        self.told.add(self.view.failed())
        self.following = False

    def wait(self, *_: object) -> None:
        self.now += TTL
        for number in [*self.leases]:
            self.version += 1
            self.beat(number, "")

    def settle(self) -> None:
        """Let the view hear everything, until every lease that is alive has been renewed."""
        if not self.following:
            self.read()
        while self.waiting:
            self.hear()
        self.now += TTL + 1
        fresh = [lease(number, self.version + number, self.now) for number in self.leases]
        self.told.add(self.view.leases_listed(self.version + 3, fresh, self.now, self.now))

    def newest(self) -> dict[str, bytes]:
        """Return what the view must show: of each key what was put last."""
        facts = sorted(self.records.values(), key=lambda fact: fact.version)
        return {fact.key: fact.value for fact in facts}

    def _forget(self, name: str) -> None:
        if self.records.pop(name, None) is not None:
            self.waiting.append((self.version, name))


@given(steps)
def test_a_view_with_all_events_equals_the_store(history: list[tuple[str, int, str]]) -> None:
    model = Model()
    for action, holder, key in history:
        model.now += 0.1
        model.version += 1
        getattr(model, action)(holder, key)
    model.settle()

    assert model.told.records == model.newest()
    assert not model.view.stale
    assert model.told.is_fresh()


def test_a_silent_lease_is_dead_only_once_it_was_asked_for_in_vain() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [record(3, 1, "a")], 5, 0.0)

    assert view.tick(TTL + 1) == []
    assert view.doubts(TTL + 1)
    assert view.leases_listed(6, [lease(1, 2)], TTL + 1, TTL + 1) == [WatchEvent(DELETE, "a")]
    assert not view.doubts(TTL + 1)


def test_a_lease_that_was_renewed_after_all_lives_and_one_that_comes_back_shows_again() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [record(3, 1, "a")], 5, 0.0)

    assert view.leases_listed(6, [lease(1, 6, 9.0)], 9.0, 9.0) == []
    assert view.tick(TTL + 1) == []
    assert view.leases_listed(7, [lease(1, 6, 9.0)], 20.0, 20.0) == [WatchEvent(DELETE, "a")]
    view.lease_changed(8, 1, lease(1, 8, 21.0), 21.0, 21.0)
    assert view.settle() == [WatchEvent(PUT, "a", b"")]


def test_a_new_lease_is_judged_by_its_renew_time_with_clock_skew() -> None:
    view = View(TTL)
    now = 1000.0
    old, skewed = lease(1, 2, now - TTL - SKEW - 1), lease(2, 3, now - TTL - SKEW + 1)

    assert read(view, [old, skewed], [record(4, 1, "old"), record(5, 2, "skewed")], 5, now) == [
        WatchEvent(PUT, "skewed", b"")
    ]


def test_a_store_with_an_older_revision_counts_as_emptied_and_keeps_records_for_a_ttl() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [record(3, 1, "a"), record(4, NO_LEASE, "value")], 50, 0.0)

    # What has no lease nobody would write again.
    assert read(view, [], [], 2, 1.0) == [WatchEvent(STALE), WatchEvent(DELETE, "value")]
    assert view.tick(TTL) == []
    assert view.tick(1.0 + TTL) == [WatchEvent(DELETE, "a"), WatchEvent(FRESH)]


def test_records_removed_right_after_an_outage_are_gone_after_a_ttl() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [record(3, 1, "a")], 5, 0.0)
    assert view.failed() == [WatchEvent(STALE)]
    assert read(view, [lease(1, 2)], [record(3, 1, "a")], 5, 30.0) == [WatchEvent(FRESH)]

    view.lease_changed(6, 1, None, 31.0, 31.0)
    assert view.settle() == []
    view.lease_changed(7, 1, lease(1, 7, 32.0), 32.0, 32.0)
    assert view.settle() == []
    view.record_changed(8, "1-a", None, 33.0)
    assert view.settle() == []
    assert view.tick(30.0 + TTL) == [WatchEvent(DELETE, "a")]


def test_a_change_that_a_listing_had_already_and_a_listing_that_changes_have_overtaken_are_passed_over() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [record(7, 1, "a", b"new")], 7, 0.0)

    view.record_changed(6, "1-a", record(6, 1, "a", b"old"), 1.0)
    assert view.settle() == []
    view.record_changed(9, "1-a", record(9, 1, "a", b"newer"), 1.0)
    assert view.settle() == [WatchEvent(PUT, "a", b"newer")]
    asked_at = 7, 7
    assert view.listed((8, [lease(1, 2)]), (8, [record(7, 1, "a", b"new")]), asked_at, 2.0, 2.0) == []


def test_leases_are_left_behind_long_after_their_death_only() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [], 5, 0.0)
    view.leases_listed(6, [lease(1, 2)], TTL + 1, TTL + 1)

    assert view.left_behind(CLEAR_AFTER * TTL) == []
    assert view.left_behind(CLEAR_AFTER * TTL + 1) == [lease(1, 2)]


def test_a_lease_that_was_renewed_behind_the_back_of_the_watch_is_noticed() -> None:
    view = View(TTL)
    read(view, [lease(1, 2)], [], 5, 0.0)

    assert not view.behind([lease(1, 2)])
    assert view.behind([lease(1, 6, 3.0)])
    assert view.behind([lease(1, 2), lease(2, 6)])
