"""Replica synchronization over ZMQ: what this process is told goes out on a PUB socket, what peers tell comes in on a
SUB socket. Best effort: nothing waits, nothing is repeated, and what finds a queue full is lost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq
from dynamo_core.errors import ConfigError

from dynamo_plugin_router_slot_tracker.addresses import check_endpoint, check_peer
from dynamo_plugin_router_slot_tracker.bodies import Addition, RequestKey
from dynamo_plugin_router_slot_tracker.events import (
    FREE,
    PREFILL_COMPLETED,
    TOPIC,
    Added,
    AddRequest,
    Data,
    Event,
    Message,
    WorkerRank,
)
from dynamo_plugin_router_slot_tracker.refusals import Malformed, Refusal, Unknown, Unusable
from dynamo_plugin_router_slot_tracker.registry import Rank, Registry

log = logging.getLogger(__name__)

#: Messages that wait for one peer, or here to be read; more are dropped.
QUEUE = 100_000
#: Bytes of the largest message: the largest body of a request in another form, and some room.
MAX_MESSAGE = 16 * 1024 * 1024
#: Milliseconds between two signs of life of a connection, and most of them between two attempts to connect.
HEARTBEAT = 2_000
#: Messages that are read in one turn of the event loop.
BATCH = 256
#: Processes whose numbering is remembered. A peer that was restarted is another process.
MAX_SOURCES = 1024


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Where replicas meet. `advertise` is `bind` as peers reach it; `gaps` numbers messages and looks for lost ones."""

    bind: str
    advertise: str | None = None
    peers: tuple[str, ...] = ()
    gaps: bool = False


@dataclass(slots=True)
class SyncCounts:
    """What has happened. `dropped` are events of others for what is not here; `malformed` are no events at all."""

    published: int = 0
    applied: int = 0
    dropped: int = 0
    malformed: int = 0
    missed: int = 0


