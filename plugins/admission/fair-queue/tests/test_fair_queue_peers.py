"""Limits over several frontends: what each tells, and what it makes of others, with times that the tests make."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from dynamo_plugin_admission_fair_queue.config import TenantSettings
from dynamo_plugin_admission_fair_queue.peers import Peers
from dynamo_plugin_admission_fair_queue.tenant_quotas import TenantLimits
from dynamo_plugin_admission_fair_queue.usage_codec import LARGEST, PeerSnapshot, TenantUse, UsageReport, encode
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

TTL = 3.0


class Memory:
    """A store: who told what, and when. `now` is in seconds and moves as tests want it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: dict[str, tuple[int, bytes]] = {}
        self._last = 0

    def look(self, own: str, known: Mapping[str, int]) -> PeerSnapshot:
        now = int(self.now * 1e6)
        stamps = {name: stamp for name, (stamp, _) in self.told.items() if name != own}
        news = {name: self.told[name][1] for name, stamp in stamps.items() if known.get(name) != stamp}
        return PeerSnapshot(now, stamps, news)

    def tell(self, own: str, data: bytes) -> None:
        # No two are told at the same time.
        self._last = max(self._last + 1, int(self.now * 1e6))
        self.told[own] = self._last, data


class Frontend:
    """The limits of one, and what it knows of others."""

    def __init__(self, store: Memory, name: str, **settings: float) -> None:
        self.store = store
        self.name = name
        self.saves = settings.get("burst_tokens", 0.0)
        self.book = TenantLimits(lambda _: TenantSettings.model_validate(settings), shared=True)
        self.peers = Peers(self.book, TTL)

    def tell(self, *, leaving: bool = False) -> None:
        self.store.tell(self.name, encode(self.book.report(self.store.now), leaving=leaving))

    def apply(self) -> bool:
        return self.peers.apply(self.store.look(self.name, self.peers.stamps), self.store.now)

    def begin(self, cost: float = 1, tenant: str = "a") -> None:
        self.book.begin(tenant, cost, self.store.now)

    def end(self, correction: float = 0, tenant: str = "a") -> None:
        self.book.end(tenant, correction, self.store.now)

    def wait(self, tenant: str = "a") -> float:
        """Return seconds until the tenant may spend tokens."""
        return self.book.ready_at(tenant, self.store.now) - self.store.now

    def left(self, tenant: str = "a") -> float:
        """Return tokens that the tenant may spend."""
        use = self.book.report(self.store.now).get(tenant)
        return self.saves if use is None else use.left


def settle(frontends: Sequence[Frontend]) -> None:
    """Let each frontend report, then read the others."""
    for one in frontends:
        one.tell()
    for one in frontends:
        one.apply()


def several(count: int, **settings: float) -> tuple[Memory, list[Frontend]]:
    """Return frontends that know of each other."""
    store = Memory()
    frontends = [Frontend(store, f"f{number}", **settings) for number in range(count)]
    settle(frontends)
    return store, frontends


def test_apply_returns_whether_anything_changed() -> None:
    store, (one, two) = several(2, concurrency=2)
    same = two.apply()
    one.tell()
    news = two.apply()
    store.now += TTL

    assert (same, news, two.apply()) == (False, True, True)
    assert len(two.peers) == 0


def test_refunds_over_the_burst_are_lost_for_all() -> None:
    store, (one, two) = several(2, tokens_per_second=10, burst_tokens=100)
    one.begin(50)
    settle([one, two])
    store.now += 100
    one.end(-50)
    one.begin(30)
    settle([one, two])

    assert one.left() == two.left() == pytest.approx(70)


def test_a_tenant_that_is_counted_anew_is_given_nothing_back() -> None:
    store, (one, two) = several(2, tokens_per_second=10, burst_tokens=100)
    one.begin(50)
    one.end()
    settle([one, two])
    store.now += 20
    one.tell()
    assert len(one.book) == 0
    one.begin(30)
    settle([one, two])

    assert one.left() == two.left() == pytest.approx(70)


def test_a_new_frontend_starts_from_its_peers_reports() -> None:
    store, (one, two) = several(2, concurrency=1, tokens_per_second=10, burst_tokens=5)
    one.begin(45)
    settle([one, two])
    store.now += 1
    new = Frontend(store, "new", concurrency=1, tokens_per_second=10, burst_tokens=5)
    new.apply()

    assert new.book.full("a")
    assert new.wait() == pytest.approx(one.wait()) == pytest.approx(3)


