"""What the library cannot read: it goes on as if nothing were wrong, and the plugin notices."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import EngineContext
from dynamo_core.errors import Disconnected
from dynamo_testing.faults import Direction, Fault, Frame, Lane
from dynamo_testing.transport.damage import TEXT, prompt, speak
from dynamo_testing.transport.handlers import at
from dynamo_testing.transport.harness import Recorder

WAIT = 10.0


class Unreadable(Fault):
    """A subject is no text any more."""

    def fits(self, frame: Frame) -> bool:
        return frame.head.startswith((b"MSG", b"HMSG"))

    async def carry(self, frame: Frame, lane: Lane) -> None:
        data = bytearray(frame.data)
        data[8] |= 0x80
        await lane.send(bytes(data))


async def test_a_connection_of_which_the_library_reads_no_more_is_made_anew(bench: Any) -> None:
    server, wire = await bench.transport(), await bench.wire()
    client = await bench.transport(wire, silence=60, accept_timeout=WAIT)
    instance = at(await server.serve(7, TEXT, speak))
    wire.plan.inject(Unreadable(), direction=Direction.DOWN)

    with pytest.raises(Disconnected):
        await client.call(instance, TEXT, prompt(1), EngineContext("r"), Recorder(WAIT))
    sink = Recorder(WAIT)
    await client.call(instance, TEXT, prompt(2), EngineContext("s"), sink)
    await sink.end()

    assert sink.outcome() is None