class Replicas:
    """The sockets of this process, and who its peers are.

    `started` is called at most once; from then on the process hears its peers. What they tell is applied to `registry`.
    """

    def __init__(self, settings: SyncSettings, registry: Registry) -> None:
        self._settings = settings
        self._registry = registry
        #: Tells this process from all others, and from itself before a restart. Never 0.
        self.identity = secrets.randbits(63) + 1
        self.counts = SyncCounts()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._numbers = 0
        #: The last number of each process that numbers its messages; the one heard last is the last.
        self._heard: OrderedDict[int, int] = OrderedDict()
        self._peers: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._subscriber: zmq.Socket[bytes] | None = None
        #: Ends the reading.
        self._reading: Callable[[], object] | None = None

    @property
    def endpoint(self) -> str:
        """The address that is bound, with the port that was chosen if any was."""
        if self._publisher is None:
            return self._settings.bind
        bound = self._publisher.getsockopt(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else self._settings.bind

    @property
    def peers(self) -> list[str]:
        """Those that this process listens to, sorted."""
        return sorted(self._peers)

    def open(self) -> None:
        """Binds, and connects to the peers of the settings. Their messages wait until `start`.

        Raises:
            ConfigError: an address cannot be used.
        """
        settings = self._settings
        for option, endpoint in (("bind", settings.bind), ("advertise", settings.advertise)):
            if endpoint is not None:
                _checked(f"--replica-sync-{option}", endpoint)
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, QUEUE)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.setsockopt(zmq.IPV6, int("[" in settings.bind))
        try:
            self._publisher.bind(settings.bind)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"--replica-sync-bind: {settings.bind} cannot be bound: {error}; choose a free port of this host"
            ) from error
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, QUEUE)
        self._subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._subscriber.setsockopt(zmq.LINGER, 0)
        # A peer whose host has vanished is connected to anew.
        self._subscriber.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        self._subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, HEARTBEAT)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, TOPIC)
        for peer in settings.peers:
            try:
                _accepted(check_endpoint, peer)
                self._connect(peer)
            except Refusal as refusal:
                self.close()
                raise ConfigError(f"--replica-sync-peers: {refusal.text}") from refusal

    def start(self) -> None:
        """Begins to read what peers tell."""
        if self._subscriber is None:
            raise RuntimeError("the sockets are not open")
        loop = asyncio.get_running_loop()
        descriptor = self._subscriber.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)  # noqa: S101 - the library's type is that of all options
        loop.add_reader(descriptor, self._read)
        self._reading = partial(loop.remove_reader, descriptor)
        self._look_again()

    def close(self) -> None:
        """Closes the sockets; what waits in them is lost. Safe twice."""
        if self._reading is not None:
            self._reading()
            self._reading = None
        for each in (self._publisher, self._subscriber):
            if each is not None:
                each.close(linger=0)
        self._publisher = self._subscriber = None
        context, self._context = self._context, None
        if context is not None:
            context.term()

    # Peers.

    def add_peer(self, endpoint: str) -> bool:
        """Listens to a peer that a client names from now on, whether it is there yet or not; False if it did already.

        Raises:
            Malformed: the endpoint is no TCP one of a peer, or is this process's own.
            Unusable: the sockets are closed.
        """
        _accepted(check_peer, endpoint)
        return self._connect(endpoint)

    def _connect(self, endpoint: str) -> bool:
        if endpoint == self._settings.advertise:
            raise Malformed("peer endpoint matches this replica's advertised endpoint")
        subscriber = self._open_subscriber()
        if endpoint in self._peers:
            return False
        try:
            subscriber.setsockopt(zmq.IPV6, int("[" in endpoint))
            subscriber.connect(endpoint)
        except zmq.ZMQError as error:
            raise Malformed(f"failed to register replica peer `{endpoint}`") from error
        self._peers.add(endpoint)
        self._look_again()
        return True

    def remove_peer(self, endpoint: str) -> None:
        """Listens to a peer no longer.

        Raises:
            Unknown: it is none.
            Unusable: the sockets are closed.
        """
        subscriber = self._open_subscriber()
        if endpoint not in self._peers:
            raise Unknown("peer not found")
        self._peers.discard(endpoint)
        try:
            subscriber.disconnect(endpoint)
        except zmq.ZMQError as error:
            # The library gave it up by itself.
            log.debug("peer %s was not connected: %s", endpoint, error)
        self._look_again()

    # Out.

    def added(self, addition: Addition, block_size: int) -> None:
        """A client of this process added a request."""
        request = AddRequest.of(addition.sequence_hashes, addition.new_isl_tokens)
        worker = WorkerRank(addition.worker_id, addition.dp_rank)
        self._publish(addition, addition.request_id, worker, block_size, Added(request))

    def prefill_completed(self, key: RequestKey, rank: Rank, block_size: int) -> None:
        """A client of this process completed the prefill of a request."""
        self._publish(key, key.request_id, WorkerRank(rank.worker_id, rank.dp_rank), block_size, PREFILL_COMPLETED)

    def freed(self, key: RequestKey, rank: Rank, block_size: int) -> None:
        """A client of this process freed a request."""
        self._publish(key, key.request_id, WorkerRank(rank.worker_id, rank.dp_rank), block_size, FREE)

    def _publish(
        self, scope: Addition | RequestKey, request_id: str, worker: WorkerRank, block_size: int, data: Data
    ) -> None:
        if self._publisher is None:
            return
        number = 0
        if self._settings.gaps:
            number = self._numbers = self._numbers + 1
        event = Event(request_id, worker, data, self.identity)
        message = Message(scope.model_name, scope.tenant_id, block_size, event, number)
        try:
            # A peer whose queue is full loses this one; the socket never makes the sender wait.
            self._publisher.send_multipart([TOPIC, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("an event was not published: %s", error)
            return
        self.counts.published += 1

    # In.

    def _look_again(self) -> None:
        """Connecting and disconnecting may swallow the sign that messages wait: the descriptor tells changes only."""
        if self._reading is not None:
            asyncio.get_running_loop().call_soon(self._read)

    def _read(self) -> None:
        subscriber = self._subscriber
        if subscriber is None or self._reading is None:
            return
        for _ in range(BATCH):
            try:
                frames = subscriber.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                log.warning("reading from replicas failed: %s", error)
                return
            self._take(frames)
        # The rest waits for its turn, so that HTTP gets its own.
        self._look_again()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.counts.malformed += 1
            return
        try:
            message = self._decoder.decode(frames[1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.counts.malformed += 1
            return
        if message.event.router_id == self.identity:
            return
        if self._settings.gaps and message.number:
            self._check_number(message.event.router_id, message.number)
        try:
            self._apply(message)
        except Refusal:
            self.counts.dropped += 1
        else:
            self.counts.applied += 1

    def _apply(self, message: Message) -> None:
        """Raises a `Refusal` for what does not fit what is here."""
        event, registry = message.event, self._registry
        scope = registry.scope(message.model_name, message.tenant_id)
        where = (event.worker.worker_id, event.worker.dp_rank)
        if scope.block_size != message.block_size or where not in scope.ranks:
            raise Unknown("not the same worker")
        if isinstance(event.data, Added):
            request = event.data.request
            registry.add(
                Addition(
                    model_name=message.model_name,
                    tenant_id=message.tenant_id,
                    request_id=event.request_id,
                    worker_id=where[0],
                    dp_rank=where[1],
                    sequence_hashes=request.hashes,
                    new_isl_tokens=request.new_tokens,
                )
            )
            return
        holder = scope.requests.get(event.request_id)
        if holder is None or (holder.worker_id, holder.dp_rank) != where:
            raise Unknown("not the same request")
        key = RequestKey(model_name=message.model_name, tenant_id=message.tenant_id, request_id=event.request_id)
        if event.data == FREE:
            registry.free(key)
        else:
            registry.complete_prefill(key)

    def _check_number(self, source: int, number: int) -> None:
        last = self._heard.pop(source, None)
        self._heard[source] = number
        if len(self._heard) > MAX_SOURCES:
            self._heard.popitem(last=False)
        if last is not None and number > last + 1:
            missing = number - last - 1
            self.counts.missed += missing
            log.warning(
                "%d events of replica %016x were lost; its loads are off until those requests expire", missing, source
            )

    def _open_subscriber(self) -> zmq.Socket[bytes]:
        if self._subscriber is None:
            raise Unusable("replica peer manager is unavailable")
        return self._subscriber


def _accepted(check: Callable[[str], None], endpoint: str) -> None:
    try:
        check(endpoint)
    except ValueError as error:
        raise Malformed(str(error)) from error


def _checked(option: str, endpoint: str) -> None:
    try:
        check_endpoint(endpoint)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}; give one such as tcp://*:8092") from error
