"""Bits that flip between processes and the server: no answer is another than was sent, wherever they do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dynamo_core.contracts.context import EngineContext
from dynamo_core.errors import Disconnected
from dynamo_core.protocol.records import Instance
from dynamo_plugin_transport_nats.transport import NatsTransport
from dynamo_testing.faults import Direction, Fault, Frame, Lane
from dynamo_testing.transport.damage import TEXT, Damage, flip_bits, prompt, speak
from dynamo_testing.transport.harness import Recorder

WAIT = 10.0

Make = Callable[..., Coroutine[Any, Any, NatsTransport]]

#: Most of the time they wait for deadlines, or to be connected again.
CLIENTS = 40
QUICK = {"heartbeat": 0.05, "silence": 0.5, "accept_timeout": 0.5, "reconnect_wait": 0.05, "unavailable_wait": 2}


async def flipped(make_transport: Make, make_wire: Any, flips: int) -> Damage:
    server, wire = await make_transport(**QUICK), await make_wire(raw=True)
    instance = Instance(instance_id=7, address=(await server.serve(7, TEXT, speak)).address)
    clients = [await make_transport(**QUICK, servers=[f"nats://127.0.0.1:{wire.port}"]) for _ in range(CLIENTS)]
    return await flip_bits(clients, instance, wire.plan, flips=flips, seed=1)


async def test_no_answer_is_another_than_was_sent_though_bits_flip(make_transport: Make, make_wire: Any) -> None:
    damage = await flipped(make_transport, make_wire, 100)

    assert (damage.wrong, damage.hung) == ([], 0)
    assert damage.whole
    assert damage.failed


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_no_answer_is_another_than_was_sent_though_ten_thousand_bits_flip(
    make_transport: Make, make_wire: Any
) -> None:
    damage = await flipped(make_transport, make_wire, 10_000)

    assert (damage.wrong, damage.hung) == ([], 0)
    assert damage.whole > 100


class Unreadable(Fault):
    """A subject is no text any more."""

    def fits(self, frame: Frame) -> bool:
        return frame.head.startswith((b"MSG", b"HMSG"))

    async def carry(self, frame: Frame, lane: Lane) -> None:
        data = bytearray(frame.data)
        data[8] |= 0x80
        await lane.send(bytes(data))


async def test_a_connection_of_which_the_library_reads_no_more_is_made_anew(
    make_transport: Make, make_wire: Any
) -> None:
    server, wire = await make_transport(), await make_wire()
    client = await make_transport(servers=[f"nats://127.0.0.1:{wire.port}"], silence=60, accept_timeout=WAIT)
    instance = Instance(instance_id=7, address=(await server.serve(7, TEXT, speak)).address)
    wire.plan.inject(Unreadable(), direction=Direction.DOWN)

    with pytest.raises(Disconnected):
        await client.call(instance, TEXT, prompt(1), EngineContext("r"), Recorder(WAIT))
    sink = Recorder(WAIT)
    await client.call(instance, TEXT, prompt(2), EngineContext("s"), sink)
    await sink.end()

    assert sink.outcome() is None
