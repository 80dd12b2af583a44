"""What travels in frames: msgpack arrays whose first entry says which message it is. Fields are only ever appended.

The handshake: caller `Hello`, listener `Challenge`, caller `Proof`, listener `Ready`. Then calls and subscriptions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated as Constrained
from typing import Any, Final, TypeAlias

import msgspec
from dynamo_core.contracts.call import Endpoint
from dynamo_core.errors import WireError
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.reading import UNREADABLE as UNREADABLE
from dynamo_core.protocol.records import PROTO

from dynamo_plugin_transport_tcp.address import NONCE_BYTES
from dynamo_plugin_transport_tcp.frames import FrameError, frame
from dynamo_plugin_transport_tcp.security import CHALLENGE_BYTES

MAGIC: Final = b"dynamo-tcp"

#: Versions this process understands.
ACCEPTED_PROTOS: Final = (PROTO, PROTO - 1)

#: The largest frame before the handshake is over: strangers get no more.
HANDSHAKE_LIMIT: Final = 4096

#: Bytes of the number that the answer to a probe belongs to.
PROBE_BYTES: Final = 16

StreamId: TypeAlias = Constrained[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Challenge32: TypeAlias = Constrained[bytes, msgspec.Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
Nonce: TypeAlias = Constrained[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
FrameLimit: TypeAlias = Constrained[int, msgspec.Meta(ge=HANDSHAKE_LIMIT, lt=2**32)]


class Hello(msgspec.Struct, array_like=True, tag=0):
    """Caller: which process it wants to talk to, and the largest frame it takes."""

    magic: bytes
    proto: int
    wanted: Nonce
    challenge: Challenge32
    max_frame: FrameLimit
    #: Whether it wants frames to have checksums.
    checksums: bool = False


class Challenge(msgspec.Struct, array_like=True, tag=1):
    """Listener: it is the one. `secret` says whether the caller must prove that it knows one."""

    proto: int
    challenge: Challenge32
    max_frame: FrameLimit
    secret: bool
    #: Whether a thread of the process answers probes; see `probes.py`.
    probes: bool = False
    #: Whether frames have checksums once the handshake is over, in both directions.
    checksums: bool = False


class Proof(msgspec.Struct, array_like=True, tag=2):
    """Caller: the proof, empty without a secret."""

    proof: bytes
    #: A checksum of the bodies so far, in both directions; empty from the version before.
    transcript: bytes = b""


class Ready(msgspec.Struct, array_like=True, tag=3):
    """Listener: the proof of its own; calls may begin."""

    proof: bytes
    #: As in `Proof`, which it covers, too.
    transcript: bytes = b""


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
    """Caller: the readers have been given so many more frames of rows; the next may come."""

    frames: Constrained[int, msgspec.Meta(ge=1)]


class Accepted(msgspec.Struct, array_like=True, tag=20):
    """Listener: the handler took the call."""

    sid: StreamId


class Refused(msgspec.Struct, array_like=True, tag=21):
    """Listener: the handler did not take the call; nothing follows."""

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
    """Listener: all that its streams had to say in one turn of its loop. With `ask` it wants to hear `Taken`."""

    rows: list[Row]
    ask: bool = False


#: `Rows` is written as a plain tuple of this, a list of tuples, and whether to ask.
ROWS_TAG: Final = 22


class Ended(msgspec.Struct, array_like=True, tag=23):
    """Listener: the handler has run to its end. With `error` it was cut off, and the stream is not complete."""

    sid: StreamId
    error: WireError | None = None


class Subscribe(msgspec.Struct, array_like=True, tag=30):
    """Caller: wants the events of one publisher."""

    sid: StreamId
    subject: str
    source: int


class Unsubscribe(msgspec.Struct, array_like=True, tag=31):
    """Caller: wants no more of them."""

    sid: StreamId


class Unsubscribed(msgspec.Struct, array_like=True, tag=32):
    """Listener: there is no such publisher, or no longer."""

    sid: StreamId


class Events(msgspec.Struct, array_like=True, tag=33):
    """Listener: events as (subscription, number, payload)."""

    events: list[tuple[int, int, bytes]]


#: `Events` is written as a plain tuple, too.
EVENTS_TAG: Final = 33


class Ping(msgspec.Struct, array_like=True, tag=40):
    """Either: are you there?"""


class Pong(msgspec.Struct, array_like=True, tag=41):
    """Either: yes."""


class Bye(msgspec.Struct, array_like=True, tag=42):
    """Either: the connection is being closed; why."""

    error: WireError


class Probe(msgspec.Struct, array_like=True, tag=50):
    """Caller, on a connection of its own: does the process live? See `probes.py`."""

    magic: bytes
    challenge: Constrained[bytes, msgspec.Meta(min_length=PROBE_BYTES, max_length=PROBE_BYTES)]
    proof: bytes


class Alive(msgspec.Struct, array_like=True, tag=51):
    """The answer: its event loop has not run for so many seconds, 0 if it runs."""

    busy: Constrained[float, msgspec.Meta(ge=0)]
    proof: bytes


ToListener: TypeAlias = (
    Hello | Proof | Open | Stop | Pause | Resume | Taken | Subscribe | Unsubscribe | Ping | Pong | Bye
)
ToCaller: TypeAlias = Challenge | Ready | Accepted | Refused | Rows | Ended | Unsubscribed | Events | Ping | Pong | Bye

encode = msgspec.msgpack.Encoder().encode
listener_decoder: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
caller_decoder: msgspec.msgpack.Decoder[ToCaller] = msgspec.msgpack.Decoder(ToCaller)


def pack(message: Any) -> bytes:
    """A message as a frame."""
    return frame(encode(message))


def read(decoder: msgspec.msgpack.Decoder[Any], body: memoryview) -> Any:
    """The message in a body.

    Raises:
        FrameError: there is none that this end expects.
    """
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise FrameError(f"a frame of {len(body)} bytes cannot be understood: {error}") from None


@lru_cache(maxsize=128)
def item_decoder(endpoint: Endpoint) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of an endpoint's items."""
    return msgspec.msgpack.Decoder(endpoint.item_type)


def proto_mismatch(theirs: int) -> str:
    """What to say to an end whose version is not understood."""
    ours = " and ".join(str(number) for number in ACCEPTED_PROTOS)
    return f"protocol {theirs} is not understood here, only {ours}: upgrade the older of the two processes"
