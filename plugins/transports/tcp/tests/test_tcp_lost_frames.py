"""A frame that is lost on the way: what waits for it ends with an error, and not never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from dynamo_core import Endpoint, EngineContext, LLMEngineOutput, ServedContext
from dynamo_core.errors import Disconnected
from dynamo_core.protocol import Instance
from dynamo_core.protocol.output import merge_outputs
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_testing.faults import Direction, Drop, FaultProxy
from dynamo_wire import ROWS_TAG, Ack

Make = Callable[..., TcpTransport]

TOKENS = Endpoint("tokens", int, LLMEngineOutput, merge_outputs)

ROWS = Direction.DOWN, ROWS_TAG
ACK = Direction.UP, Ack.__struct_config__.tag

#: What follows the length of a frame that has a checksum.
CHECK = 12

HEARTBEAT, SILENCE = 0.1, 0.3


async def endless(first: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        while not ctx.is_stopped():
            yield LLMEngineOutput([first])
            await asyncio.sleep(0.001)

    return items()


@pytest.mark.parametrize("lost", [ROWS, ACK], ids=["rows", "taken"])
async def test_streams_do_not_wait_for_ever_for_a_frame_that_was_lost(
    make_transport: Make, recorder: Any, lost: tuple[Direction, int]
) -> None:
    server = make_transport(heartbeat=HEARTBEAT, silence=SILENCE)
    client = make_transport(heartbeat=HEARTBEAT, silence=SILENCE)
    address = Address.parse((await server.serve(7, TOKENS, endless)).address["tcp"])
    direction, tag = lost
    async with FaultProxy(address.host, address.port) as proxy:
        here = Address(proxy.host, proxy.port, address.nonce)
        instance = Instance(instance_id=7, address={"tcp": str(here)})
        sinks = [recorder() for _ in range(3)]
        for sink in sinks:
            await client.call(instance, TOKENS, 1, EngineContext("r"), sink)
            await sink.until(lambda sink=sink: len(sink.items) > 5)

        await proxy.plan.inject(
            Drop(), direction=direction, when=lambda body: bool(msgspec.msgpack.decode(body[CHECK:])[0] == tag)
        ).hit()

        errors = [await sink.end() for sink in sinks]
        assert [type(error) for error in errors] == [Disconnected] * 3
        assert not any(sink.complete for sink in sinks)


async def test_a_caller_that_takes_slowly_but_does_is_waited_for(make_transport: Make, recorder: Any) -> None:
    server = make_transport(heartbeat=HEARTBEAT, silence=SILENCE)
    client = make_transport(heartbeat=HEARTBEAT, silence=SILENCE)
    address = (await server.serve(7, TOKENS, endless)).address
    sink = recorder()
    await client.call(Instance(instance_id=7, address=address), TOKENS, 1, EngineContext("r"), sink)

    # Several times the silence: a frame is always under way, and always another one.
    await asyncio.sleep(3 * SILENCE)
    seen = len(sink.items)
    await sink.until(lambda: len(sink.items) > seen)

    assert sink.ends == []
