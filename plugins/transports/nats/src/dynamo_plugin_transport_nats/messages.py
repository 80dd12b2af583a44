"""What travels over a link: pieces, and in them messages. All are msgpack arrays; fields are only ever appended.

A link is what one caller and one worker have between them, as a connection would be. Its pieces are numbered in each
direction, so that whatever the servers lose, double or reorder is noticed. The first messages are `Hello` of the caller
and `Welcome` of the worker, for which nobody waits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated as Constrained
from typing import Any, Final, TypeAlias

import msgspec
from dynamo_core.contracts.call import Endpoint
from dynamo_core.errors import Disconnected, WireError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.records import PROTO

#: Versions this process understands.
ACCEPTED_PROTOS: Final = (PROTO, PROTO - 1)

#: The number of a piece that says: the link you sent something over is not known here.
UNKNOWN_LINK: Final = -1

#: More than what a piece takes beside its body.
PIECE_OVERHEAD: Final = 32

StreamId: TypeAlias = Constrained[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Size: TypeAlias = Constrained[int, msgspec.Meta(ge=1024, lt=2**32)]


class LinkError(Disconnected):
    """The other end sent what cannot be understood; the link is of no more use."""


class Piece(msgspec.Struct, array_like=True):
    """What one message of the servers carries. `body` is an array of messages, or with `more` a part of it.

    `number` counts the pieces of one direction of the link from 0.
    """

    number: Constrained[int, msgspec.Meta(ge=UNKNOWN_LINK, le=2**63 - 1)]
    more: bool
    body: memoryview


class Hello(msgspec.Struct, array_like=True, tag=0):
    """Caller, before anything else: its version, and the largest body it takes."""

    proto: int
    max_message: Size


class Welcome(msgspec.Struct, array_like=True, tag=1):
    """Worker, before anything else: the same."""

    proto: int
    max_message: Size


class Open(msgspec.Struct, array_like=True, tag=10):
    """Caller: a call."""

    sid: StreamId
    instance_id: int
    endpoint: str
    request_id: str
    attempt_id: str
    metadata: dict[str, str]
    request: msgspec.Raw
    #: How many items the caller lets wait before they are sent; see `EngineContext.gather`.
    gather: int = 1


class Stop(msgspec.Struct, array_like=True, tag=11):
    """Caller: the stream should end. With `kill` nobody listens any more."""

    sid: StreamId
    kill: bool


class Pause(msgspec.Struct, array_like=True, tag=12):
    """Caller: no more rows of this stream for now."""

    sid: StreamId


class Resume(msgspec.Struct, array_like=True, tag=13):
    """Caller: takes `Pause` back."""

    sid: StreamId


class Taken(msgspec.Struct, array_like=True, tag=14):
    """Caller: the readers have been given so many more portions of rows; the next may come."""

    portions: Constrained[int, msgspec.Meta(ge=1)]


class Accepted(msgspec.Struct, array_like=True, tag=20):
    """Worker: the handler took the call."""

    sid: StreamId


class Refused(msgspec.Struct, array_like=True, tag=21):
    """Worker: the handler did not take the call; nothing follows."""

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
    """Worker: all that its streams had to say in one turn of its loop. With `ask` it wants to hear `Taken`."""

    rows: list[Row]
    ask: bool = False


#: `Rows` is written as a plain tuple of this, a list of tuples, and whether to ask.
ROWS_TAG: Final = 22


class Ended(msgspec.Struct, array_like=True, tag=23):
    """Worker: the handler has run to its end. With `error` it was cut off, and the stream is not complete."""

    sid: StreamId
    error: WireError | None = None


class Ping(msgspec.Struct, array_like=True, tag=40):
    """Either: are you there? Sent so that the server answers if nobody is."""


class Pong(msgspec.Struct, array_like=True, tag=41):
    """Either: yes."""


class Bye(msgspec.Struct, array_like=True, tag=42):
    """Either: the link is over; why."""

    error: WireError


ToWorker: TypeAlias = Hello | Open | Stop | Pause | Resume | Taken | Ping | Pong | Bye
ToCaller: TypeAlias = Welcome | Accepted | Refused | Rows | Ended | Ping | Pong | Bye

encode = msgspec.msgpack.Encoder().encode
worker_decoder: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
caller_decoder: msgspec.msgpack.Decoder[list[ToCaller]] = msgspec.msgpack.Decoder(list[ToCaller])
_piece_decoder = msgspec.msgpack.Decoder(Piece)

#: What msgspec raises on bytes it cannot make into the wanted type.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)

#: Says that a link is not known.
UNKNOWN_PIECE: Final = encode((UNKNOWN_LINK, False, b""))


def read_piece(data: bytes) -> Piece:
    """The piece in a message of the servers.

    Raises:
        LinkError: there is none.
    """
    try:
        return _piece_decoder.decode(data)
    except UNREADABLE as error:
        raise LinkError(f"a message of {len(data)} bytes cannot be understood: {error}") from None


def bundle(messages: list[bytes]) -> bytes:
    """Encoded messages as the body of a piece."""
    return encode([msgspec.Raw(message) for message in messages])


def read_bundle(decoder: msgspec.msgpack.Decoder[list[Any]], body: memoryview | bytes) -> list[Any]:
    """The messages in a body.

    Raises:
        LinkError: they are not those that this end expects.
    """
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise LinkError(f"a body of {len(body)} bytes cannot be understood: {error}") from None


@lru_cache(maxsize=128)
def item_decoder(endpoint: Endpoint) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of an endpoint's items."""
    return msgspec.msgpack.Decoder(endpoint.item_type)


def proto_mismatch(theirs: int) -> str:
    """What to say to an end whose version is not understood."""
    ours = " and ".join(str(number) for number in ACCEPTED_PROTOS)
    return f"protocol {theirs} is not understood here, only {ours}: upgrade the older of the two processes"
