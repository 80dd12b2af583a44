"""Events between replicas over real sockets, and the handling of malformed ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from dynamo_core.errors import ConfigError, Unavailable
from dynamo_plugin_router_slot_tracker.errors import Malformed, Unknown
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication import replicas
from dynamo_plugin_router_slot_tracker.replication.addresses import check_endpoint, check_peer
from dynamo_plugin_router_slot_tracker.replication.events import (
    PROGRESS_TOPIC,
    TOPIC,
    Added,
    AddRequest,
    Event,
    Message,
    WorkerRank,
)
from dynamo_plugin_router_slot_tracker.replication.replicas import Replicas, SyncSettings
from dynamo_plugin_router_slot_tracker.replication.resync import MAX_SOURCES
from dynamo_plugin_router_slot_tracker.replication.sockets import BATCH
from dynamo_plugin_router_slot_tracker.schemas import Addition, Registration, RequestKey

from plugins.conftest import until

ANYWHERE = "tcp://127.0.0.1:*"

#: Two replicas of one process, of which one does not read for longer than heartbeats would wait.
STALL = """
import asyncio, time
from dynamo_plugin_router_slot_tracker.replication import replicas, messages as replication
from dynamo_plugin_router_slot_tracker.schemas import Addition, Registration
from dynamo_plugin_router_slot_tracker.registry import Registry

replicas.QUEUE = 10

def replica():
    registry = Registry(max_held=10**8)
    registry.register(Registration(worker_id=7, model_name="m", block_size=16, dp_start=0, dp_size=2))
    sync = replicas.Replicas(replicas.SyncSettings("tcp://127.0.0.1:*"), registry)
    sync.open()
    sync.start()
    return registry, sync

async def main():
    (teller, told), (listener, hears) = replica(), replica()
    hears.add_peer(told.endpoint)
    number = 0

    def tell(blocks):
        nonlocal number
        number += 1
        one = Addition(
            model_name="m", request_id=f"r{number}", worker_id=7, dp_rank=0, sequence_hashes=list(range(blocks))
        )
        told.replication.added(one, teller.add(one))

    while not listener.scope("m", "default").requests:
        tell(1)
        await asyncio.sleep(0.01)
    for _ in range(300):
        tell(20_000)
    time.sleep(5)
    async with asyncio.timeout(20):
        while f"r{number}" not in listener.scope("m", "default").requests:
            tell(1)
            await asyncio.sleep(0.02)
    print("alive")
    told.close()
    hears.close()

