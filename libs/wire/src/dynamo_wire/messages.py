"""The messages of calls between two processes: msgpack arrays that begin with a tag. Fields are only ever appended."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated as Constrained
from typing import Any, Final, TypeAlias

import msgspec
from dynamo_core import Endpoint
from dynamo_core.errors import WireError
from dynamo_core.protocol import ACCEPTED_PROTOS as ACCEPTED_PROTOS
from dynamo_core.protocol import UNREADABLE as UNREADABLE
from dynamo_core.protocol import Annotated

StreamId: TypeAlias = Constrained[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Open(msgspec.Struct, array_like=True, tag=10):
    """Caller: a call."""

    sid: StreamId
    instance_id: int
    endpoint: str
    request_id: str
    attempt_id: str
    metadata: dict[str, str]
    request: msgspec.Raw
    #: How many items the caller lets wait before they are sent; see `EngineContext.coalesce`.
    coalesce: int = 1


class Stop(msgspec.Struct, array_like=True, tag=11):
    """Caller: ends the stream. With `kill` the caller reads nothing more."""

    sid: StreamId
    kill: bool


class Pause(msgspec.Struct, array_like=True, tag=12):
    """Caller: pauses the rows of this stream."""

    sid: StreamId


class Resume(msgspec.Struct, array_like=True, tag=13):
    """Caller: resumes the rows of this stream."""

    sid: StreamId


class Ack(msgspec.Struct, array_like=True, tag=14):
    """Caller: its readers have received `frames` more frames of rows, and the worker may send the next."""

    frames: Constrained[int, msgspec.Meta(ge=1)]


class Accepted(msgspec.Struct, array_like=True, tag=20):
    """Worker: the handler accepted the call."""

    sid: StreamId


class Refused(msgspec.Struct, array_like=True, tag=21):
    """Worker: the handler refused the call; nothing follows."""

    sid: StreamId
    error: WireError


class Row(msgspec.Struct, array_like=True, gc=False):
    """One item of one stream. `number` counts the rows of the stream from 0.

    `what` is a list of token ids for an output that has nothing else, an event, or None, and then the item follows.
    """

    sid: int
    number: int
    what: list[int] | Annotated[Any] | None
    item: msgspec.Raw = msgspec.Raw()


class Rows(msgspec.Struct, array_like=True, tag=22):
    """Worker: the rows of all its streams in one turn of the event loop. With `ask` it expects an `Ack`."""

    rows: list[Row]
    ask: bool = False


#: `Rows` is written as a plain tuple of this, a list of tuples, and whether to ask.
ROWS_TAG: Final = 22


class Ended(msgspec.Struct, array_like=True, tag=23):
    """Worker: the handler has ended. With `error` it was cut off, and the stream is incomplete."""

    sid: StreamId
    error: WireError | None = None


class Ping(msgspec.Struct, array_like=True, tag=40):
    """Either end: requests a sign of life."""


class Pong(msgspec.Struct, array_like=True, tag=41):
    """Either end: the answer to `Ping`."""


class Bye(msgspec.Struct, array_like=True, tag=42):
    """Either end: closes the link, and says why."""

    error: WireError


encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=128)
def item_decoder(endpoint: Endpoint) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of an endpoint's items."""
    return msgspec.msgpack.Decoder(endpoint.item_type)


def proto_mismatch(theirs: int) -> str:
    """Return the refusal for an end whose version is not understood."""
    ours = " and ".join(str(number) for number in ACCEPTED_PROTOS)
    return f"protocol {theirs} is not understood here, only {ours}: upgrade the older of the two processes"
