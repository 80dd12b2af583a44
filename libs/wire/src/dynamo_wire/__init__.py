"""The base of transports between processes: the messages of a call, both ends, streams and liveness.

A transport brings a connection that carries the messages. `dynamo_wire.brokered` builds a transport over a message
broker. Import from these two packages only: the modules below them may change.
"""

from __future__ import annotations

from dynamo_wire.blocked_loop_probe import LoopWatch
from dynamo_wire.calls import Calls
from dynamo_wire.checksums import checksum
from dynamo_wire.liveness import ASKED, Action, Liveness, silence_limit
from dynamo_wire.messages import (
    ACCEPTED_PROTOS,
    ROWS_TAG,
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
    proto_mismatch,
)
from dynamo_wire.server_streams import ServerStreams

__all__ = [
    "ACCEPTED_PROTOS",
    "ASKED",
    "ROWS_TAG",
    "UNREADABLE",
    "Accepted",
    "Ack",
    "Action",
    "Bye",
    "Calls",
    "Ended",
    "Liveness",
    "LoopWatch",
    "Open",
    "Pause",
    "Ping",
    "Pong",
    "Refused",
    "Resume",
    "Rows",
    "ServerStreams",
    "Stop",
    "StreamId",
    "checksum",
    "encode",
    "proto_mismatch",
    "silence_limit",
]
