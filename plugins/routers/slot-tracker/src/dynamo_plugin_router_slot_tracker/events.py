"""What replicas tell each other: one message per lifecycle event, as two frames, a topic and a msgpack map."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from dynamo_core.kv import to_signed, to_unsigned

from dynamo_plugin_router_slot_tracker.bodies import U32

TOPIC = b"dynamo.slot-tracker.v1"

FREE: Literal["Free"] = "Free"
PREFILL_COMPLETED: Literal["MarkPrefillCompleted"] = "MarkPrefillCompleted"

U64 = Annotated[int, msgspec.Meta(ge=0)]


class PrefillHint(msgspec.Struct, frozen=True):
    """How much there is to prefill."""

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
        """For a request with these signed hashes."""
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
    """A change of one request. `router_id` is the process that was told of it by its own clients."""

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