asyncio.run(main())
"""


class Replica:
    """A registry with one worker, and its sockets."""

    def __init__(self, bind: str = ANYWHERE, **settings: Any) -> None:
        self.registry = Registry()
        self.registry.register(Registration(worker_id=7, model_name="m", block_size=16, dp_start=0, dp_size=2))
        self.sync = Replicas(SyncSettings(bind, **settings), self.registry)
        self.sync.open()
        self.sync.start()

    def add(self, request_id: str, hashes: list[int], tokens: int = 0) -> None:
        one = Addition(
            model_name="m",
            request_id=request_id,
            worker_id=7,
            dp_rank=0,
            sequence_hashes=hashes,
            new_isl_tokens=tokens,
        )
        self.sync.replication.added(one, self.registry.add(one))

    def prefilled(self, request_id: str) -> None:
        key = RequestKey(model_name="m", request_id=request_id)
        self.sync.replication.prefill_completed(key, self.registry.complete_prefill(key), 16)

    def free(self, request_id: str) -> None:
        key = RequestKey(model_name="m", request_id=request_id)
        rank = self.registry.free(key)
        assert rank is not None
        self.sync.replication.freed(key, rank, 16)

    @property
    def load(self) -> tuple[int, int]:
        first = self.registry.loads()[0]
        return first.active_prefill_tokens, first.active_decode_blocks

    @property
    def active(self) -> set[str]:
        return set(self.registry.scope("m", "default").requests)


async def listens(listener: Replica, teller: Replica) -> None:
    """Connect, and return once what the teller says arrives."""
    listener.sync.add_peer(teller.sync.endpoint)
    number = 0
    before = listener.sync.replication.counts.applied
    while listener.sync.replication.counts.applied == before:
        number += 1
        teller.add(f"probe{number}", [])
        await asyncio.sleep(0.01)
        assert number < 1000
    for one in range(1, number + 1):
        teller.free(f"probe{one}")
    await until(lambda: not listener.active)


async def two(replica: Make) -> tuple[Replica, Replica]:
    """Return two replicas that see gaps, the second of which listens to the first."""
    teller, listener = replica(gaps=True), replica(gaps=True)
    await listens(listener, teller)
    return teller, listener


Make = Callable[..., Replica]


@pytest.fixture
async def replica() -> AsyncIterator[Make]:
    made: list[Replica] = []

    def make(**settings: Any) -> Replica:
        made.append(Replica(**settings))
        return made[-1]

    yield make
    for one in made:
        one.sync.close()
        one.sync.close()


class Stranger:
    """Sends whatever a test likes, as a peer that `listener` listens to."""

    def __init__(self, listener: Replica) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(ANYWHERE)
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        listener.sync.add_peer(endpoint.rstrip(b"\0").decode())

    async def subscribed(self) -> None:
        await self.subscription()

    async def subscription(self) -> bytes:
        """Return the next topic that the listener subscribes to."""
        return await asyncio.to_thread(self._socket.recv)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def event(self, number: int = 0, **fields: Any) -> None:
        event = {
            "request_id": f"r{number}",
            "worker": {"worker_id": 7, "dp_rank": 0},
            "data": {"AddRequest": {"token_sequence": [1, 2**64 - 1]}},
            "router_id": 5,
        } | fields.pop("event", {})
        body = {"model_name": "m", "tenant_id": "default", "block_size": 16, "event": event, "number": number} | fields
        self.send(TOPIC, msgspec.msgpack.encode(body))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
async def heard(replica: Make) -> AsyncIterator[tuple[Replica, Stranger]]:
    """Yield a replica that looks for gaps, and a stranger that it listens to."""
    listener = replica(gaps=True)
    stranger = Stranger(listener)
    await stranger.subscribed()
    yield listener, stranger
    stranger.close()


def test_a_message_has_the_documented_form() -> None:
    event = Event("r", WorkerRank(7, 1), Added(AddRequest.of([1, -1], 48)), 9)

    added = msgspec.msgpack.decode(msgspec.msgpack.encode(Message("m", "t", 16, event)))
    freed = msgspec.msgpack.decode(
        msgspec.msgpack.encode(Message("m", "t", 16, Event("r", WorkerRank(7, 1), "Free", 9)))
    )

    assert added == {
        "model_name": "m",
        "tenant_id": "t",
        "block_size": 16,
        "event": {
            "request_id": "r",
            "worker": {"worker_id": 7, "dp_rank": 1},
            "data": {
                "AddRequest": {
                    "token_sequence": [1, 2**64 - 1],
                    "track_prefill_tokens": True,
                    "expected_output_tokens": None,
                    "prefill_load_hint": {"initial_effective_prefill_tokens": 48, "expected_prefill_duration": None},
                }
            },
            "router_id": 9,
            "lora_name": None,
        },
    }
    assert freed["event"]["data"] == "Free"


def test_without_tokens_to_prefill_none_are_tracked() -> None:
    request = AddRequest.of([1], 0)

    assert (request.track_prefill_tokens, request.prefill_load_hint, request.new_tokens) == (False, None, 0)


async def test_every_lifecycle_event_arrives_in_order(replica: Make) -> None:
    teller, listener = replica(), replica()
    await listens(listener, teller)
    before = listener.sync.replication.counts.dropped
    teller.add("a", [1, -2], 48)
    teller.add("b", [1, 5], 3)
    await until(lambda: listener.load == (51, 3))
    teller.prefilled("a")
    await until(lambda: listener.load == (3, 3))
    teller.free("a")
    teller.free("b")
    await until(lambda: listener.load == (0, 0))

    assert teller.sync.replication.identity != listener.sync.replication.identity
    assert (listener.sync.replication.counts.malformed, listener.sync.replication.counts.dropped) == (0, before)
    # An event of another replica is not told again.
    assert listener.sync.replication.counts.published == 0


async def test_three_replicas_agree_and_none_forwards_events(replica: Make) -> None:
    three = [replica() for _ in range(3)]
    for one in three:
        for other in three:
            if one is not other:
                await listens(one, other)
    before = [one.sync.replication.counts.published for one in three]
    for number, one in enumerate(three):
        one.add(f"r{number}", [number, 10], 1)

    await until(lambda: all(one.load == (3, 4) for one in three))

    # Each told of its own only.
    assert [one.sync.replication.counts.published for one in three] == [count + 1 for count in before]


async def test_a_replica_ignores_its_own_events(replica: Make) -> None:
    one, other = replica(), replica()
    # By another name of the same endpoint, which nobody can tell.
    one.sync.add_peer(one.sync.endpoint)
    await listens(other, one)
    await listens(one, other)
    applied, dropped = one.sync.replication.counts.applied, one.sync.replication.counts.dropped

    one.add("r", [1])
    other.add("s", [2])
    await until(lambda: "s" in one.active)

    assert (one.sync.replication.counts.applied, one.sync.replication.counts.dropped) == (applied + 1, dropped)


async def test_more_than_one_batch_is_read_without_another_sign(replica: Make) -> None:
    teller, listener = replica(), replica()
    await listens(listener, teller)

    for number in range(4 * BATCH):
        teller.add(f"r{number}", [number])

    await until(lambda: listener.load == (0, 4 * BATCH))


async def test_malformed_events_are_counted_and_ignored(heard: tuple[Replica, Stranger]) -> None:
    listener, stranger = heard
    stranger.send(TOPIC)
    stranger.send(TOPIC, b"\xc1")
    stranger.send(TOPIC, b"\x80")
    stranger.send(TOPIC, b"", b"")
    stranger.send(TOPIC, msgspec.msgpack.encode([1]))
    stranger.send(b"another.topic", b"")
    for fields in (
        {"block_size": -1},
        {"block_size": 2**32},
        {"event": {"data": "Grow"}},
        {"event": {"data": {"AddRequest": {"token_sequence": ["x"]}}}},
        {"event": {"worker": {"worker_id": 7, "dp_rank": 2**32}}},
        {"event": {"router_id": "x"}},
    ):
        stranger.event(**fields)
    stranger.event(1)

    await until(lambda: listener.load == (0, 2))

    assert listener.sync.replication.counts.malformed == 11
    assert listener.sync.replication.counts.dropped == 0


async def test_events_of_unknown_workers_are_dropped(heard: tuple[Replica, Stranger]) -> None:
    listener, stranger = heard
    listener.add("mine", [1])
    for fields in (
        {"model_name": "unknown"},
        {"tenant_id": "unknown"},
        {"block_size": 32},
        {"event": {"worker": {"worker_id": 8, "dp_rank": 0}}},
        {"event": {"worker": {"worker_id": 7, "dp_rank": 2}}},
        {"event": {"request_id": "mine"}},
        {"event": {"request_id": "unknown", "data": "Free"}},
        # A request of that name, but elsewhere.
        {"event": {"request_id": "mine", "data": "Free", "worker": {"worker_id": 7, "dp_rank": 1}}},
    ):
        stranger.event(**fields)
    stranger.event(1)

    await until(lambda: "r1" in listener.active)

    assert listener.sync.replication.counts.dropped == 8
    assert listener.active == {"mine", "r1"}
    assert len(listener.registry.workers()) == 1


async def test_hashes_of_a_replica_are_those_of_its_clients(heard: tuple[Replica, Stranger]) -> None:
    listener, stranger = heard
    listener.add("mine", [1, -1])
    stranger.event(1)

    await until(lambda: "r1" in listener.active)

    # Its 2**64 - 1 is the -1 that a client sends.
    assert listener.load == (0, 2)


async def test_fields_that_others_add_are_ignored_and_hints_may_be_off(heard: tuple[Replica, Stranger]) -> None:
    listener, stranger = heard
    hint = {"initial_effective_prefill_tokens": 9, "expected_prefill_duration": [1, 2], "more": 1}
    data = {"AddRequest": {"prefill_load_hint": hint, "more": 1}}
    stranger.event(event={"data": data, "more": 1}, more=1)
    await until(lambda: listener.load == (9, 0))
    data["AddRequest"]["track_prefill_tokens"] = False
    stranger.event(1, event={"data": data})

    await until(lambda: "r1" in listener.active)

    assert listener.load == (9, 0)


async def test_lost_events_are_counted(heard: tuple[Replica, Stranger], caplog: pytest.LogCaptureFixture) -> None:
    listener, stranger = heard
    # The first that is heard of a process is where counting begins.
    for number in (5, 6, 9, 10):
        stranger.event(number)
    stranger.event(2, event={"router_id": 6, "request_id": "other"})
    stranger.event(4, event={"router_id": 6, "request_id": "another"})

    await until(lambda: "another" in listener.active)

    assert listener.sync.replication.counts.missed == 3
    assert "2 events of replica 0000000000000005 were lost" in caplog.text


async def test_only_so_many_processes_are_remembered(heard: tuple[Replica, Stranger]) -> None:
    listener, stranger = heard
    for source in range(MAX_SOURCES + 10):
        stranger.event(1, event={"router_id": source + 1, "request_id": f"s{source}"})

    await until(lambda: f"s{MAX_SOURCES + 9}" in listener.active)

    resync = listener.sync.replication.resync
    assert resync is not None
    assert len(resync) == MAX_SOURCES


async def test_lost_events_are_fetched_from_their_replica(replica: Make) -> None:
    teller, listener = await two(replica)
    for number in range(100):
        teller.add(f"old{number}", [1, number + 10], 3)
    await until(lambda: len(listener.active) == 100)
    listener.add("mine", [7])

    # As good as a network that is down: nothing of this arrives.
    listener.sync.remove_peer(teller.sync.endpoint)
    for number in range(97):
        teller.free(f"old{number}")
    teller.prefilled("old98")
    teller.add("new", [2, 3], 5)
    listener.sync.add_peer(teller.sync.endpoint)

    await until(lambda: listener.active == {"old97", "old98", "old99", "new", "mine"})
    assert listener.load == (3 + 0 + 3 + 5, 1 + 3 + 2 + 1)
    assert "mine" not in teller.active


class Eavesdropper:
    """A SUB socket of another kind of replica, which keeps all that it is sent."""

    def __init__(self, teller: Replica, topic: bytes) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(teller.sync.endpoint)

    async def heard(self, number: int) -> list[tuple[bytes, dict[str, Any]]]:
        """Return so many messages, which must come."""
        messages = []
        async with asyncio.timeout(10):
            for _ in range(number):
                while not self._socket.poll(0):  # noqa: ASYNC110 - this socket has no event
                    await asyncio.sleep(0.005)
                topic, body = self._socket.recv_multipart()
                messages.append((topic, msgspec.msgpack.decode(body)))
        return messages

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


async def heard_after(teller: Replica, topic: bytes, number: int) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the first messages about request `r` that a subscriber of the replica hears."""
    listener = Eavesdropper(teller, topic)
    try:
        probe = 0
        while not listener._socket.poll(10):
            probe += 1
            teller.add(f"subscribed{probe}", [])
            await asyncio.sleep(0)
        teller.add("r", [1, -2], 5)
        teller.prefilled("r")
        teller.free("r")
        heard = await listener.heard(1)
        while heard[-1][1].get("event", {}).get("request_id") != "r":
            heard = await listener.heard(1)
        return heard + await listener.heard(number - 1)
    finally:
        listener.close()


