"""Checks with messages that are lost, doubled, changed or out of order."""

from __future__ import annotations

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import (
    Disconnected,
    DynamoError,
    StreamIncomplete,
    chain_has,
)
from dynamo_wire import ROWS_TAG, Ack, Resume

from dynamo_testing.brokered.bench import BrokerBench
from dynamo_testing.faults import Corrupt, Direction, Drop, Duplicate, Fault, Reorder
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.handlers import TOKENS, SteppedEngine, at, counted, happens
from dynamo_testing.transport.harness import Recorder


@pytest.mark.asyncio
class LossChecks:
    """No stream lies."""

    async def test_a_message_that_comes_twice_ends_the_streams_of_its_link_only(self, bench: BrokerBench) -> None:
        server, other, (wire, client) = (
            await bench.transport(),
            await bench.transport(),
            await bench.behind(),
        )
        engine, bystander, broken, whole = SteppedEngine(), SteppedEngine(), Recorder(), Recorder()
        await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), broken)
        await client.call(at(await other.serve(8, TOKENS, bystander), 8), TOKENS, 0, EngineContext("s"), whole)
        await broken.begun()
        await whole.begun()

        rule = wire.plan.inject(Duplicate(), direction=Direction.DOWN, when=bench.says(ROWS_TAG))
        engine.step()
        await rule.hit()
        error = await broken.end()
        await happens(engine.left[0])
        bystander.step(last=True)

        assert isinstance(error, StreamIncomplete)
        assert "fragment" in error.message
        assert await whole.end() is None

    @pytest.mark.parametrize("lost", [Resume, Ack], ids=["resume", "ack"])
    async def test_a_lost_message_of_the_caller_is_noticed_by_the_worker(
        self, bench: BrokerBench, lost: type[Resume | Ack]
    ) -> None:
        server, (wire, client) = await bench.transport(), await bench.behind()
        engine, sink = SteppedEngine(), Recorder()
        source = await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()
        if lost is Resume:
            source.pause()

        rule = wire.plan.inject(Drop(), direction=Direction.UP, when=bench.says(lost.__struct_config__.tag))
        if lost is Resume:
            source.resume()
        else:
            engine.step()
        await rule.hit()

        # Without the numbering this stream would stand still for ever.
        error = await sink.end()
        assert isinstance(error, Disconnected)
        assert chain_has(error, StreamIncomplete)
        await happens(engine.left[0])

    @pytest.mark.parametrize("kind", [Drop, Duplicate, Reorder, Corrupt], ids=lambda kind: str(kind.__name__))
    @pytest.mark.parametrize("direction", Direction)
    async def test_no_damaged_message_corrupts_a_stream(
        self, bench: BrokerBench, kind: type[Fault], direction: Direction
    ) -> None:
        patience = {"heartbeat": 0.05, "accept_timeout": 0.2}
        server = await bench.transport(**patience)
        wire, client = await bench.behind(**patience)

        instance = at(await server.serve(7, TOKENS, counted()))
        for nth in range(8):
            # Frames with a payload only: the protocol of the server is not under test.
            wire.plan.clear()
            wire.plan.inject(kind(), direction=direction, at=nth, when=lambda body: len(body) > 4)
            sinks = [Recorder() for _ in range(3)]
            for sink in sinks:
                try:
                    await client.call(instance, TOKENS, 300, EngineContext("r"), sink)
                except DynamoError:
                    assert sink.items == sink.ends == []
                    continue
                error = await sink.end()
                tokens = [token for item in sink.items for token in item.token_ids]
                assert tokens == list(range(len(tokens)))
                if error is None:
                    assert sink.complete
                    assert len(tokens) == 300

    async def test_a_lost_end_of_a_stream_is_noticed(self, bench: BrokerBench) -> None:
        server, (wire, client) = await bench.transport(), await bench.behind()
        engine, sink = SteppedEngine(), Recorder()
        await client.call(at(await server.serve(7, TOKENS, engine)), TOKENS, 0, EngineContext("r"), sink)
        await sink.begun()

        rule = wire.plan.inject(Drop(), direction=Direction.DOWN, when=bench.says(ROWS_TAG))
        engine.step(last=True)
        await rule.hit()

        assert isinstance(await sink.end(), StreamIncomplete)
        assert not sink.complete
