"""What the tests know of what goes to a worker and comes from it: enough to choose a place for a fault."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Set
from typing import Any

import msgspec
from dynamo_core.protocol.annotated import COMPLETE_FINAL
from dynamo_testing.faults import Direction, Passing
from dynamo_wire import ROWS_TAG, Ack, Open

_decode = msgspec.msgpack.Decoder().decode

OPEN, ACK = (kind.__struct_config__.tag for kind in (Open, Ack))

#: The key of a seed in msgpack, how numbers of one, two and four bytes begin, and all that together, less a byte.
_SEED = b"\xa4seed"
_WIDTHS = {0xCC: 1, 0xCD: 2, 0xCE: 4}
_LONGEST = len(_SEED) + 1 + 4 - 1


def _message(body: bytes) -> Any:
    """Return what a frame of the transport tcp says; after the handshake a checksum comes before it."""
    checked = int.from_bytes(body[:4], "big") ^ 0xFFFFFFFF == len(body)
    return _decode(body[12:] if checked else body)


def tagged(tag: Any) -> Callable[[bytes], bool]:
    """Return whether a frame is this message."""
    return lambda body: bool(_message(body)[0] == tag)


is_rows = tagged(ROWS_TAG)
is_taken = tagged(ACK)


def is_running(body: bytes) -> bool:
    """Return whether a frame carries a row that is neither the first of its stream nor its last."""
    message = _message(body)
    return bool(message[0] == ROWS_TAG and any(row[1] > 0 and isinstance(row[2], list) for row in message[1]))


def is_last(body: bytes) -> bool:
    """Return whether a frame carries the flag that closes a stream."""
    message = _message(body)
    return bool(
        message[0] == ROWS_TAG
        and any(isinstance(row[2], dict) and row[2].get("event") == COMPLETE_FINAL for row in message[1])
    )


def is_published(data: bytes) -> bool:
    """Return whether a piece of the connection from a worker to its broker has a message.

    Both protocols say so alike.
    """
    return b"PUB" in data


def is_anything(data: bytes) -> bool:
    return True


class Requests(ABC):
    """Which requests a worker was ever sent; they are known by their seeds. A tap of a `FaultProxy`."""

    def __init__(self) -> None:
        #: When each came for the first time, by the monotonic clock.
        self.times: dict[int, float] = {}

    @property
    def seeds(self) -> Set[int]:
        """The requests that came."""
        return self.times.keys()

    def came(self, seed: int) -> None:
        """Record that a request has come."""
        self.times.setdefault(seed, time.monotonic())

    @abstractmethod
    def __call__(self, passing: Passing) -> None:
        """Read what passes."""


class TcpRequests(Requests):
    """In the frames of the transport tcp."""

    def __call__(self, passing: Passing) -> None:
        if passing.direction is not Direction.UP:
            return
        message = _message(passing.body)
        if message[0] == OPEN and message[3] == "generate":
            seed = message[7].get("sampling_options", {}).get("seed")
            if seed is not None:
                self.came(seed)


class BrokerRequests(Requests):
    """In the bytes that a broker sends: its protocol is not read, only what a seed looks like in msgpack."""

    def __init__(self) -> None:
        super().__init__()
        self._rest: dict[int, bytes] = defaultdict(bytes)

    def __call__(self, passing: Passing) -> None:
        if passing.direction is not Direction.DOWN:
            return
        data = self._rest[passing.connection] + passing.body
        _, *after = data.split(_SEED)
        for value in after:
            if value and value[0] < 0x80:
                self.came(value[0])
            elif value and (width := _WIDTHS.get(value[0])) and len(value) > width:
                self.came(int.from_bytes(value[1 : 1 + width], "big"))
        self._rest[passing.connection] = data[-_LONGEST:]