async def test_without_gaps_only_plain_events_are_sent(replica: Make) -> None:
    heard = await heard_after(replica(), b"", 3)

    assert [topic for topic, _ in heard] == [TOPIC] * 3
    assert [body.keys() for _, body in heard] == [{"model_name", "tenant_id", "block_size", "event"}] * 3


async def test_with_gaps_events_carry_a_number(replica: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "PROGRESS", 0.01)
    teller, listener = replica(gaps=True), replica(gaps=True)
    teller.add("early", [1])
    # What is repaired here is nothing to others.
    listener.sync.add_peer(teller.sync.endpoint)
    await until(lambda: listener.active == {"early"})

    heard = await heard_after(teller, TOPIC, 3)

    assert {topic for topic, _ in heard} == {TOPIC}
    numbers = [body.pop("number") for _, body in heard]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert [body["event"]["data"] for _, body in heard][1:] == ["MarkPrefillCompleted", "Free"]
    assert [body.keys() for _, body in heard] == [{"model_name", "tenant_id", "block_size", "event"}] * 3


@pytest.mark.parametrize("gaps", [False, True])
async def test_a_replica_subscribes_to_progress_only_with_gap_repair(replica: Make, gaps: bool) -> None:
    listener = replica(gaps=gaps)
    stranger = Stranger(listener)
    try:
        wanted = {await stranger.subscription() for _ in range(2 if gaps else 1)}
        stranger.event(7 * gaps)
        stranger.event(7 * gaps + 3 * gaps, event={"request_id": "s"})
        await until(lambda: len(listener.active) == 2)

        assert wanted == ({b"\x01" + TOPIC, b"\x01" + PROGRESS_TOPIC} if gaps else {b"\x01" + TOPIC})
        # Who tells no progress, as replicas without the option, is asked for nothing.
        assert not stranger._socket.poll(100)
    finally:
        stranger.close()


