"""The wire format of a link: numbered fragments of messages. All are msgpack arrays.

The first messages are `Hello` of the caller and `Welcome` of the worker; no message waits for them.
"""

from __future__ import annotations

from typing import Annotated as Constrained
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from dynamo_core.errors import Disconnected

from dynamo_wire.checksums import checksum
from dynamo_wire.messages import (
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
    encode,
)

#: The number of a fragment that says: the link you sent something over is not known here.
UNKNOWN_LINK: Final = -1

#: The number of a fragment that says how many bytes of bodies have arrived in all. One with a reply gets one back.
ARRIVED: Final = -2

#: The number of a fragment that is a probe, and of its answer: the seconds for which the worker's event loop has been
#: blocked.
PROBED: Final = -3

#: More than what a fragment takes beside its body.
FRAGMENT_OVERHEAD: Final = 48

_ALL_BITS: Final = 2**64 - 1

_T = TypeVar("_T")

Size: TypeAlias = Constrained[int, msgspec.Meta(ge=1024, lt=2**32)]


class LinkError(Disconnected):
    """The other end sent a malformed message; the link is unusable."""


class Fragment(msgspec.Struct, array_like=True):
    """The content of one broker message. `body` is an array of messages, or with `more` a part of it.

    `number` counts the fragments of one direction of the link from 0; fragments with a negative number may be lost.
    `check` is a checksum of the fragment and of its place; see `Checksums`. An end whose settings say so sends none.
    """

    number: Constrained[int, msgspec.Meta(ge=PROBED, le=2**63 - 1)]
    more: bool
    body: memoryview
    check: int | None = None


class Damaged(LinkError):
    """A message differs from the one that was sent."""


class Checksums:
    """The checksums of the fragments of one direction of a link. They cover the address and the link, too."""

    __slots__ = ("_seed",)

    def __init__(self, link: str, address: str) -> None:
        self._seed = checksum(f"{link} {address}".encode())

    def of(self, number: int, more: bool, body: bytes | memoryview) -> int:
        """Return the checksum of a fragment."""
        return checksum(body, (self._seed + 2 * number + more) & _ALL_BITS)


class Hello(msgspec.Struct, array_like=True, tag=0):
    """Caller, before anything else: its version, and the largest body it takes."""

    proto: int
    max_message: Size


class Welcome(msgspec.Struct, array_like=True, tag=1):
    """Worker, before anything else: the same."""

    proto: int
    max_message: Size
    #: Whether a thread of the process answers probes.
    probes: bool = False


ToWorker: TypeAlias = Hello | Open | Stop | Pause | Resume | Ack | Ping | Pong | Bye
ToCaller: TypeAlias = Welcome | Accepted | Refused | Rows | Ended | Ping | Pong | Bye

worker_decoder: msgspec.msgpack.Decoder[list[ToWorker]] = msgspec.msgpack.Decoder(list[ToWorker])
caller_decoder: msgspec.msgpack.Decoder[list[ToCaller]] = msgspec.msgpack.Decoder(list[ToCaller])
_count_decoder: msgspec.msgpack.Decoder[int] = msgspec.msgpack.Decoder(
    Constrained[int, msgspec.Meta(ge=0, le=2**63 - 1)]
)
_busy_decoder: msgspec.msgpack.Decoder[float] = msgspec.msgpack.Decoder(Constrained[float, msgspec.Meta(ge=0)])
_fragment_decoder = msgspec.msgpack.Decoder(Fragment)

#: Says that a link is not known.
UNKNOWN_FRAGMENT: Final = encode((UNKNOWN_LINK, False, b""))

#: Asks whether a process lives.
PROBE_FRAGMENT: Final = encode((PROBED, False, b""))


def read_fragment(data: bytes) -> Fragment:
    """Return the fragment in a message of the broker.

    Raises:
        LinkError: there is none.
    """
    try:
        return _fragment_decoder.decode(data)
    except UNREADABLE as error:
        raise LinkError(f"a message of {len(data)} bytes cannot be understood: {error}") from None


def arrived_fragment(count: int) -> bytes:
    """Say that so many bytes have arrived."""
    return encode((ARRIVED, False, encode(count)))


def read_count(body: memoryview) -> int:
    """Return how many bytes have arrived, as the body of such a fragment says.

    Raises:
        LinkError: it does not.
    """
    return _decoded(_count_decoder, body, "a count")


def answer_fragment(busy: float) -> bytes:
    """Answer a probe: the event loop has not run for so many seconds, 0 if it runs."""
    return encode((PROBED, False, encode(busy)))


def read_answer(body: memoryview) -> float:
    """Return the seconds for which an event loop has not run, as the body of such a fragment says.

    Raises:
        LinkError: it does not.
    """
    return _decoded(_busy_decoder, body, "the answer to a probe")


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: memoryview, what: str) -> _T:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise LinkError(f"{what} cannot be understood: {error}") from None


def bundle(messages: list[bytes]) -> bytes:
    """Return encoded messages as the body of a fragment."""
    return encode([msgspec.Raw(message) for message in messages])


def read_bundle(decoder: msgspec.msgpack.Decoder[list[Any]], body: memoryview | bytes) -> list[Any]:
    """Return the messages in a body.

    Raises:
        LinkError: they are not those that this end expects.
    """
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise LinkError(f"a body of {len(body)} bytes cannot be understood: {error}") from None
