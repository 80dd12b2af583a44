"""Bits that flip between processes and the server: no answer is another than was sent, wherever they do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from dynamo_core.protocol.records import Instance
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.transport.damage import TEXT, Damage, flip_bits, speak

Make = Callable[..., Coroutine[Any, Any, RedisTransport]]

#: Most of the time they wait for deadlines, or to be connected again.
CLIENTS = 40
QUICK = {"heartbeat": 0.05, "silence": 0.5, "accept_timeout": 0.5, "reconnect_wait": 0.05, "unavailable_wait": 2}


async def flipped(make_transport: Make, make_wire: Any, flips: int) -> Damage:
    server, wire = await make_transport(**QUICK), await make_wire(raw=True)
    instance = Instance(instance_id=7, address=(await server.serve(7, TEXT, speak)).address)
    clients = [await make_transport(**QUICK, url=f"redis://127.0.0.1:{wire.port}") for _ in range(CLIENTS)]
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