async def test_replicas_with_and_without_gaps_interoperate(replica: Make) -> None:
    plain, numbered = replica(), replica(gaps=True)
    await listens(plain, numbered)
    await listens(numbered, plain)

    numbered.sync.replication._numbers += 100
    plain.add("a", [1])
    numbered.add("b", [2])

    await until(lambda: plain.active == numbered.active == {"a", "b"})
    assert plain.sync.replication.counts.malformed == numbered.sync.replication.counts.malformed == 0
    # The replica without the option does not look at numbers.
    assert plain.sync.replication.counts.missed == 0


async def test_a_worker_that_is_registered_late_gets_its_requests(
    replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "PROGRESS", 0.05)
    teller, listener = await two(replica)
    late = Registration(worker_id=8, model_name="m", block_size=16, dp_start=0, dp_size=1)
    teller.registry.register(late)
    one = Addition(model_name="m", request_id="late", worker_id=8, dp_rank=0, sequence_hashes=[1, 2])
    teller.sync.replication.added(one, teller.registry.add(one))
    await until(lambda: listener.sync.replication.counts.dropped >= 1)

    listener.registry.register(late)
    listener.sync.replication.worker_registered()

    await until(lambda: listener.active == {"late"})


@pytest.mark.full
def test_a_stall_with_a_full_queue_does_not_end_the_process() -> None:
    """The library ends the process with a failed assertion where its heartbeats meet a queue that is full."""
    done = subprocess.run([sys.executable, "-c", STALL], capture_output=True, text=True, timeout=50)

    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


