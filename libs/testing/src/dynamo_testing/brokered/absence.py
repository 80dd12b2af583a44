"""Checks with workers and callers that are gone, silent, or replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import (
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    ResponseTimeout,
    chain_has,
)
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import Instance

from dynamo_testing.brokered.bench import WAIT, BrokerBench, unplug
from dynamo_testing.faults import BlackHole
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.handlers import ECHO, TOKENS, SteppedEngine, at, echo, happens
from dynamo_testing.transport.harness import Recorder


@pytest.mark.asyncio
class AbsenceChecks:
    """Checks that each end notices the loss of the other."""

    async def test_a_call_to_an_address_without_listener_fails_at_once(self, bench: BrokerBench) -> None:
        server, client = await bench.transport(), await bench.transport(accept_timeout=60)
        instance = at(await server.serve(7, ECHO, echo))
        await server.aclose()

        async with asyncio.timeout(WAIT):
            with pytest.raises(CannotConnect, match="no process listens"):
                await client.call(instance, ECHO, b"", EngineContext("r"), Recorder())

    async def test_a_restarted_worker_with_the_same_id_is_not_mistaken_for_it(self, bench: BrokerBench) -> None:
        old, new, client = await bench.transport(), await bench.transport(), await bench.transport()
        instance = at(await old.serve(7, ECHO, echo))
        await old.aclose()
        await new.serve(7, ECHO, echo)

        with pytest.raises(CannotConnect, match="no process listens"):
            await client.call(instance, ECHO, b"", EngineContext("r"), Recorder())

    @pytest.mark.parametrize(
        "address",
        [
            "",
            "a b",
            "x.rq.7.*",
            "x.rq.>",
            "x.rq.7.00\r\nPUB y 0",
            "x.rq.7.00\r\nPING",
            "other.rq.7.00",
            "other.rq.7." + "0" * 24,
            "x.rq..7",
            "x.rq.." + "0" * 24,
            "x.rq.7.",
            "x.rq.7." + "0" * 600,
        ],
    )
    async def test_a_malformed_address_is_never_sent_to(self, bench: BrokerBench, address: str) -> None:
        client = await bench.transport(prefix="x")
        instance = Instance(instance_id=7, address={client.NAME: address.replace(".", bench.SEPARATOR)})

        with pytest.raises(CannotConnect, match="not an address"):
            await client.call(instance, ECHO, b"", EngineContext("r"), Recorder())

    async def test_a_worker_that_dies_is_noticed_by_its_callers(self, bench: BrokerBench) -> None:
        (wire, server), client = await bench.behind(), await bench.transport()
        sink = Recorder()
        instance = at(await server.serve(7, TOKENS, SteppedEngine()))
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()

        unplug(wire)

        error = await sink.end()
        assert isinstance(error, Disconnected)
        assert "no process listens" in error.message
        assert not chain_has(error, ResponseTimeout)

    async def test_a_caller_that_dies_is_noticed_by_its_workers(self, bench: BrokerBench) -> None:
        server, (wire, client) = await bench.transport(), await bench.behind()
        engine, sink = SteppedEngine(), Recorder()
        instance = at(await server.serve(7, TOKENS, engine))
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()

        unplug(wire)

        await happens(engine.left[0])
        assert not engine.contexts[0].is_stopped(), "a caller that was lost has not given up"

    async def test_a_reconnected_caller_gets_a_new_link(self, bench: BrokerBench) -> None:
        server, (wire, client) = await bench.transport(), await bench.behind()
        engine, first, second = SteppedEngine(), Recorder(), Recorder()
        instance = at(await server.serve(7, TOKENS, engine))
        await client.call(instance, TOKENS, 0, EngineContext("r"), first)
        await first.begun()

        wire.cut()
        assert isinstance(await first.end(), Disconnected)
        await client.call(instance, TOKENS, 50, EngineContext("s"), second)
        await happens(engine.left[0])
        engine.step(last=True)

        assert await second.end() is None
        assert [item.token_ids for item in second.items] == [[50]]
        assert [item.token_ids for item in first.items] == [[0]]

    async def test_two_processes_that_call_one_worker_do_not_touch_each_other(self, bench: BrokerBench) -> None:
        server = await bench.transport()
        stays, leaves = await bench.pair()
        engine, kept, lost = SteppedEngine(), Recorder(), Recorder()
        instance = at(await server.serve(7, TOKENS, engine))
        await stays.call(instance, TOKENS, 0, EngineContext("a"), kept)
        await leaves.call(instance, TOKENS, 100, EngineContext("b"), lost)
        await kept.begun()
        await lost.begun()

        await leaves.aclose()
        await happens(engine.left[1])
        engine.step()
        await kept.until(lambda: len(kept.items) == 2)
        engine.step(last=True)

        assert await kept.end() is None
        assert [item.token_ids for item in kept.items] == [[0], [1]]
        assert isinstance(await lost.end(), Disconnected)

    @pytest.mark.parametrize("dead", ["worker", "caller"])
    async def test_a_silent_end_is_given_up(self, bench: BrokerBench, dead: str) -> None:
        patience = {"heartbeat": 0.05, "silence": 0.3}
        wire, hung = await bench.behind(**patience)
        other = await bench.transport(**patience)
        server, client = (hung, other) if dead == "worker" else (other, hung)
        engine, sink = SteppedEngine(), Recorder()
        instance = at(await server.serve(7, TOKENS, engine))
        await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()

        # The server sees an open connection, and goes on to believe in it.
        rule = wire.plan.inject(BlackHole(), times=None)
        await rule.hit()

        error = await sink.end()
        assert chain_has(error or Disconnected(), ResponseTimeout), error
        await happens(engine.left[0])
        assert not engine.contexts[0].is_stopped()

    async def test_a_worker_that_does_not_accept_in_time_is_given_up(self, bench: BrokerBench) -> None:
        server, client = await bench.transport(), await bench.transport(accept_timeout=0.1)
        stopped = asyncio.Event()

        async def closed_door(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
            ctx.on_stop(stopped.set)
            await asyncio.Event().wait()
            raise AssertionError

        instance = at(await server.serve(7, TOKENS, closed_door))

        with pytest.raises(ConnectionTimeout, match=r"within 0\.1 s"):
            await client.call(instance, TOKENS, 0, EngineContext("r"), Recorder())
        await happens(stopped)