def test_a_killed_frontends_requests_count_until_expiry_and_its_tokens_stay_spent() -> None:
    store, (one, two) = several(2, concurrency=1, tokens_per_second=1, burst_tokens=1)
    one.begin(11)
    one.tell()
    store.now += 2
    two.apply()
    # From when it told on, not from when it was heard.
    store.now += 0.9
    two.apply()
    before = two.book.full("a")
    store.now += 0.2
    changed = two.apply()

    assert (before, changed, two.book.full("a")) == (True, True, False)
    # It had no use for what came in before it heard.
    assert two.wait() == pytest.approx(10 - 1.1)


def test_a_server_that_was_emptied_frees_nothing_at_once() -> None:
    store, (one, two) = several(2, concurrency=1, tokens_per_second=10, burst_tokens=10)
    one.begin(10)
    settle([one, two])
    store.told.clear()
    two.apply()
    kept = two.book.full("a")
    one.end(5)
    settle([one, two])

    assert kept
    assert not two.book.full("a")
    assert one.left() == two.left() == pytest.approx(-5)


def test_a_leaving_frontend_stops_counting_at_once() -> None:
    _, (one, two) = several(2, concurrency=1)
    one.begin()
    settle([one, two])
    one.tell(leaving=True)
    two.apply()

    assert (two.book.full("a"), len(two.peers)) == (False, 0)


def test_a_jump_of_the_servers_time_blocks_no_tenant() -> None:
    store, (one, two) = several(2, concurrency=1)
    one.begin()
    one.tell()
    stamp, data = store.told["f0"]
    store.told["f0"] = stamp + 3_600_000_000, data
    two.apply()
    counted = two.book.full("a")
    store.now += TTL
    two.apply()

    assert counted
    assert not two.book.full("a")


def test_tenants_without_limits_are_not_reported() -> None:
    _, (one,) = several(1)
    one.begin()

    assert one.book.report(100) == {}


def test_an_oversized_report_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode({"x" * LARGEST: TenantUse(1, 1, 0, 0)})


@pytest.mark.parametrize(
    "data",
    [
        b"no msgpack",
        msgspec.msgpack.encode([1, {"a": [1, -5, 0.0, 0.0]}]),
        msgspec.msgpack.encode([1, {"a": [1, "5", 0.0, 0.0]}]),
        msgspec.msgpack.encode(UsageReport(1, {"a": TenantUse(1, 5, math.nan, 0)})),
        msgspec.msgpack.encode(UsageReport(1, {"a": TenantUse(1, 5, 0, -math.inf)})),
        msgspec.msgpack.encode(UsageReport(2, {"a": TenantUse(1, 5, 0, 0)})),
        msgspec.msgpack.encode(UsageReport(1, {"a": TenantUse(1, 5, 0, 0), "x" * LARGEST: TenantUse(1, 1, 0, 0)})),
    ],
)
def test_an_undecodable_report_is_ignored_and_warned_of_once(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store, (one, two) = several(2, concurrency=1, tokens_per_second=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            store.tell("stranger", data)
            two.apply()
    one.begin()
    one.tell()
    two.apply()

    assert "what is told of tenants by frontend 'stranger' cannot be read and is left out" in caplog.text
    assert len(caplog.records) == 1
    assert two.book.full("a"), "others still count"


def test_fields_added_by_a_later_version_are_ignored() -> None:
    store, (_, two) = several(2, concurrency=5)
    store.tell("newer", msgspec.msgpack.encode([1, {"a": [1, 5, 0.0, 0.0, "more"]}, False, "more"]))
    two.apply()

    assert two.book.full("a")


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 5), st.floats(0, 100), st.floats(-50, 100)), max_size=30),
    st.floats(0.1, 100),
    st.integers(1, 100),
)
def test_frontends_together_stay_within_rate_and_burst(
    asked: Sequence[tuple[int, float, float, float]], rate: float, burst: int
) -> None:
    store, frontends = several(3, tokens_per_second=rate, burst_tokens=burst)
    start, spent = store.now, 0.0
    for number, pause, cost, correction in asked:
        one = frontends[number]
        store.now += pause
        store.now += one.wait()
        # Before this one began the tenant was not in debt.
        assert spent <= rate * (store.now - start) + burst + 1e-3
        one.begin(cost)
        settle(frontends)
        one.end(max(correction, -cost))
        settle(frontends)
        spent += max(0.0, cost + max(correction, -cost))
        left = [one.left() for one in frontends]
        assert left == pytest.approx([left[0]] * 3, abs=1e-3)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 100), st.floats(-50, 100), st.floats(0, 0.5), st.floats(0, 5)),
        max_size=30,
    ),
    st.floats(0.1, 100),
    st.integers(1, 100),
)
def test_frontends_differ_only_by_the_delay_of_reports(
    asked: Sequence[tuple[int, float, float, float, float]], rate: float, burst: int
) -> None:
    store, frontends = several(3, tokens_per_second=rate, burst_tokens=burst)
    for number, cost, correction, late, pause in asked:
        frontends[number].begin(cost)
        store.now += late / 2
        frontends[number].end(max(correction, -cost))
        store.now += late / 2
        settle(frontends)
        left = [one.left() for one in frontends]
        assert max(left) - min(left) <= rate * 0.5 + 1e-3
        for _ in range(int(pause)):
            store.now += 1
            settle(frontends)