async def test_a_peer_can_come_after_those_that_listen_to_it(replica: Make) -> None:
    teller, listener = replica(), replica()
    endpoint = teller.sync.endpoint
    await listens(listener, teller)
    teller.sync.close()

    again = replica(bind=endpoint)
    for number in range(500):
        again.add(f"n{number}", [1])
        await asyncio.sleep(0.02)
        if listener.active:
            break

    assert listener.active


def test_an_unstarted_replica_refuses_peers_and_publishes_nothing() -> None:
    registry = Registry()
    sync = Replicas(SyncSettings(ANYWHERE), registry)

    with pytest.raises(Unavailable, match="replica peer manager is unavailable"):
        sync.add_peer("tcp://x:1")
    with pytest.raises(Unavailable, match="replica peer manager is unavailable"):
        sync.remove_peer("tcp://x:1")
    sync.replication.added(Addition(model_name="m", request_id="r", worker_id=7, dp_rank=0, sequence_hashes=[1]), 16)

    assert sync.replication.counts.published == 0
    assert sync.endpoint == ANYWHERE


async def test_an_unknown_peer_cannot_be_removed_nor_the_own_endpoint_added(replica: Make) -> None:
    one = replica(advertise="tcp://me:1", peers=("tcp://b:1", "tcp://a:1"))

    assert one.sync.peers == ["tcp://a:1", "tcp://b:1"]
    with pytest.raises(Unknown, match="peer not found"):
        one.sync.remove_peer("tcp://c:1")
    with pytest.raises(Malformed, match="advertised endpoint"):
        one.sync.add_peer("tcp://me:1")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"advertise": "nothing"}, "--replica-sync-advertise: invalid ZMQ endpoint `nothing`: missing scheme"),
        ({"advertise": "tcp://me:1", "peers": ("tcp://me:1",)}, "--replica-sync-peers: peer endpoint matches"),
        (
            {"bind": "tcp://127.0.0.1:99999"},
            "--replica-sync-bind: invalid ZMQ endpoint `tcp://127.0.0.1:99999`: invalid",
        ),
    ],
)
def test_addresses_that_cannot_be_used_are_errors_of_the_set_up(settings: dict[str, Any], says: str) -> None:
    sync = Replicas(SyncSettings(**({"bind": ANYWHERE} | settings)), Registry())

    with pytest.raises(ConfigError) as raised:
        sync.open()

    assert says in str(raised.value)
    sync.close()


