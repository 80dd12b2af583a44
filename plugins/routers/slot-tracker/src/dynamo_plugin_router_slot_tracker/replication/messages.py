"""Replication: the messages to replicas, and the handling of theirs, without the sockets."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from dynamo_core.protocol import Unreadable, read

from dynamo_plugin_router_slot_tracker.errors import Refusal, Unknown
from dynamo_plugin_router_slot_tracker.registry import Rank, Registry
from dynamo_plugin_router_slot_tracker.replication.events import (
    FREE,
    PARTS_TOPIC,
    PREFILL_COMPLETED,
    PROGRESS_TOPIC,
    TOPIC,
    Added,
    AddRequest,
    Data,
    Event,
    Message,
    Part,
    PartTopic,
    Progress,
    TrackerPart,
    WorkerRank,
)
from dynamo_plugin_router_slot_tracker.replication.resync import Resync, Subscriptions, SyncCounts
from dynamo_plugin_router_slot_tracker.schemas import Addition, RequestKey

log = logging.getLogger(__name__)

#: Bytes of the largest message: the largest body of a request in another form, and some room.
MAX_MESSAGE = 16 * 1024 * 1024
#: Bytes that a part should not have many more of, and most parts of all there is.
_PART = 256 * 1024
_MAX_PARTS = 65_536
#: Bytes of a request in a part, beside its hashes and its names, and of a hash.
_REQUEST = 160
_HASH = 9


class Wire(Subscriptions, Protocol):
    """The sockets."""

    def send(self, topic: bytes, body: bytes) -> bool:
        """Publish a message without waiting for any subscriber; whether the socket took it."""


class Replication:
    """One end of the replication. Messages are applied to `registry`; with `gaps`, losses are fetched."""

    def __init__(
        self, registry: Registry, wire: Wire, *, gaps: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._wire = wire
        #: Tells this process from all others, and from itself before a restart. Never 0.
        self.identity = secrets.randbits(63) + 1
        self.counts = SyncCounts()
        self.resync = Resync(registry, wire, self.counts, clock) if gaps else None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)
        self._progress_decoder = msgspec.msgpack.Decoder(Progress)
        self._part_decoder = msgspec.msgpack.Decoder(Part)
        self._numbers = 0

    # Out.

    def added(self, addition: Addition, block_size: int) -> None:
        """Record that a client of this process added a request."""
        request = AddRequest.of(addition.sequence_hashes, addition.new_isl_tokens)
        worker = WorkerRank(addition.worker_id, addition.dp_rank)
        self._publish(addition, addition.request_id, worker, block_size, Added(request))

    def prefill_completed(self, key: RequestKey, rank: Rank, block_size: int) -> None:
        """Record that a client of this process completed the prefill of a request."""
        self._publish(key, key.request_id, WorkerRank(rank.worker_id, rank.dp_rank), block_size, PREFILL_COMPLETED)

    def freed(self, key: RequestKey, rank: Rank, block_size: int) -> None:
        """Record that a client of this process freed a request."""
        self._publish(key, key.request_id, WorkerRank(rank.worker_id, rank.dp_rank), block_size, FREE)

    def worker_registered(self) -> None:
        """Record that a worker was registered here."""
        if self.resync is not None:
            self.resync.on_worker_registered()

    def publish_progress(self) -> None:
        """Publish the number of the last event, so that a replica that missed it notices."""
        self._wire.send(PROGRESS_TOPIC, self._encoder.encode(Progress(self.identity, self._numbers)))

    def subscribed(self, topic: bytes) -> None:
        """Handle the subscription of a replica: if it requests a part, the part is published."""
        asked = PartTopic.decode(topic)
        if asked is None or asked.replica != self.identity:
            return
        asked = asked._replace(of=asked.of or self._parts())
        trackers = []
        for (model, tenant), scope in self._registry.scopes():
            if requests := list(self._registry.own((model, tenant), asked.holds)):
                trackers.append(TrackerPart(model, tenant, scope.block_size, requests))
        body = self._encoder.encode(Part(self.identity, self._numbers, asked.bucket, asked.of, trackers))
        if len(body) > MAX_MESSAGE:
            log.warning("a part of %d bytes is too large for a replica, which keeps what it has", len(body))
            return
        self._wire.send(topic, body)

    def _parts(self) -> int:
        """Return into how many parts to divide the state."""
        size = 0
        for (model, tenant), scope in self._registry.scopes():
            names = len(model) + len(tenant)
            for rank in scope.ranks.values():
                for sequence in rank.active:
                    if sequence.request_id not in scope.owners:
                        size += _REQUEST + names + len(sequence.request_id) + _HASH * len(sequence.hashes)
        return min(1 + size // _PART, _MAX_PARTS)

    def _publish(
        self, scope: Addition | RequestKey, request_id: str, worker: WorkerRank, block_size: int, data: Data
    ) -> None:
        number = 0
        if self.resync is not None:
            number = self._numbers = self._numbers + 1
        event = Event(request_id, worker, data, self.identity)
        message = Message(scope.model_name, scope.tenant_id, block_size, event, number)
        if self._wire.send(TOPIC, self._encoder.encode(message)):
            self.counts.published += 1

    # In.

    def receive(self, frames: list[bytes]) -> None:
        """Receive a message of a replica."""
        if len(frames) != 2:
            self.counts.malformed += 1
            return
        topic, body = frames
        try:
            if self.resync is not None and topic == PROGRESS_TOPIC:
                self._receive_progress(self.resync, read(self._progress_decoder, body))
            elif self.resync is not None and topic.startswith(PARTS_TOPIC):
                self._receive_part(self.resync, topic, read(self._part_decoder, body))
            else:
                self._receive_event(read(self._decoder, body))
        except Unreadable:
            self.counts.malformed += 1

    def _receive_progress(self, resync: Resync, progress: Progress) -> None:
        if progress.router_id != self.identity:
            resync.on_progress(progress)

    def _receive_part(self, resync: Resync, topic: bytes, part: Part) -> None:
        asked = PartTopic.decode(topic)
        if asked is not None and asked.replica == part.router_id:
            resync.on_part(asked, part)

    def _receive_event(self, message: Message) -> None:
        source = message.event.router_id
        if source == self.identity:
            return
        if self.resync is not None and message.number and not self.resync.on_event(source, message.number):
            return
        try:
            self._apply(message)
        except Refusal:
            self.counts.dropped += 1
            if self.resync is not None:
                self.resync.on_misfit(source)
        else:
            self.counts.applied += 1

    def _apply(self, message: Message) -> None:
        """Raise a `Refusal` for what does not fit what is here."""
        event, registry = message.event, self._registry
        scope = registry.scope(message.model_name, message.tenant_id)
        where = (event.worker.worker_id, event.worker.dp_rank)
        if scope.block_size != message.block_size or where not in scope.ranks:
            raise Unknown("not the same worker")
        if isinstance(event.data, Added):
            request = event.data.request
            addition = Addition(
                model_name=message.model_name,
                tenant_id=message.tenant_id,
                request_id=event.request_id,
                worker_id=where[0],
                dp_rank=where[1],
                sequence_hashes=request.hashes,
                new_isl_tokens=request.new_tokens,
            )
            registry.add(addition, owner=event.router_id)
            return
        holder = scope.requests.get(event.request_id)
        if holder is None or (holder.worker_id, holder.dp_rank) != where:
            raise Unknown("not the same request")
        key = RequestKey(model_name=message.model_name, tenant_id=message.tenant_id, request_id=event.request_id)
        if event.data == FREE:
            registry.free(key)
        else:
            registry.complete_prefill(key)
