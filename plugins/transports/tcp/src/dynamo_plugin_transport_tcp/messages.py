"""The messages in frames: msgpack arrays that begin with their kind. Fields are only ever appended.

The handshake: caller `Hello`, listener `Challenge`, caller `Proof`, listener `Ready`. Then calls, whose messages all
transports share, and subscriptions.
"""

from __future__ import annotations

from typing import Annotated as Constrained
from typing import Any, Final, TypeAlias

import msgspec
from dynamo_wire import (
    UNREADABLE,
    Accepted,
    Ack,
    Bye,
    Ended,
    Open,
    Pause,
    Ping,
    Pong,
    Refused,
    Resume,
    Rows,
    Stop,
    StreamId,
    encode,
)

from dynamo_plugin_transport_tcp.address import NONCE_BYTES
from dynamo_plugin_transport_tcp.frames import FrameError, frame
from dynamo_plugin_transport_tcp.security import CHALLENGE_BYTES

MAGIC: Final = b"dynamo-tcp"

#: The largest frame before the handshake is over, when the other end is not yet known.
HANDSHAKE_LIMIT: Final = 4096

#: Bytes of the number that the answer to a probe belongs to.
PROBE_BYTES: Final = 16

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


class Probe(msgspec.Struct, array_like=True, tag=50):
    """Caller, on a connection of its own: does the process live? See `probes.py`."""

    magic: bytes
    challenge: Constrained[bytes, msgspec.Meta(min_length=PROBE_BYTES, max_length=PROBE_BYTES)]
    proof: bytes


class Alive(msgspec.Struct, array_like=True, tag=51):
    """The answer: its event loop has not run for some seconds, 0 if it runs."""

    busy: Constrained[float, msgspec.Meta(ge=0)]
    proof: bytes


ToListener: TypeAlias = Hello | Proof | Open | Stop | Pause | Resume | Ack | Subscribe | Unsubscribe | Ping | Pong | Bye
ToCaller: TypeAlias = Challenge | Ready | Accepted | Refused | Rows | Ended | Unsubscribed | Events | Ping | Pong | Bye

listener_decoder: msgspec.msgpack.Decoder[ToListener] = msgspec.msgpack.Decoder(ToListener)
caller_decoder: msgspec.msgpack.Decoder[ToCaller] = msgspec.msgpack.Decoder(ToCaller)


def pack(message: Any) -> bytes:
    """Return a message as a frame."""
    return frame(encode(message))


def read(decoder: msgspec.msgpack.Decoder[Any], body: memoryview) -> Any:
    """Return the message in a body.

    Raises:
        FrameError: there is none that this end expects.
    """
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise FrameError(f"a frame of {len(body)} bytes cannot be understood: {error}") from None