def test_a_taken_port_is_an_error_of_the_set_up() -> None:
    first = Replicas(SyncSettings(ANYWHERE), Registry())
    first.open()
    try:
        with pytest.raises(ConfigError, match="cannot be bound"):
            Replicas(SyncSettings(first.endpoint), Registry()).open()
    finally:
        first.close()


@pytest.mark.parametrize("endpoint", ["tcp://host:1", "tcp://[::1]:8092", "tcp://*:8092", "ipc:///tmp/x", "tcp://h:*"])
def test_an_operator_may_name_any_endpoint_of_another_process(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("", "missing scheme"),
        ("host:1", "missing scheme"),
        ("://host:1", "missing scheme"),
        ("inproc://x", "unsupported scheme `inproc`"),
        ("pgm://x:1", "unsupported scheme `pgm`"),
        ("tcp://", "missing address"),
        ("tcp://host", "missing TCP port"),
        ("tcp://host:", "missing TCP port"),
        ("tcp://:1", "missing TCP port"),
        ("tcp://[::1]", "missing TCP port"),
        ("tcp://host:65536", "invalid TCP port"),
        ("tcp://host:http", "invalid TCP port"),
        pytest.param("tcp://host:" + "9" * 5000, "invalid TCP port", id="a port of 5000 digits"),
        ("ipc://", "missing address"),
        ("ipc://a\0b", "missing address"),
    ],
)
def test_other_endpoints_are_refused(endpoint: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        check_endpoint(endpoint)

    assert str(raised.value).endswith(f": {reason}")


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://host:1", "tcp://slot_tracker-a.svc.cluster.local.:8092", "tcp://10.0.0.1:65535", "tcp://[fe80::1]:8092"],
)
def test_a_client_may_register_tcp_peers(endpoint: str) -> None:
    check_peer(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("ipc:///tmp/x", "unsupported scheme `ipc`"),
        ("inproc://x", "unsupported scheme `inproc`"),
        ("pgm://eth0;239.0.0.1:1", "unsupported scheme `pgm`"),
        ("/tmp/x", "missing scheme"),
        ("TCP://x:1", "unsupported scheme `TCP`"),
        ("tcp://host:*", "invalid TCP port"),
        ("tcp://host:0", "invalid TCP port"),
        ("tcp://host:+1", "invalid TCP port"),
        ("tcp://host:\u0661", "invalid TCP port"),
        # What the library takes for a source address and a destination.
        ("tcp://10.0.0.1:5555;10.0.0.2:5555", "invalid host"),
        ("tcp:///tmp/x:1", "invalid host"),
        ("tcp://user@host:1", "invalid host"),
        ("tcp://a b:1", "invalid host"),
        ("tcp://-host:1", "invalid host"),
        ("tcp://host..b:1", "invalid host"),
        ("tcp://b\u00fccher:1", "invalid host"),
        ("tcp://999.1.1.1:1", "invalid host"),
        ("tcp://1.2.3:1", "invalid host"),
        ("tcp://[::g]:1", "invalid host"),
        ("tcp://::1:1", "invalid host"),
        pytest.param(f"tcp://{'a' * 64}:1", "invalid host", id="a label of 64 characters"),
        pytest.param("tcp://" + "a." * 200 + "b:1", "invalid host", id="a host of 401 characters"),
    ],
)
def test_peer_registration_refuses_invalid_zmq_endpoints(endpoint: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        check_peer(endpoint)

    assert str(raised.value) == f"invalid ZMQ endpoint `{endpoint}`: {reason}"


def test_an_endpoint_without_end_is_not_repeated_to_the_client() -> None:
    with pytest.raises(ValueError, match="invalid host") as raised:
        check_peer("tcp://" + "x" * 1_000_000 + ":1")

    assert len(str(raised.value)) < 1000


async def test_an_ipc_peer_of_the_options_is_listened_to(replica: Make, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path / 'peer'}"
    one = replica(peers=(endpoint,))

    assert one.sync.peers == [endpoint]
    with pytest.raises(Malformed, match="unsupported scheme `ipc`"):
        one.sync.add_peer(endpoint)
    one.sync.remove_peer(endpoint)
    assert one.sync.peers == []
