"""The trackers of several frontends agree, whatever happens to the messages between them and to the frontends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec
import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.router import Route
from dynamo_core.protocol.events import PLACED_LOADS
from dynamo_core.protocol.records import Instance
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.events import InprocEvents
from dynamo_runtime.dispatch.load import load_subscription, peer_load_sync, peer_loads
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadMessages, PeerLoadSync
from dynamo_runtime.dispatch.load.peer_loads import EXPIRY
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_telemetry.metrics import Metrics
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

WORKERS = (1, 2)
RANKS = (0, 1)


@dataclass
class Frontend:
    """A tracker, what runs on it, and the messages that are on their way to it."""

    tracker: LoadTracker = field(default_factory=LoadTracker)
    running: list[tuple[Reservation, int, int, list[int]]] = field(default_factory=list)
    inbox: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = PeerLoadMessages(self.tracker)
        self.tracker.on_change = self.messages.note

    def reserve(self, name: str, worker: int, rank: int, tokens: int) -> None:
        reservation = self.tracker.reserve(
            Route(Instance(instance_id=worker), rank),
            name,
            prompt_tokens=tokens,
            block_size=16,
            hashes=[hash((name, block)) for block in range(tokens // 16)],
        )
        self.running.append((reservation, worker, rank, [tokens, tokens // 16]))

    def sums(self, worker: int, rank: int) -> tuple[int, int, int]:
        """Return the requests, tokens to be prefilled and blocks of its own on a rank."""
        here = [facts for _, on, at, facts in self.running if (on, at) == (worker, rank)]
        return len(here), sum(facts[0] for facts in here), sum(facts[1] for facts in here)


class Frontends(RuleBasedStateMachine):
    """Frontends that place requests, and a network that loses, doubles, delays and reorders what they tell."""

    def __init__(self) -> None:
        super().__init__()
        self.frontends = [Frontend() for _ in range(3)]
        self.now = 0.0
        self.names = 0
        #: Whether one was replaced, whose loads may still be on the others' trackers.
        self.ghosts = False

    which = st.integers(0, 2)

    @rule(which=which, worker=st.sampled_from(WORKERS), rank=st.sampled_from(RANKS), tokens=st.integers(0, 64))
    def reserve(self, which: int, worker: int, rank: int, tokens: int) -> None:
        self.names += 1
        self.frontends[which].reserve(f"r{self.names}", worker, rank, tokens)

    @rule(which=which, at=st.integers(0, 9))
    def first_item(self, which: int, at: int) -> None:
        running = self.frontends[which].running
        if running:
            reservation, _, _, facts = running[at % len(running)]
            reservation.first_item()
            facts[0] = 0

    @rule(which=which, at=st.integers(0, 9))
    def release(self, which: int, at: int) -> None:
        running = self.frontends[which].running
        if running:
            running.pop(at % len(running))[0].release()

    @rule(which=which, whole=st.booleans(), lost=st.sets(which))
    def tell(self, which: int, whole: bool, lost: set[int]) -> None:
        messages = self.frontends[which].messages
        message = messages.everything() if whole else messages.changes()
        for number, frontend in enumerate(self.frontends):
            if number not in lost:
                frontend.inbox.append(message)

    @rule(which=which, at=st.integers(0, 9), again=st.booleans())
    def hear(self, which: int, at: int, again: bool) -> None:
        inbox = self.frontends[which].inbox
        if inbox:
            message = inbox[at % len(inbox)] if again else inbox.pop(at % len(inbox))
            self.frontends[which].messages.apply(message, self.now)

    @rule(seconds=st.sampled_from([0.05, 1.0, EXPIRY]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for frontend in self.frontends:
            frontend.tracker.peers.expire(self.now)

    @rule(which=which)
    def restart(self, which: int) -> None:
        """Kill a frontend and bring it back unannounced."""
        self.frontends[which] = Frontend()
        self.ghosts = True

    @rule(which=which)
    def end(self, which: int) -> None:
        """End a frontend in order."""
        gone = self.frontends[which]
        for reservation, *_ in gone.running:
            reservation.release()
        gone.running.clear()
        for frontend in self.frontends:
            frontend.inbox.append(gone.messages.farewell())
        self.frontends[which] = Frontend()
        self.ghosts = True

    @invariant()
    def nobody_counts_less_than_its_own(self) -> None:
        for frontend in self.frontends:
            for worker in WORKERS:
                own = sum(frontend.sums(worker, rank)[0] for rank in RANKS)
                assert frontend.tracker.requests(worker) >= own

    @precondition(lambda self: any(frontend.inbox for frontend in self.frontends))
    @rule()
    def all_is_quiet(self) -> None:
        """Deliver what was on its way, forget the dead, let each report once more, and assert that all see the same.

        If nobody is gone, nobody needs to be forgotten.
        """
        for frontend in self.frontends:
            while frontend.inbox:
                frontend.messages.apply(frontend.inbox.pop(0), self.now)
        if self.ghosts:
            # A little more: sums of such times need not be exact.
            self.time_passes(EXPIRY + 0.01)
            self.ghosts = False
        self.agree()

    def agree(self) -> None:
        messages = [frontend.messages.everything() for frontend in self.frontends]
        for frontend in self.frontends:
            for message in messages:
                frontend.messages.apply(message, self.now)
        for worker in WORKERS:
            for rank in RANKS:
                sums = [frontend.sums(worker, rank) for frontend in self.frontends]
                expected = (sum(tokens for _, tokens, _ in sums), sum(blocks for _, _, blocks in sums))
                for frontend in self.frontends:
                    tracker = frontend.tracker
                    assert (tracker.prefill_tokens(worker, rank), tracker.blocks(worker, rank)) == expected
            total = sum(frontend.sums(worker, rank)[0] for frontend in self.frontends for rank in RANKS)
            assert [frontend.tracker.requests(worker) for frontend in self.frontends] == [total] * 3

    def teardown(self) -> None:
        """Assert that no tracker holds anything at the end."""
        for frontend in self.frontends:
            for reservation, *_ in frontend.running:
                reservation.release()
            frontend.running.clear()
            frontend.inbox.clear()
        self.time_passes(EXPIRY + 0.01)
        self.agree()


TestFrontends = Frontends.TestCase
TestFrontends.settings = settings(stateful_step_count=40, deadline=None)


def told(message: bytes, to: LoadTracker, now: float = 0.0) -> None:
    PeerLoadMessages(to).apply(message, now)


def test_peer_load_counts_until_the_peer_updates_it() -> None:
    one, other = Frontend(), LoadTracker()
    one.reserve("a", 1, 0, 32)
    one.reserve("b", 1, 1, 16)
    told(one.messages.changes(), other)
    assert (other.requests(1), other.prefill_tokens(1, 0), other.blocks(1, 0), other.blocks(1, 1)) == (2, 32, 2, 1)

    one.running[0][0].first_item()
    told(one.messages.changes(), other)
    assert (other.requests(1), other.prefill_tokens(1, 0), other.prefill_tokens(1, 1)) == (2, 0, 16)

    one.running[0][0].release()
    told(one.messages.changes(), other)
    assert (other.requests(1), other.blocks(1, 0), other.total_requests) == (1, 0, 0)


def test_a_full_message_removes_absent_ranks() -> None:
    one, other = Frontend(), LoadTracker()
    one.reserve("a", 1, 0, 32)
    told(one.messages.changes(), other)
    one.running[0][0].release()
    assert one.messages.changes()

    told(one.messages.everything(), other)

    assert (other.requests(1), other.prefill_tokens(1), other.blocks(1)) == (0, 0, 0)


def test_a_message_that_was_overtaken_is_ignored() -> None:
    one, other = Frontend(), LoadTracker()
    one.reserve("a", 1, 0, 32)
    early = one.messages.changes()
    one.running[0][0].release()
    told(one.messages.changes(), other)

    told(early, other)

    assert other.requests(1) == 0


def test_a_frontend_that_is_silent_is_forgotten_with_all_it_placed() -> None:
    one, other = Frontend(), LoadTracker()
    one.reserve("a", 1, 0, 32)
    told(one.messages.everything(), other, now=10.0)

    other.peers.expire(10.0 + EXPIRY - 0.01)
    assert (other.requests(1), len(other.peers)) == (1, 1)
    other.peers.expire(10.0 + EXPIRY)

    assert (other.requests(1), other.prefill_tokens(1), other.blocks(1), len(other.peers)) == (0, 0, 0, 0)


def place(tracker: LoadTracker, name: str) -> Reservation:
    """Reserve a request of 5 tokens on worker 7."""
    return tracker.reserve(Route(Instance(instance_id=7)), name, prompt_tokens=5, block_size=None, hashes=())


class Plane:
    """An event plane and a directory that several frontends share."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        metrics = Metrics()
        self.events = InprocEvents(metrics)
        self.directory = MemoryDiscovery(PluginConfig(), metrics)
        self.heard: dict[PeerLoadSync, int] = {}

    def share(self) -> tuple[LoadTracker, PeerLoadSync]:
        tracker = LoadTracker()

        def peers(count: float) -> None:
            self.heard[share] = int(count)

        share = PeerLoadSync(tracker, self.events, self.directory, peers=peers)
        share.start()
        self._stack.push_async_callback(share.aclose)
        return tracker, share


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    async with AsyncExitStack() as stack:
        yield Plane(stack)


