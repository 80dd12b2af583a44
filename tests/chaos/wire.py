"""What the tests know of the frames between a frontend and a worker: enough to choose one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from dynamo_core.protocol.annotated import COMPLETE_FINAL
from dynamo_core.testing.faults import Direction, Passing
from dynamo_plugin_transport_tcp.messages import ROWS_TAG, Open, Taken

_decode = msgspec.msgpack.Decoder().decode

OPEN, TAKEN = (kind.__struct_config__.tag for kind in (Open, Taken))


def tagged(tag: Any) -> Callable[[bytes], bool]:
    """Whether a frame is this message."""
    return lambda body: bool(_decode(body)[0] == tag)


is_rows = tagged(ROWS_TAG)
is_taken = tagged(TAKEN)


def is_running(body: bytes) -> bool:
    """Whether a frame carries a row that is neither the first of its stream nor its last."""
    message = _decode(body)
    return bool(message[0] == ROWS_TAG and any(row[1] > 0 and isinstance(row[2], list) for row in message[1]))


def is_last(body: bytes) -> bool:
    """Whether a frame carries the flag that closes a stream."""
    message = _decode(body)
    return bool(
        message[0] == ROWS_TAG
        and any(isinstance(row[2], dict) and row[2].get("event") == COMPLETE_FINAL for row in message[1])
    )


class Requests:
    """Which requests went over a wire; they are known by their seeds. A tap of a `FaultProxy`."""

    def __init__(self) -> None:
        self.seeds: set[int] = set()

    def __call__(self, passing: Passing) -> None:
        if passing.direction is not Direction.UP:
            return
        message = _decode(passing.body)
        if message[0] == OPEN and message[3] == "generate":
            seed = message[7].get("sampling_options", {}).get("seed")
            if seed is not None:
                self.seeds.add(seed)