class Sharing(RuleBasedStateMachine):
    """Frontends come, tell, fall silent and are killed; after an exchange all know the same, and nothing stays."""

    TENANTS = st.sampled_from(["a", "b"])

    def __init__(self) -> None:
        super().__init__()
        self.store = Memory()
        self.made = 0
        self.live: list[Frontend] = []
        self.running: dict[str, list[str]] = {}
        #: All that each has told, and when; and that of those that were killed.
        self.told: dict[str, list[tuple[float, list[str]]]] = {}
        self.dead: list[list[tuple[float, list[str]]]] = []

    @precondition(lambda self: len(self.live) < 3)
    @rule()
    def join(self) -> None:
        self.made += 1
        one = Frontend(self.store, f"f{self.made}", concurrency=3, tokens_per_second=5, burst_tokens=10)
        self.running[one.name] = []
        self.live.append(one)
        self._tell(one)
        one.apply()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tenant=TENANTS, cost=st.floats(0, 50))
    def begin(self, data: st.DataObject, tenant: str, cost: float) -> None:
        one = data.draw(st.sampled_from(self.live))
        if not one.book.full(tenant):
            one.begin(cost, tenant)
            self.running[one.name].append(tenant)
        assert one.book.running(tenant) <= 3

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), correction=st.floats(-50, 50))
    def end(self, data: st.DataObject, correction: float) -> None:
        one = data.draw(st.sampled_from([one for one in self.live if self.running[one.name]]))
        one.end(correction, self.running[one.name].pop())

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.store.now += seconds

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tells=st.booleans())
    def look(self, data: st.DataObject, tells: bool) -> None:
        one = data.draw(st.sampled_from(self.live))
        if tells:
            self._tell(one)
        one.apply()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        self.live.remove(one)
        del self.running[one.name]
        self.dead.append(self.told.pop(one.name))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.live))
        one.tell(leaving=True)
        self.live.remove(one)
        del self.running[one.name]
        for other in self.live:
            other.apply()

    @rule()
    def empty(self) -> None:
        """Empty the server; processes killed afterwards have to be heard of again first."""
        self.store.told.clear()
        for one in self.live:
            one.apply()

    @rule()
    def agree(self) -> None:
        for one in self.live:
            self._tell(one)
        for one in self.live:
            one.apply()
        for tenant in ("a", "b"):
            sure = sum(names.count(tenant) for names in self.running.values())
            # Of the killed at least none, as a server may have forgotten them, and at most what they told within the
            # time after which it expires: the last of it may not have been heard.
            silent = sum(
                max((names.count(tenant) for at, names in told if self.store.now - at < TTL + 1e-3), default=0)
                for told in self.dead
            )
            for one in self.live:
                known = self._known(one, tenant)
                assert sure <= known <= sure + silent

    def teardown(self) -> None:
        for one in self.live:
            for tenant in self.running[one.name]:
                one.end(0, tenant)
            self.running[one.name].clear()
        for _ in range(2):
            self.agree()
            self.store.now += TTL
        self.agree()
        assert all(self._known(one, tenant) == 0 for one in self.live for tenant in ("a", "b"))
        self.store.now += 10_000
        for one in self.live:
            one.apply()
            one.book.report(self.store.now)
            assert (len(one.book), len(one.peers)) == (0, 0)

    def _tell(self, one: Frontend) -> None:
        one.tell()
        self.told.setdefault(one.name, []).append((self.store.now, list(self.running[one.name])))

    def _known(self, one: Frontend, tenant: str) -> int:
        """Return as many as count for the tenant here."""
        return one.book.running(tenant) + one.book._peer_running.get(tenant, 0)


TestSharing = Sharing.TestCase