async def eventually(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def test_trackers_that_share_see_each_others_requests_come_and_go(plane: Plane) -> None:
    one, share = plane.share()
    other, _ = plane.share()

    reservation = place(one, "a")
    await eventually(lambda: other.requests(7) == 1)
    assert (one.requests(7), other.prefill_tokens(7)) == (1, 5)
    assert plane.heard[share] == 1
    reservation.release()
    await eventually(lambda: other.requests(7) == 0)


async def test_a_late_frontend_gets_the_current_load(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_load_sync, "REFRESH", 0.02)
    one, _ = plane.share()
    place(one, "a")
    await eventually(lambda: plane.heard)

    late, _ = plane.share()

    await eventually(lambda: late.requests(7) == 1)


async def test_a_closing_frontend_removes_its_load_from_its_peers(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_loads, "EXPIRY", 3600)
    one, share = plane.share()
    other, _ = plane.share()
    place(one, "a")
    await eventually(lambda: other.requests(7) == 1)

    await share.aclose()

    await eventually(lambda: other.requests(7) == 0)


async def test_a_lost_lease_is_replaced_and_counts_nothing_twice(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_load_sync, "REFRESH", 0.02)
    monkeypatch.setattr(peer_load_sync, "RETRY", 0.01)
    monkeypatch.setattr(load_subscription, "RETRY", 0.01)
    leases = []
    lease_of = plane.directory.lease

    async def lease(ttl: float | None = None) -> object:
        leases.append(await lease_of(ttl))
        return leases[-1]

    monkeypatch.setattr(plane.directory, "lease", lease)
    one, _ = plane.share()
    other, _ = plane.share()
    place(one, "a")
    await eventually(lambda: other.requests(7) == 1)

    leases[0].lost.set()
    await eventually(lambda: len(leases) == 3)
    place(one, "b")

    await eventually(lambda: other.requests(7) == 2)
    assert len(other.peers) == 1


async def test_a_directory_that_fails_at_first_is_asked_again(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_load_sync, "RETRY", 0.01)
    monkeypatch.setattr(load_subscription, "RETRY", 0.01)
    lease_of, asked = plane.directory.lease, []

    async def lease(ttl: float | None = None) -> object:
        asked.append(ttl)
        if len(asked) == 1:
            raise OSError("no directory yet")
        return await lease_of(ttl)

    monkeypatch.setattr(plane.directory, "lease", lease)
    one, _ = plane.share()
    other, _ = plane.share()
    place(one, "a")

    await eventually(lambda: other.requests(7) == 1)


async def test_a_message_that_cannot_be_read_is_left_out(plane: Plane) -> None:
    one, _ = plane.share()
    other, _ = plane.share()
    publisher = await plane.events.publisher(PLACED_LOADS, await plane.directory.lease())
    await eventually(lambda: plane.heard and all(plane.heard.values()))

    publisher.send(b"\xc1")
    publisher.send(msgspec.msgpack.encode(["not", "a", "message"]))
    place(one, "a")

    await eventually(lambda: other.requests(7) == 1)
