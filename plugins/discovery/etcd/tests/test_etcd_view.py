"""Whatever order listings and changes come in, the view ends up with what is in the store."""

from __future__ import annotations

import base64

import pytest
from dynamo_core import WatchEvent, WatchKind
from dynamo_plugin_discovery_etcd.view import View
from dynamo_plugin_discovery_etcd.wire import Change, Keys, Listing, Record
from dynamo_testing.discovery.watched_records import Told
from hypothesis import given
from hypothesis import strategies as st

TTL = 10.0

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "delete", "hear", "list", "answer", "fail", "empty", "wipe", "wait"]),
        st.sampled_from("abc"),
        st.integers(0, 1),
    ),
    max_size=40,
)


class Model:
    """A store, a view of it, and what is on its way from one to the other. A step is a method."""

    def __init__(self) -> None:
        self.view, self.told = View(TTL), Told()
        self.store: dict[str, Record] = {}
        self.revision, self.now, self.following, self.puts = 1, 0.0, False, 0
        self.waiting: list[Change] = []
        self.on_its_way: tuple[Listing, int] | None = None

    def put(self, key: str, lease: int) -> None:
        self.puts += 1
        self.revision += 1
        self.store[key] = Record(lease, self.revision, str(self.puts).encode())
        self.waiting.append(Change(key, self.revision, self.store[key]))

    def delete(self, key: str, _: int) -> None:
        if self.store.pop(key, None) is not None:
            self.revision += 1
            self.waiting.append(Change(key, self.revision, None))

    def hear(self, *_: object) -> None:
        if not self.following:
            self.follow()
        elif self.waiting:
            together = [change for change in self.waiting if change.revision == self.waiting[0].revision]
            del self.waiting[: len(together)]
            self.told.add(self.view.changed(together, self.now))

    def list(self, *_: object) -> None:
        """List what a watch asks for while changes go on."""
        if self.following:
            self.on_its_way = (self.listing(), self.view.revision)

    def answer(self, *_: object) -> None:
        if self.on_its_way is not None:
            self.told.add(self.view.listed(*self.on_its_way, self.now))
            self.on_its_way = None

    def fail(self, *_: object) -> None:
        self.told.add(self.view.failed())
        self.following, self.on_its_way = False, None

    def empty(self, *_: object) -> None:
        self.fail()
        self.store.clear()
        self.waiting.clear()
        self.revision = 1

    def wipe(self, *_: object) -> None:
        if self.store:
            self.revision += 1
            self.waiting += [Change(gone, self.revision, None) for gone in self.store]
            self.store.clear()

    def wait(self, *_: object) -> None:
        self.now += TTL
        self.told.add(self.view.tick(self.now))

    def listing(self) -> Listing:
        return Listing(7, self.revision, dict(self.store))

    def follow(self) -> None:
        self.told.add(self.view.listed(self.listing(), self.view.revision, self.now))
        self.waiting, self.following = [], True

    def settle(self) -> None:
        """Let the view hear everything."""
        if not self.following:
            self.follow()
        self.told.add(self.view.changed(self.waiting, self.now))
        self.told.add(self.view.tick(self.now + TTL))


@given(steps)
def test_a_view_with_all_events_equals_the_store(history: list[tuple[str, str, int]]) -> None:
    model = Model()
    for action, key, lease in history:
        model.now += 0.1
        getattr(model, action)(key, lease)
    model.settle()

    assert model.told.records == {key: record.value for key, record in model.store.items()}
    assert model.view.count == len(model.store)
    assert not model.view.stale
    assert model.told.is_fresh()


def test_a_store_with_an_older_revision_counts_as_emptied_and_keeps_records_for_a_ttl() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {"a": Record(1, 50, b"1")}), 0, 0.0)

    assert view.listed(Listing(7, 2, {}), 50, 1.0) == [WatchEvent(WatchKind.STALE)]
    assert view.changed([Change("b", 3, Record(1, 3, b"2"))], 2.0) == [WatchEvent(WatchKind.PUT, "b", b"2")]
    assert view.tick(1.0 + TTL) == [WatchEvent(WatchKind.DELETE, "a"), WatchEvent(WatchKind.FRESH)]


def test_an_emptied_store_keeps_the_view_until_leases_return() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {key: Record(lease, 50, b"1") for lease, key in enumerate("abc", 1)}), 0, 0.0)

    assert view.changed([Change(key, 51, None) for key in "abc"], 1.0) == [WatchEvent(WatchKind.STALE)]
    assert view.count == 0
    # Two are back, one as it was and one changed; the third has died meanwhile.
    assert view.changed([Change("a", 52, Record(1, 52, b"1"))], 2.0) == []
    assert view.changed([Change("b", 53, Record(2, 53, b"2"))], 3.0) == [WatchEvent(WatchKind.PUT, "b", b"2")]
    assert view.tick(1.0 + TTL) == [WatchEvent(WatchKind.DELETE, "c"), WatchEvent(WatchKind.FRESH)]


@pytest.mark.parametrize(("lease", "revision"), [(1, 51), (2, 52)], ids=["one lease", "two leases"])
def test_records_of_leases_that_end_are_gone_at_once(lease: int, revision: int) -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {"a": Record(1, 49, b"1"), "b": Record(lease, 50, b"1")}), 0, 0.0)

    gone = view.changed([Change("a", 51, None), Change("b", revision, None)], 1.0)

    assert gone == [WatchEvent(WatchKind.DELETE, "a"), WatchEvent(WatchKind.DELETE, "b")]


def test_another_cluster_is_noticed_at_any_revision() -> None:
    view = View(TTL)
    view.listed(Listing(7, 5, {"a": Record(1, 5, b"1")}), 0, 0.0)

    assert view.listed(Listing(8, 500, {}), 5, 1.0) == [WatchEvent(WatchKind.STALE)]


def test_a_listing_that_changes_have_overtaken_is_passed_over() -> None:
    view = View(TTL)
    view.listed(Listing(7, 5, {}), 0, 0.0)
    view.changed([Change("a", 6, Record(1, 6, b"1"))], 1.0)

    assert view.listed(Listing(7, 5, {}), 5, 2.0) == []
    assert view.count == 1


def test_a_change_that_a_listing_had_already_is_passed_over() -> None:
    view = View(TTL)
    view.listed(Listing(7, 7, {"a": Record(1, 7, b"new")}), 0, 0.0)

    assert view.changed([Change("a", 6, Record(1, 6, b"old"))], 1.0) == []


@given(st.text(min_size=1).filter(lambda key: key.isprintable()), st.text("abc/", min_size=1))
def test_every_key_comes_back_and_lies_in_the_range(key: str, prefix: str) -> None:
    keys = Keys(prefix)
    everything = keys.everything()

    assert keys.name(keys.one(key)) == key
    start, one, end = map(base64.b64decode, (everything["key"], keys.one(key), everything["range_end"]))
    assert start <= one < end
    assert base64.b64decode(keys.everything(key)["key"]) > one


def test_a_foreign_key_that_is_no_text_does_not_stop_the_listing() -> None:
    keys = Keys("p")
    foreign = base64.b64encode(b"p/\xff").decode()

    assert base64.b64decode(keys.everything(keys.name(foreign))["key"]) == b"p/\xff\x00"
