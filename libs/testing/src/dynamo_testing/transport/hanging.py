"""Checks with hanging workers: a dead one is given up within its lease, a busy one is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import ConnectionTimeout, Disconnected, DynamoError, ResponseTimeout, chain_has

from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import Ask, Deadline, Planes, Recorder, Stage, Tick, TransportHarness
from dynamo_testing.transport.worker_process import DOOR, FIRST, ITEMS, MIDDLE, WORK, Elsewhere, Work

#: Seconds that the lease of a worker lives, as its record says; its callers are patient for a second longer.
LIFE = 0.2
#: Seconds that an event loop is blocked: longer than callers are patient with what is dead.
BLOCKED = 2.5
#: Seconds of a block that does not end while a check runs.
ENDLESS = 600.0


class HangChecks(TransportHarness):
    """Checks that callers tell a dead worker from a busy one."""

    @pytest.fixture
    async def elsewhere(self, planes: Planes) -> AsyncIterator[Elsewhere]:
        """Yield a worker in a process of its own."""
        if not self.CAN_SERVE_ELSEWHERE:
            pytest.skip("CAN_SERVE_ELSEWHERE is False")
        process = await Elsewhere.start(*self.serves_elsewhere(planes), lease_ttl=LIFE)
        yield process
        await process.end()

    async def test_a_frozen_worker_is_given_up_in_every_phase_of_a_call(
        self, planes: Planes, elsewhere: Elsewhere
    ) -> None:
        calls = [_Calling(planes.client, elsewhere, Work(wait), self.WAIT) for wait in (DOOR, FIRST, MIDDLE)]
        await calls[1].is_accepted()
        await calls[2].sink.arrived(ITEMS // 2)

        elsewhere.freeze()
        # Over the same connection, and over one that is not made yet.
        calls += [_Calling(client, elsewhere, Work(), self.WAIT) for client in (planes.client, planes.server)]

        for call in calls:
            assert _is_dead(await call.end())

    async def test_a_worker_with_a_busy_event_loop_is_not_given_up(self, planes: Planes, elsewhere: Elsewhere) -> None:
        wait = self.WAIT + BLOCKED
        calls = [_Calling(planes.client, elsewhere, Work(block=BLOCKED), wait)]
        await calls[0].sink.arrived(ITEMS // 2)

        calls += [_Calling(client, elsewhere, Work(), wait) for client in (planes.client, planes.server)]

        for call in calls:
            assert await call.end() is None
            assert [item.number for item in call.sink.items] == list(range(ITEMS))

    async def test_a_call_is_accepted_before_its_handler_can_hold_the_event_loop(
        self, planes: Planes, elsewhere: Elsewhere
    ) -> None:
        call = _Calling(planes.client, elsewhere, Work(block=ENDLESS, at_once=True), self.WAIT)

        await call.is_accepted()

        elsewhere.freeze()
        assert _is_dead(await call.end())

    async def test_a_worker_that_is_frozen_while_its_event_loop_is_busy_is_given_up(
        self, planes: Planes, elsewhere: Elsewhere
    ) -> None:
        call = _Calling(planes.client, elsewhere, Work(block=ENDLESS), self.WAIT)
        await call.sink.arrived(ITEMS // 2)

        elsewhere.freeze()

        assert _is_dead(await call.end())

    async def test_a_connection_that_carries_nothing_back_is_given_up(self, planes: Planes) -> None:
        if not self.CAN_GO_DEAF:
            pytest.skip("CAN_GO_DEAF is False")
        stage = Stage(planes, self.WAIT, lease_ttl=LIFE)
        call = await stage.running(_one_and_no_more)

        await self.go_deaf(planes)

        await call.sink.end()
        assert _is_dead(call.sink.error())


async def _one_and_no_more(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    yield Tick(0)
    await ctx.stopped()


class _Calling:
    """One call of another process, from its beginning to its end."""

    def __init__(self, client: Transport, elsewhere: Elsewhere, request: Work, wait: float) -> None:
        self.sink = Recorder(wait)
        self._accepted = asyncio.Event()
        self._wait = wait
        self._task = elsewhere.calls.spawn(self._run(client, elsewhere, request), name="call")

    async def _run(self, client: Transport, elsewhere: Elsewhere, request: Work) -> DynamoError | None:
        try:
            source = await client.call(elsewhere.instance, WORK, request, EngineContext("r"), self.sink)
        except DynamoError as error:
            return error
        self._accepted.set()
        await self.sink.end()
        await source.aclose()
        return self.sink.error()

    async def is_accepted(self) -> None:
        """Return once the call is accepted."""
        async with Deadline(self._wait, "the acceptance of a call"):
            await self._accepted.wait()

    async def end(self) -> DynamoError | None:
        """Return how it ended; None if it went well."""
        async with Deadline(self._wait, "the end of a call"):
            return await self._task


def _is_dead(error: DynamoError | None) -> bool:
    """Return whether a call ended because nothing came from the worker."""
    return isinstance(error, ConnectionTimeout) or (
        isinstance(error, Disconnected) and chain_has(error, ResponseTimeout)
    )
