"""Replica synchronization over ZMQ.

What this process is told goes out on a PUB socket, what peers tell comes in on a SUB socket. Best effort: nothing
waits, and what finds a queue full is lost, unless both replicas look for gaps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from dynamo_core import DynamoError
from dynamo_core.errors import ConfigError, Unavailable

from dynamo_plugin_router_slot_tracker.errors import Malformed, Unknown
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication.addresses import check_endpoint, check_peer
from dynamo_plugin_router_slot_tracker.replication.events import PROGRESS_TOPIC, TOPIC
from dynamo_plugin_router_slot_tracker.replication.messages import MAX_MESSAGE, Replication
from dynamo_plugin_router_slot_tracker.replication.sockets import SocketReader

log = logging.getLogger(__name__)

#: Messages that wait for one peer, or here to be read; more are dropped.
QUEUE = 100_000
#: Bytes of the longest topic that a peer may subscribe to.
MAX_TOPIC = 4096
#: Most milliseconds between two attempts to connect.
RECONNECT = 2_000
#: Seconds of silence after which the system asks whether a peer's host is still there, and between two of these probes;
#: and how many of them may stay without an answer.
KEEPALIVE = 2
PROBES = 3
#: Seconds between two messages of how far the numbers have come.
PROGRESS = 1.0


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The addresses of replicas. `advertise` is `bind` as peers reach it; with `gaps`, losses are fetched."""

    bind: str
    advertise: str | None = None
    peers: tuple[str, ...] = ()
    gaps: bool = False


