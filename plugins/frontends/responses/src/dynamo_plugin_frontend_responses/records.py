"""The records of this API in a response store: responses, conversations, and their items.

The id of an item names the record that holds it, so that an item can be found by its id alone: the items of response
``resp_X`` are ``msg_X-0``, ``fc_X-1`` and so on, those of its input ``msg_X-i0``; those that were put into conversation
``conv_Y`` are ``msg_Y.3-0``, where 3 is the number of the batch. An id is no secret: owners see their own records only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from dynamo_core.protocol import Unreadable, read

from dynamo_plugin_frontend_responses.config import MOST_TURNS
from dynamo_plugin_frontend_responses.render import ID_PREFIX
from dynamo_plugin_frontend_responses.requests import CALL, CUSTOM_CALL, MESSAGE, REASONING, REFERENCE

log = logging.getLogger(__name__)

CONVERSATION_PREFIX = "conv_"
#: Ancestors that a response names, at most; a chain is read in steps of as many.
NEAR = 16

_PREFIXES = {MESSAGE: "msg_", REASONING: "rs_", CALL: "fc_", CUSTOM_CALL: "ctc_"}

Item = dict[str, Any]
#: How many batches a conversation has: at most the turns that any setting lets a request go on from.
Batches = Annotated[int, msgspec.Meta(ge=0, le=MOST_TURNS)]


class Turn(msgspec.Struct, omit_defaults=True):
    """A response, and the client's input for it. `near` are ancestors, the oldest first, the last its parent.

    The first of a full `near` names those before it: so a chain is kept in space that grows as the chain does. A turn
    of a conversation has no ancestors: `batches` says how much of the conversation came before it.
    """

    response: dict[str, Any]
    input: list[Item]
    near: list[str] = []
    conversation: str | None = None
    batches: Batches = 0

    def __post_init__(self) -> None:
        output = self.response.get("output")
        if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
            raise ValueError("the output of the response is no list of items")

    def items(self) -> list[Item]:
        """Return what the turn adds to a conversation."""
        return [*self.input, *self.response["output"]]


class Conversation(msgspec.Struct):
    """A conversation. Its items are in batches, each a record of its own."""

    id: str
    created_at: int
    metadata: dict[str, str | None]
    batches: Batches = 0

    def told(self) -> dict[str, Any]:
        """Return the conversation as clients see it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": self.metadata,
        }

    def keys(self) -> list[str]:
        """Return the keys of its batches, the oldest first."""
        return [batch_key(self.id, number) for number in range(self.batches)]


class Batch(msgspec.Struct):
    """Items that were added to a conversation together."""

    items: list[Item]


RecordT = TypeVar("RecordT", Turn, Conversation, Batch)

_decoders: Mapping[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Turn, Conversation, Batch)
}
_encoder = msgspec.json.Encoder()


def encoded(record: Turn | Conversation | Batch) -> bytes:
    """Return the record as a store keeps it."""
    return _encoder.encode(record)


def decoded(kind: type[RecordT], key: str, data: bytes | None) -> RecordT | None:
    """Return a record; None if there is none, or what there is cannot be read, as after a change of its form."""
    if data is None:
        return None
    try:
        record: RecordT = read(_decoders[kind], data)
    except Unreadable as error:
        log.info("the record %s of the response store cannot be read: %s", key, error)
        return None
    return record


def batch_key(conversation: str, number: int) -> str:
    """Return the key of a batch."""
    return f"{conversation}.{number}"


def record_of_item(id: str) -> str:
    """Return the key of the record that holds an item; of an id that is not ours, one that no record has."""
    place = id.partition("_")[2].rpartition("-")[0]
    return f"{CONVERSATION_PREFIX if '.' in place else ID_PREFIX}{place}"


def items_of_record(key: str, data: bytes | None) -> Sequence[Item]:
    """Return the items that a record holds."""
    if key.startswith(CONVERSATION_PREFIX):
        batch = decoded(Batch, key, data)
        return () if batch is None else batch.items
    turn = decoded(Turn, key, data)
    return () if turn is None else turn.items()


def is_reference(item: Any) -> bool:
    """Return whether an item only names another one."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == REFERENCE or (kind is None and item.get("role") is None and isinstance(item.get("id"), str))


def as_items(given: str | Sequence[Item]) -> list[Item]:
    """Return an input as a list."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)


def with_ids(items: Sequence[Item], place: str) -> list[Item]:
    """Return items as they are kept: each has an id, and a message is a list of parts.

    References stay what they are.
    """
    return [item if is_reference(item) else _kept(item, f"{place}{index}") for index, item in enumerate(items)]


def _kept(item: Item, place: str) -> Item:
    kind = item.get("type") or MESSAGE
    content = item.get("content")
    kept: Item = {"id": f"{_PREFIXES.get(kind, 'item_')}{place}", "status": "completed"}
    kept |= {name: value for name, value in item.items() if value is not None} | {"type": kind}
    if kind == MESSAGE and isinstance(content, str):
        if item.get("role") == "assistant":
            kept["content"] = [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
        else:
            kept["content"] = [{"type": "input_text", "text": content}]
    return kept
