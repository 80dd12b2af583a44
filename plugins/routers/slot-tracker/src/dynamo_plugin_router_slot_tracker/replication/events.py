"""The messages between replicas, as two frames, a topic and a msgpack map."""

from __future__ import annotations

from struct import Struct
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

import msgspec
from dynamo_core.kv import to_signed, to_unsigned

from dynamo_plugin_router_slot_tracker.schemas import U32, Held

TOPIC = b"dynamo.slot-tracker.v1"
#: Only replicas that repair gaps subscribe to these. Neither begins with `TOPIC`, which would reach all others too.
PROGRESS_TOPIC = b"dynamo.slot-tracker.progress.v1"
PARTS_TOPIC = b"dynamo.slot-tracker.parts.v1"

_part_topic = Struct(">QQII")

FREE: Literal["Free"] = "Free"
PREFILL_COMPLETED: Literal["MarkPrefillCompleted"] = "MarkPrefillCompleted"

U64 = Annotated[int, msgspec.Meta(ge=0)]


class PrefillHint(msgspec.Struct, frozen=True):
    """The amount of prefill."""

    initial_effective_prefill_tokens: U64
    expected_prefill_duration: Any = None


class AddRequest(msgspec.Struct, frozen=True):
    """A request that was counted in. Hashes are unsigned here."""

    token_sequence: list[int] | None = None
    track_prefill_tokens: bool = True
    expected_output_tokens: int | None = None
    prefill_load_hint: PrefillHint | None = None

    @classmethod
    def of(cls, hashes: list[int], new_tokens: int) -> AddRequest:
        """Return the event for a request with these signed hashes."""
        hint = PrefillHint(new_tokens) if new_tokens else None
        return cls([to_unsigned(value) for value in hashes], bool(new_tokens), None, hint)

    @property
    def hashes(self) -> list[int]:
        """The signed hashes."""
        return [to_signed(value) for value in self.token_sequence or ()]

    @property
    def new_tokens(self) -> int:
        """The tokens to count as to be prefilled."""
        hint = self.prefill_load_hint
        return hint.initial_effective_prefill_tokens if hint is not None and self.track_prefill_tokens else 0


class Added(msgspec.Struct, frozen=True, rename={"request": "AddRequest"}):
    """The data of an event that counts a request in."""

    request: AddRequest


Data: TypeAlias = Added | Literal["Free", "MarkPrefillCompleted"]


class WorkerRank(msgspec.Struct, frozen=True):
    """A rank of a worker."""

    worker_id: U64
    dp_rank: U32


class Event(msgspec.Struct, frozen=True):
    """A change of one request. `router_id` is the process whose own clients reported it."""

    request_id: str
    worker: WorkerRank
    data: Data
    router_id: U64
    lora_name: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event and its scope. `number` counts the messages of a process from 1, if it numbers them; else it is 0."""

    model_name: str
    tenant_id: str
    block_size: U32
    event: Event
    number: U64 = 0


class Progress(msgspec.Struct, frozen=True):
    """The number of a replica's last event."""

    router_id: U64
    number: U64


class TrackerPart(msgspec.Struct, frozen=True):
    """Requests of one model and tenant."""

    model_name: str
    tenant_id: str
    block_size: U32
    requests: list[Held]


class Part(msgspec.Struct, frozen=True):
    """All requests of a replica's own clients whose ids are in one of `of` buckets, after event `number`.

    It comes after that event and before the next one, so that it is exact for its bucket.
    """

    router_id: U64
    number: U64
    bucket: U32
    of: U32
    trackers: list[TrackerPart]


class PartTopic(NamedTuple):
    """The topic on which a part is published: subscribing to it is the request for the part.

    `of` is 0 where the other replica is to choose the number of buckets. `nonce` makes each topic another one, as the
    library passes on only the first subscription to a topic.
    """

    replica: int
    nonce: int
    bucket: int
    of: int

    def encode(self) -> bytes:
        """Return the topic."""
        return PARTS_TOPIC + _part_topic.pack(*self)

    @classmethod
    def decode(cls, topic: bytes) -> PartTopic | None:
        """Return what a topic asks for; None if it is not one of these."""
        if len(topic) != len(PARTS_TOPIC) + _part_topic.size or not topic.startswith(PARTS_TOPIC):
            return None
        asked = cls(*_part_topic.unpack_from(topic, len(PARTS_TOPIC)))
        return asked if asked.bucket < max(asked.of, 1) else None

    def holds(self, request_id: str) -> bool:
        """Return whether a request is in this bucket."""
        return self.of <= 1 or crc32(request_id.encode()) % self.of == self.bucket
