"""Bits that flip on the way: no answer is another than was sent, wherever they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from random import Random
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core import Endpoint, EngineContext, LLMEngineOutput, ServedContext
from dynamo_core.errors import CannotConnect, ConnectionTimeout, Disconnected
from dynamo_core.protocol import Instance
from dynamo_core.protocol.output import merge_outputs
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.faults import Corrupt, Direction, FaultProxy, Passing, Raw
from dynamo_testing.transport.damage import TEXT, DamageChecks, Damaged, speak

Make = Callable[..., TcpTransport]

COUNT = Endpoint("count", int, LLMEngineOutput, merge_outputs)

CLIENTS = 8
QUICK = {"heartbeat": 0.1, "silence": 0.5, "connect_timeout": 0.5, "accept_timeout": 0.5}


async def count(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
    """Yield so many tokens, and then nothing."""

    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        for token in range(request):
            yield LLMEngineOutput([token])
            await asyncio.sleep(0)
        await ctx.stopped()

    return items()


def through(proxy: FaultProxy, there: Address) -> Instance:
    return Instance(instance_id=7, address={"tcp": str(Address(proxy.host, proxy.port, there.nonce))})


class TestTcpDamaged(DamageChecks):
    QUICK_LOOP: ClassVar[str] = "asyncio"
    FLIPS: ClassVar[int] = 150
    LEAST_WHOLE: ClassVar[int] = 1000

    @pytest.fixture
    async def damaged(self, make_transport: Make) -> AsyncIterator[Damaged]:
        there = Address.parse((await make_transport(**QUICK).serve(7, TEXT, speak)).address["tcp"])
        async with FaultProxy(there.host, there.port, framing=Raw()) as proxy:
            yield Damaged([make_transport(**QUICK) for _ in range(CLIENTS)], through(proxy, there), proxy.plan)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("offset", [0, 3, 4, 11, 12, -1])
async def test_a_frame_that_is_damaged_ends_its_connection_and_is_counted(
    make_transport: Make, recorder: Any, direction: Direction, offset: int
) -> None:
    metrics, side = Metrics(), "listener" if direction is Direction.UP else "caller"
    server, client = make_transport(metrics), make_transport(metrics)
    damaged = metrics.counter("dynamo_tcp_damaged_frames_total", "", ("side",)).labels(side)
    there = Address.parse((await server.serve(7, COUNT, count)).address["tcp"])
    first, second = recorder(), recorder()
    async with FaultProxy(there.host, there.port) as proxy:
        instance = through(proxy, there)
        await client.call(instance, COUNT, 3, EngineContext("r"), first)
        await first.until(lambda: first.items)
        # What follows the length: its bits turned over, the checksum, and the body.
        rule = proxy.plan.inject(Corrupt(offset, flip=1), direction=direction)
        with pytest.raises(Disconnected):
            await client.call(instance, COUNT, 3, EngineContext("s"), second)
        await rule.hit()
        error = await first.end()

    assert isinstance(error, Disconnected)
    assert damaged.value == 1


@pytest.mark.parametrize("without", ["server", "client"])
async def test_checksums_are_off_if_one_end_disables_them(make_transport: Make, recorder: Any, without: str) -> None:
    server, client = (make_transport(checksum=end != without) for end in ("server", "client"))
    there, sink = Address.parse((await server.serve(7, COUNT, count)).address["tcp"]), recorder()
    said: list[Any] = []

    def tap(passing: Passing) -> None:
        said.append(msgspec.msgpack.decode(passing.body))

    async with FaultProxy(there.host, there.port, tap=tap) as proxy:
        await client.call(through(proxy, there), COUNT, 3, EngineContext("r"), sink)
        await sink.until(lambda: sum(len(item.token_ids) for item in sink.items) == 3)

    assert len(said) > 5


async def test_a_damaged_handshake_is_refused(make_transport: Make, recorder: Any) -> None:
    server, dice = make_transport(), Random(1)
    there = Address.parse((await server.serve(7, COUNT, count)).address["tcp"])
    async with FaultProxy(there.host, there.port) as proxy:
        for _ in range(40):
            direction = dice.choice([*Direction])
            proxy.plan.inject(Corrupt(dice.randrange(40), flip=1 << dice.randrange(8)), direction=direction)
            with pytest.raises((CannotConnect, ConnectionTimeout)):
                await make_transport().call(through(proxy, there), COUNT, 3, EngineContext("r"), recorder())
            proxy.plan.clear()
