"""Whatever order listings and changes come in, the view ends up with what is in the store."""

from __future__ import annotations

import base64

from dynamo_core import WatchEvent, WatchKind
from dynamo_plugin_discovery_etcd.view import View
from dynamo_plugin_discovery_etcd.wire import Change, Keys, Listing, Record
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


@given(steps)
def test_a_view_agrees_with_the_store_once_it_has_heard_everything(history: list[tuple[str, str, int]]) -> None:
    view, told, kinds = View(TTL), dict[str, bytes](), list[WatchKind]()
    store: dict[str, Record] = {}
    revision, now, following = 1, 0.0, False
    waiting: list[Change] = []
    on_its_way: tuple[Listing, int] | None = None

    def tell(events: list[WatchEvent]) -> None:
        for event in events:
            kinds.append(event.kind)
            if event.kind is WatchKind.PUT:
                told[event.key] = event.value
            elif event.kind is WatchKind.DELETE:
                del told[event.key]

    def listing() -> Listing:
        return Listing(7, revision, dict(store))

    for number, (action, key, lease) in enumerate(history):
        now += 0.1
        match action:
            case "put":
                revision += 1
                store[key] = Record(lease, revision, str(number).encode())
                waiting.append(Change(key, revision, store[key]))
            case "delete" if key in store:
                revision += 1
                del store[key]
                waiting.append(Change(key, revision, None))
            case "hear" if following and waiting:
                together = [change for change in waiting if change.revision == waiting[0].revision]
                del waiting[: len(together)]
                tell(view.changed(together, now))
            case "list" if following:
                # What a watch asks for while changes go on.
                on_its_way = (listing(), view.revision)
            case "answer" if on_its_way is not None:
                tell(view.listed(*on_its_way, now))
                on_its_way = None
            case "fail":
                tell(view.failed())
                following, on_its_way = False, None
            case "empty":
                tell(view.failed())
                store.clear()
                waiting.clear()
                revision, following, on_its_way = 1, False, None
            case "wipe" if store:
                revision += 1
                waiting += [Change(gone, revision, None) for gone in store]
                store.clear()
            case "wait":
                now += TTL
                tell(view.tick(now))
            case _:
                pass
        if not following and action == "hear":
            tell(view.listed(listing(), view.revision, now))
            waiting, following = [], True

    if not following:
        tell(view.listed(listing(), view.revision, now))
        waiting = []
    tell(view.changed(waiting, now))
    tell(view.tick(now + TTL))

    assert told == {key: record.value for key, record in store.items()}
    assert view.count == len(store)
    assert not view.stale
    marks = [kind for kind in kinds if kind in (WatchKind.STALE, WatchKind.FRESH)]
    assert marks == [WatchKind.STALE, WatchKind.FRESH] * (len(marks) // 2)


def test_a_store_that_has_gone_back_in_time_was_emptied_and_nobody_is_taken_for_dead_for_a_ttl() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {"a": Record(1, 50, b"1")}), 0, 0.0)

    assert view.listed(Listing(7, 2, {}), 50, 1.0) == [WatchEvent(WatchKind.STALE)]
    assert view.changed([Change("b", 3, Record(1, 3, b"2"))], 2.0) == [WatchEvent(WatchKind.PUT, "b", b"2")]
    assert view.tick(1.0 + TTL) == [WatchEvent(WatchKind.DELETE, "a"), WatchEvent(WatchKind.FRESH)]


def test_a_store_that_somebody_empties_leaves_the_view_as_it_was_until_everybody_is_back() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {key: Record(lease, 50, b"1") for lease, key in enumerate("abc", 1)}), 0, 0.0)

    assert view.changed([Change(key, 51, None) for key in "abc"], 1.0) == [WatchEvent(WatchKind.STALE)]
    assert view.count == 0
    # Two are back, one as it was and one changed; the third has died meanwhile.
    assert view.changed([Change("a", 52, Record(1, 52, b"1"))], 2.0) == []
    assert view.changed([Change("b", 53, Record(2, 53, b"2"))], 3.0) == [WatchEvent(WatchKind.PUT, "b", b"2")]
    assert view.tick(1.0 + TTL) == [WatchEvent(WatchKind.DELETE, "c"), WatchEvent(WatchKind.FRESH)]


def test_a_lease_that_ends_takes_all_of_its_records_at_once() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {"a": Record(1, 49, b"1"), "b": Record(1, 50, b"1")}), 0, 0.0)

    gone = view.changed([Change("a", 51, None), Change("b", 51, None)], 1.0)

    assert gone == [WatchEvent(WatchKind.DELETE, "a"), WatchEvent(WatchKind.DELETE, "b")]


def test_leases_that_end_one_after_the_other_are_gone_at_once_though_they_are_heard_of_together() -> None:
    view = View(TTL)
    view.listed(Listing(7, 50, {"a": Record(1, 49, b"1"), "b": Record(2, 50, b"1")}), 0, 0.0)

    gone = view.changed([Change("a", 51, None), Change("b", 52, None)], 1.0)

    assert gone == [WatchEvent(WatchKind.DELETE, "a"), WatchEvent(WatchKind.DELETE, "b")]


def test_another_cluster_is_noticed_whatever_its_revision() -> None:
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


def test_without_an_outage_a_record_that_is_gone_is_gone_at_once() -> None:
    view = View(TTL)
    view.listed(Listing(7, 5, {"a": Record(1, 5, b"1")}), 0, 0.0)

    assert view.changed([Change("a", 6, None)], 1.0) == [WatchEvent(WatchKind.DELETE, "a")]


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
