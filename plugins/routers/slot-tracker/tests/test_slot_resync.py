"""Replicas that repair gaps, over links that lose what they like: after a quiet time both hold the same requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from unittest.mock import patch

import pytest
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication import messages as replication
from dynamo_plugin_router_slot_tracker.replication.events import (
    PARTS_TOPIC,
    PROGRESS_TOPIC,
    Part,
    PartTopic,
    Progress,
    TrackerPart,
)
from dynamo_plugin_router_slot_tracker.replication.messages import Replication
from dynamo_plugin_router_slot_tracker.replication.resync import MAX_SOURCES, PATIENCE
from dynamo_plugin_router_slot_tracker.schemas import Addition, Held, Registration, RequestKey
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from plugins.conftest import Clock

MODEL = "m"
#: What both replicas know from the start, and what one of them may come to know later.
EARLY, LATE = 1, 2

Active = dict[str, tuple[tuple[int, int], tuple[int, ...], int, float]]


def worker(worker_id: int, block_size: int = 16) -> Registration:
    return Registration(worker_id=worker_id, model_name=MODEL, block_size=block_size, dp_start=0, dp_size=2)


class Node:
    """A replica whose messages wait on `links`, one for each peer that listens, until a test lets them through."""

    def __init__(self, clock: Clock) -> None:
        self.registry = Registry(clock=clock)
        self.registry.register(worker(EARLY))
        self.replication = Replication(self.registry, self, gaps=True, clock=clock)
        #: Its listeners, its subscriptions, and the replicas that it listens to.
        self.links: list[Link] = []
        self.topics: set[bytes] = {b"dynamo.slot-tracker.v1", PROGRESS_TOPIC}
        self.hears: list[Link] = []

    def send(self, topic: bytes, body: bytes) -> bool:
        for link in self.links:
            if any(topic.startswith(wanted) for wanted in link.listener.topics):
                link.waiting.append((topic, body))
        return True

    def subscribe(self, topic: bytes) -> None:
        self.topics.add(topic)
        for link in self.hears:
            link.wanted.append(topic)

    def unsubscribe(self, topic: bytes) -> None:
        self.topics.discard(topic)

    def add(self, request_id: str, hashes: list[int], tokens: int = 0, rank: tuple[int, int] = (EARLY, 0)) -> None:
        one = Addition(
            model_name=MODEL, request_id=request_id, worker_id=rank[0], dp_rank=rank[1],
            sequence_hashes=hashes, new_isl_tokens=tokens,
        )  # fmt: skip
        self.replication.added(one, self.registry.add(one))

    def complete_prefill(self, request_id: str) -> None:
        key = RequestKey(model_name=MODEL, request_id=request_id)
        self.replication.prefill_completed(key, self.registry.complete_prefill(key), 16)

    def free(self, request_id: str) -> None:
        key = RequestKey(model_name=MODEL, request_id=request_id)
        rank = self.registry.free(key)
        assert rank is not None
        self.replication.freed(key, rank, 16)

    def register(self, worker_id: int) -> None:
        self.registry.register(worker(worker_id))
        self.replication.worker_registered()

    @property
    def active(self) -> Active:
        return {
            held.request_id: (
                (held.worker_id, held.dp_rank), tuple(held.sequence_hashes), held.new_isl_tokens, round(held.age, 6)
            )
            for held in self.registry.held()
        }  # fmt: skip


class Link:
    """From one node to another: what was said and has not arrived, and what was asked for and has not."""

    def __init__(self, teller: Node, listener: Node) -> None:
        self.teller, self.listener = teller, listener
        self.waiting: deque[tuple[bytes, bytes]] = deque()
        self.wanted: deque[bytes] = deque()
        teller.links.append(self)
        listener.hears.append(self)

    def deliver(self, number: int = 1_000_000) -> None:
        """Let some of it through, in order."""
        for _ in range(min(number, len(self.wanted))):
            self.teller.replication.subscribed(self.wanted.popleft())
        for _ in range(min(number, len(self.waiting))):
            topic, body = self.waiting.popleft()
            # The socket does not hand over what is not wanted any more.
            if any(topic.startswith(wanted) for wanted in self.listener.topics):
                self.listener.replication.receive([topic, body])

    def break_off(self) -> None:
        """Lose all that is on its way, as with the connection."""
        self.waiting.clear()
        self.wanted.clear()


def quiet(clock: Clock, links: list[Link], rounds: int = 6) -> None:
    """Stop losing messages, and let no client call."""
    for _ in range(rounds):
        clock.now += PATIENCE
        for link in links:
            link.teller.replication.publish_progress()
        # A part that has come is followed by asking for the next one.
        while any(link.waiting or link.wanted for link in links):
            for link in links:
                link.deliver()


hashes = st.lists(st.integers(-3, 3), max_size=4)
tokens = st.sampled_from([0, 5])
sides = st.integers(0, 1)
numbers = st.integers(0, 5)


class Losses(RuleBasedStateMachine):
    """Two replicas that listen to each other, each with clients of its own."""

    @initialize(part=st.sampled_from([100, 1000, 10**6]), late=st.booleans())
    def start(self, part: int, late: bool) -> None:
        self.part = patch.object(replication, "_PART", part)
        self.part.start()
        self.clock = Clock()
        self.nodes = [Node(self.clock) for _ in range(2)]
        first, second = self.nodes
        self.links = [Link(first, second), Link(second, first)]
        self.own: list[set[str]] = [set(), set()]
        #: Nodes that do not know the second worker yet.
        self.without = [late, False]
        for node, without in zip(self.nodes, self.without, strict=True):
            if not without:
                node.register(LATE)

    @rule(side=sides, number=numbers, hashes=hashes, tokens=tokens, dp_rank=st.integers(0, 1), late=st.booleans())
    def add(self, side: int, number: int, hashes: list[int], tokens: int, dp_rank: int, late: bool) -> None:
        # Ids belong to the replica that takes the request, and may be used again.
        request_id = f"{side}-{number}"
        if request_id not in self.own[side] and not (late and self.without[side]):
            self.nodes[side].add(request_id, hashes, tokens, (LATE if late else EARLY, dp_rank))
            self.own[side].add(request_id)

    @rule(side=sides, number=numbers)
    def complete_prefill(self, side: int, number: int) -> None:
        if f"{side}-{number}" in self.own[side]:
            self.nodes[side].complete_prefill(f"{side}-{number}")

    @rule(side=sides, number=numbers)
    def free(self, side: int, number: int) -> None:
        if f"{side}-{number}" in self.own[side]:
            self.nodes[side].free(f"{side}-{number}")
            self.own[side].remove(f"{side}-{number}")

    @precondition(lambda self: self.without[0])
    @rule()
    def register_the_late_worker(self) -> None:
        self.nodes[0].register(LATE)
        self.without[0] = False

    @rule(side=sides, number=st.integers(1, 6))
    def deliver(self, side: int, number: int) -> None:
        self.links[side].deliver(number)

    @rule(side=sides, at=st.integers(0, 8))
    def lose_a_message(self, side: int, at: int) -> None:
        waiting = self.links[side].waiting
        if waiting:
            del waiting[at % len(waiting)]

    @rule(side=sides)
    def lose_the_connection(self, side: int) -> None:
        self.links[side].break_off()

    @rule(side=sides)
    def tell_progress(self, side: int) -> None:
        self.nodes[side].replication.publish_progress()

    @rule(seconds=st.sampled_from([0.5, 3.0, 7.0]))
    def wait(self, seconds: float) -> None:
        # Short enough for nothing to expire.
        if self.clock.now < 1200:
            self.clock.now += seconds

    def teardown(self) -> None:
        if not hasattr(self, "nodes"):
            return
        try:
            self.links[0].deliver()
            self.links[1].deliver()
            if self.without[0]:
                self.register_the_late_worker()
            quiet(self.clock, self.links)
            first, second = (self.ageless(node) for node in self.nodes)
            assert first == second
            assert set(first) == self.own[0] | self.own[1]
            for side, own in enumerate(self.own):
                for request_id in sorted(own):
                    self.nodes[side].free(request_id)
            quiet(self.clock, self.links)
            for node in self.nodes:
                self.nothing_is_left(node)
        finally:
            self.part.stop()

    def ageless(self, node: Node) -> dict[str, object]:
        # An event that comes late makes a request as young as its arrival, with or without repairs.
        return {request_id: entry[:3] for request_id, entry in node.active.items()}

    def nothing_is_left(self, node: Node) -> None:
        for _, scope in node.registry.scopes():
            assert not scope.requests
            assert not scope.owners
            for rank in scope.ranks.values():
                assert (rank.active.blocks, rank.active.requests, rank.active.prefill_tokens) == (0, 0, 0)


TestLosses = Losses.TestCase


@pytest.fixture
def clock() -> Clock:
    return Clock()


Pair = tuple[Node, Node, Link]


@pytest.fixture
def pair(clock: Clock) -> Pair:
    """Return one that tells, one that listens, and what is between them."""
    teller, listener = Node(clock), Node(clock)
    return teller, listener, Link(teller, listener)


def asked_for(link: Link) -> list[PartTopic]:
    return [topic for wanted in link.wanted if (topic := PartTopic.decode(wanted)) is not None]


def test_a_replica_requests_no_resync_without_a_lost_event(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    for number in range(50):
        teller.add(f"r{number}", [number])
        teller.replication.publish_progress()
        link.deliver()
        assert not link.wanted
        assert not listener.topics - {b"dynamo.slot-tracker.v1", PROGRESS_TOPIC}

    assert listener.active == teller.active
    assert (listener.replication.counts.missed, listener.replication.counts.repaired) == (0, 0)


def test_a_lost_last_event_is_noticed(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    teller.add("r", [1, 2, 3])
    link.deliver()
    teller.free("r")
    link.break_off()
    assert listener.active

    quiet(clock, [link], rounds=1)

    assert not listener.active
    assert (listener.replication.counts.missed, listener.replication.counts.repaired) == (1, 1)


def test_a_repaired_request_is_as_old_as_it_is_at_its_owner(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    teller.add("old", [1])
    link.break_off()
    clock.now += 200
    teller.add("young", [2])
    link.deliver()

    quiet(clock, [link], rounds=1)
    assert listener.active == teller.active
    clock.now = 1000 + 301

    assert [node.registry.sweep() for node in (teller, listener)] == [1, 1]
    assert set(listener.active) == {"young"}


def test_an_id_that_was_used_again_meanwhile_is_the_new_request(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    teller.add("r", [1, 2], 5)
    link.deliver()
    teller.free("r")
    clock.now += 100
    teller.add("r", [1, 2], 5)
    link.break_off()

    quiet(clock, [link], rounds=1)

    assert listener.active == teller.active


def test_requests_of_others_are_left_alone(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    third = Node(clock)
    other = Link(third, listener)
    listener.add("mine", [1])
    third.add("theirs", [2])
    other.deliver()
    teller.add("mine", [7, 8, 9])
    teller.add("r", [3])
    link.break_off()

    quiet(clock, [link, other])

    assert set(listener.active) == {"mine", "theirs", "r"}
    # An id that is taken keeps its request.
    assert listener.active["mine"][1] == (1,)


def test_requests_of_a_snapshot_are_freed_once_their_owner_has_none(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    teller.add("r", [1, 2], 5)
    link.break_off()
    listener.registry.restore(list(teller.registry.held()))
    assert set(listener.active) == {"r"}
    # From now on it is known whose it is.
    quiet(clock, [link])

    teller.complete_prefill("r")
    link.break_off()
    quiet(clock, [link])
    assert listener.active == teller.active
    teller.free("r")
    link.break_off()
    quiet(clock, [link])

    assert not listener.active


def bounded(clock: Clock, **bounds: int) -> Node:
    """Return a node whose registry has other bounds."""
    node = Node(clock)
    node.registry = Registry(clock=clock, **bounds)
    node.registry.register(worker(EARLY))
    node.replication = Replication(node.registry, node, gaps=True, clock=clock)
    return node


def test_parts_with_other_block_sizes_or_too_many_hashes_are_ignored(clock: Clock, pair: Pair) -> None:
    teller, _, _ = pair
    listener = bounded(clock, max_hashes=2)
    link = Link(teller, listener)
    for model, size in (("n", 32), ("o", 16)):
        teller.registry.register(
            Registration(worker_id=EARLY, model_name=model, block_size=size, dp_start=0, dp_size=1)
        )
        teller.registry.add(Addition(model_name=model, request_id="r", worker_id=EARLY, dp_rank=0, sequence_hashes=[1]))
    listener.registry.register(Registration(worker_id=EARLY, model_name="n", block_size=16, dp_start=0, dp_size=1))
    teller.add("long", [1, 2, 3])
    teller.add("short", [1, 2])
    link.break_off()

    quiet(clock, [link])

    assert set(listener.active) == {"short"}


def test_requests_beyond_the_room_are_not_held(clock: Clock, pair: Pair) -> None:
    teller, _, _ = pair
    listener = bounded(clock, max_held=14)
    link = Link(teller, listener)
    for number in range(3):
        teller.add(f"r{number}", [number])
    link.break_off()

    quiet(clock, [link])

    assert len(listener.active) == 1


def test_parts_are_requested_one_at_a_time_until_complete(
    clock: Clock, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "_PART", 1000)
    teller, listener, link = pair
    for number in range(100):
        teller.add(f"r{number}", [number, 1000 + number])
    link.break_off()
    teller.replication.publish_progress()
    asked: list[PartTopic] = []
    while True:
        link.deliver(0)
        for _ in range(len(link.waiting)):
            topic, body = link.waiting.popleft()
            assert len(body) < 16 * 1000
            listener.replication.receive([topic, body])
        assert len(asked_for(link)) <= 1
        if not link.wanted:
            break
        asked += asked_for(link)
        teller.replication.subscribed(link.wanted.popleft())

    assert listener.active == teller.active
    assert len(asked) > 10
    assert [one.bucket for one in asked] == list(range(asked[-1].of))


@pytest.mark.parametrize("heard", [True, False])
def test_resync_starts_over_after_a_loss_between_two_state_parts(
    clock: Clock, pair: Pair, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    monkeypatch.setattr(replication, "_PART", 1000)
    teller, listener, link = pair
    for number in range(20):
        teller.add(f"r{number}", [number])
    link.break_off()
    teller.replication.publish_progress()
    link.deliver(1)
    # The first part has come, and the second been asked for.
    link.deliver(1)
    [second] = asked_for(link)
    assert second.bucket == 1
    gone = next(iter(listener.active))
    teller.free(gone)
    link.break_off()
    link.wanted.append(second.encode())
    if heard:
        teller.add("next", [7])
    # Were the round to go on, it would end with a first part that is out of date.
    while link.waiting or link.wanted:
        link.deliver()

    quiet(clock, [link])

    assert gone not in listener.active
    assert listener.active == teller.active


def test_a_part_that_never_comes_is_asked_for_again_later(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    teller.add("r", [1])
    link.break_off()
    teller.replication.publish_progress()
    link.deliver(1)
    first = asked_for(link)
    link.break_off()
    for _ in range(3):
        teller.replication.publish_progress()
        link.deliver(1)
    assert not link.wanted

    clock.now += PATIENCE
    teller.replication.publish_progress()
    link.deliver(1)

    assert [one.bucket for one in asked_for(link)] == [0]
    assert asked_for(link)[0].nonce != first[0].nonce
    link.deliver()
    assert listener.active == teller.active
    # What was asked for first is not wanted any more.
    assert not listener.topics - {b"dynamo.slot-tracker.v1", PROGRESS_TOPIC}


def test_an_event_over_a_second_connection_counts_once(clock: Clock, pair: Pair) -> None:
    teller, listener, link = pair
    second = Link(teller, listener)
    teller.add("a", [1])
    teller.free("a")
    teller.add("b", [2])
    link.deliver()
    second.deliver()

    assert set(listener.active) == {"b"}
    assert (listener.replication.counts.applied, listener.replication.counts.missed) == (3, 0)


def test_a_replica_without_progress_messages_is_never_asked(clock: Clock, pair: Pair) -> None:
    """As one of a version that numbers its events and can do no more."""
    teller, listener, link = pair
    teller.add("a", [1])
    link.break_off()
    teller.add("b", [2])
    link.deliver()

    assert not link.wanted
    assert set(listener.active) == {"b"}


def test_a_replica_never_resyncs_with_itself(clock: Clock) -> None:
    one = Node(clock)
    link = Link(one, one)
    one.add("r", [1])
    link.break_off()

    quiet(clock, [link])

    assert one.replication.counts.missed == 0
    assert set(one.active) == {"r"}


def test_only_so_many_replicas_are_followed_and_the_others_not_waited_for(clock: Clock, pair: Pair) -> None:
    _, listener, _ = pair
    resync = listener.replication.resync
    assert resync is not None
    for number in range(MAX_SOURCES + 5):
        resync.on_progress(Progress(number + 1, 3))

    assert len(resync) == MAX_SOURCES
    assert len(listener.topics) == MAX_SOURCES + 2


@pytest.mark.parametrize(
    "topic",
    [
        b"",
        PARTS_TOPIC,
        PARTS_TOPIC + b"\0" * 23,
        PARTS_TOPIC + b"\0" * 25,
        PartTopic(1, 2, 5, 5).encode(),
        PartTopic(1, 2, 1, 0).encode(),
        b"dynamo.slot-tracker.v1",
    ],
)
def test_other_subscriptions_are_not_answered(pair: Pair, topic: bytes) -> None:
    teller, listener, link = pair
    listener.topics.add(topic)

    teller.replication.subscribed(topic)

    assert PartTopic.decode(topic) is None
    assert not link.waiting


def test_parts_of_another_replica_are_not_served(pair: Pair) -> None:
    teller, listener, link = pair
    topic = PartTopic(teller.replication.identity + 1, 2, 0, 0).encode()
    listener.topics.add(topic)

    teller.replication.subscribed(topic)

    assert not link.waiting


Forge = Callable[[PartTopic], tuple[PartTopic, Part]]


def part(topic: PartTopic, number: int) -> Part:
    held = Held(
        model_name=MODEL, tenant_id="default", request_id="forged", worker_id=EARLY, dp_rank=0,
        sequence_hashes=[1], new_isl_tokens=0, age=0.0,
    )  # fmt: skip
    return Part(topic.replica, number, 0, 1, [TrackerPart(MODEL, "default", 16, [held])])


@pytest.mark.parametrize(
    "forge",
    [
        # Not what was asked for; older than what has been heard; and another replica's.
        lambda topic: (topic._replace(nonce=topic.nonce ^ 1), part(topic, 1)),
        lambda topic: (topic, part(topic, 0)),
        lambda topic: (topic, part(topic._replace(replica=topic.replica ^ 1), 1)),
    ],
)
def test_a_forged_part_is_ignored(clock: Clock, pair: Pair, forge: Forge) -> None:
    teller, listener, link = pair
    teller.add("r", [1])
    link.break_off()
    teller.replication.publish_progress()
    link.deliver(1)
    [asked] = asked_for(link)
    topic, forged = forge(asked)

    listener.replication.receive([topic.encode(), listener.replication._encoder.encode(forged)])

    assert not listener.active
    # What was asked for still comes, or is asked for again.
    quiet(clock, [link])
    assert listener.active == teller.active