class Replicas:
    """The sockets of this process, and who its peers are.

    `started` is called at most once; from then on the process hears its peers. What they tell is applied to `registry`.
    """

    def __init__(self, settings: SyncSettings, registry: Registry) -> None:
        self._settings = settings
        #: What is said over the sockets.
        self.replication = Replication(registry, self, gaps=settings.gaps)
        self._peers: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._subscriber: zmq.Socket[bytes] | None = None
        #: Of what peers tell, and of what they subscribe to.
        self._event_reader: SocketReader | None = None
        self._subscription_reader: SocketReader | None = None
        self._progress: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str:
        """The address that is bound, with the port that was chosen if any was."""
        if self._publisher is None:
            return self._settings.bind
        bound = self._publisher.getsockopt(zmq.LAST_ENDPOINT)
        return bound.rstrip(b"\0").decode() if isinstance(bound, bytes) else self._settings.bind

    @property
    def peers(self) -> list[str]:
        """The peers that this process listens to, sorted."""
        return sorted(self._peers)

    def open(self) -> None:
        """Bind, and connect to the peers of the settings. Their messages wait until `start`.

        Raises:
            ConfigError: an address cannot be used.
        """
        settings = self._settings
        for option, endpoint in (("bind", settings.bind), ("advertise", settings.advertise)):
            if endpoint is not None:
                _checked(f"--replica-sync-{option}", endpoint)
        self._context = zmq.Context()
        self._publisher = self._bound(self._context)
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.setsockopt(zmq.RCVHWM, QUEUE)
        self._subscriber.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._subscriber.setsockopt(zmq.LINGER, 0)
        # A peer whose host has vanished is connected to anew. The library's own heartbeats are no way to notice that: a
        # full queue keeps their answers from being read, and the connection that is then made anew ends the process
        # with a failed assertion (libzmq issue 3937).
        self._subscriber.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._subscriber.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE)
        self._subscriber.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE)
        self._subscriber.setsockopt(zmq.TCP_KEEPALIVE_CNT, PROBES)
        self._subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT)
        for topic in (TOPIC, PROGRESS_TOPIC) if settings.gaps else (TOPIC,):
            self._subscriber.setsockopt(zmq.SUBSCRIBE, topic)
        self._event_reader = SocketReader(self._subscriber, self.replication.receive)
        if settings.gaps:
            self._subscription_reader = SocketReader(self._publisher, self._subscribed)
        for peer in settings.peers:
            try:
                _accepted(check_endpoint, peer)
                self._connect(peer)
            except DynamoError as error:
                self.close()
                raise ConfigError(f"--replica-sync-peers: {error}") from error

    def _bound(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        settings = self._settings
        # To peers both kinds are the same; only the second one shows what they subscribe to.
        publisher = context.socket(zmq.XPUB if settings.gaps else zmq.PUB)
        publisher.setsockopt(zmq.SNDHWM, QUEUE)
        publisher.setsockopt(zmq.LINGER, 0)
        # What comes in here are subscriptions.
        publisher.setsockopt(zmq.MAXMSGSIZE, MAX_TOPIC)
        publisher.setsockopt(zmq.IPV6, int("[" in settings.bind))
        try:
            publisher.bind(settings.bind)
        except zmq.ZMQError as error:
            publisher.close(linger=0)
            self.close()
            raise ConfigError(
                f"--replica-sync-bind: {settings.bind} cannot be bound: {error}; choose a free port of this host"
            ) from error
        return publisher

    def start(self) -> None:
        """Begin to read what peers tell."""
        if self._event_reader is None:
            raise RuntimeError("the sockets are not open")
        self._event_reader.start()
        if self._subscription_reader is not None:
            self._subscription_reader.start()
            self._publish_progress()

    def close(self) -> None:
        """Close the sockets; what waits in them is lost. Safe twice."""
        if self._progress is not None:
            self._progress.cancel()
            self._progress = None
        for reader in (self._event_reader, self._subscription_reader):
            if reader is not None:
                reader.close()
        self._event_reader = self._subscription_reader = None
        for each in (self._publisher, self._subscriber):
            if each is not None:
                each.close(linger=0)
        self._publisher = self._subscriber = None
        context, self._context = self._context, None
        if context is not None:
            context.term()

    # Peers.

    def add_peer(self, endpoint: str) -> bool:
        """Listen to a peer that a client names from now on, whether it is there yet or not; False if it did already.

        Raises:
            Malformed: the endpoint is no TCP one of a peer, or is this process's own.
            Unavailable: the sockets are closed.
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
        self._schedule()
        return True

    def remove_peer(self, endpoint: str) -> None:
        """Listen to a peer no longer.

        Raises:
            Unknown: it is none.
            Unavailable: the sockets are closed.
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
        self._schedule()

    def _open_subscriber(self) -> zmq.Socket[bytes]:
        if self._subscriber is None:
            raise Unavailable("replica peer manager is unavailable")
        return self._subscriber

    # What replication does with the sockets.

    def send(self, topic: bytes, body: bytes) -> bool:
        """Tell the peers that have subscribed; whether there was a socket that took it."""
        if self._publisher is None:
            return False
        try:
            # A peer whose queue is full loses this one; the socket never makes the sender wait.
            self._publisher.send_multipart([topic, body], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("a message was not published: %s", error)
            return False
        if self._subscription_reader is not None:
            self._subscription_reader.schedule()
        return True

    def subscribe(self, topic: bytes) -> None:
        """Ask all peers for a topic."""
        if self._subscriber is not None:
            self._subscriber.setsockopt(zmq.SUBSCRIBE, topic)
            self._schedule()

    def unsubscribe(self, topic: bytes) -> None:
        """Ask them no longer."""
        if self._subscriber is not None:
            self._subscriber.setsockopt(zmq.UNSUBSCRIBE, topic)
            self._schedule()

    def _subscribed(self, frames: list[bytes]) -> None:
        # The first byte says whether a topic is wanted or no longer.
        if frames[0].startswith(b"\x01"):
            self.replication.subscribed(frames[0][1:])

    def _publish_progress(self) -> None:
        self.replication.publish_progress()
        self._progress = asyncio.get_running_loop().call_later(PROGRESS, self._publish_progress)

    def _schedule(self) -> None:
        if self._event_reader is not None:
            self._event_reader.schedule()


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
