"""The sum of all bodies is bounded: a body that has no room waits, and none is lost."""

from __future__ import annotations

import asyncio
import gzip
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http import body_budget
from dynamo_http.body_budget import SMALL, WORK, BodyBudget
from dynamo_http.listener import Listener
from dynamo_telemetry.metrics import Metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.http.tests.serving import WAIT, answer_to, serving, until

MB = 1 << 20
LARGE = 2 * MB
#: Of the three quarters for large ones, work on two of them takes everything.
LIMIT = LARGE * WORK * 2 * 4 // 3


class Handler:
    """A route whose requests go on when they are told to."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.budget = BodyBudget(LIMIT, self.metrics, "t")
        self.inside: list[int] = []
        self.changed = asyncio.Event()
        self.open = asyncio.Event()

    async def work(self, http: web.Request) -> web.Response:
        """Hold the body until all may go on."""
        body = await http.read()
        self.inside.append(len(body))
        self.changed.set()
        await self.open.wait()
        return web.Response(text=str(len(body)))

    async def release(self, http: web.Request) -> web.Response:
        """Hold the request, but not the body."""
        await http.read()
        await http.release()
        return await self.work(http)

    async def until(self, count: int) -> None:
        """Return once so many requests hold their bodies."""
        async with asyncio.timeout(WAIT):
            while len(self.inside) < count:
                self.changed.clear()
                await self.changed.wait()

    def sample(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"t_{name}")

    async def until_waiting(self, count: int) -> None:
        """Return once so many bodies have waited in all, or more."""
        await until(lambda: (self.sample("waiting_bodies_total") or 0) >= count)


@pytest.fixture
async def handler() -> Handler:
    return Handler()


@pytest.fixture
async def listener(handler: Handler) -> AsyncIterator[Listener]:
    routes = [HttpRoute("POST", "/work", handler.work), HttpRoute("POST", "/release", handler.release)]
    async with serving(*routes, body_limit=4 * MB, body_budget=handler.budget) as listener:
        yield listener


async def post(listener: Listener, body: bytes, *lines: str, path: str = "/work") -> tuple[int, bytes]:
    """Return the status and the answer, with its header."""
    head = [f"POST {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}", *lines]
    answer = await answer_to(listener, "\r\n".join([*head, "", ""]).encode() + body)
    return int(answer.split(b" ", 2)[1]), answer


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
async def test_large_bodies_beyond_the_budget_wait_and_all_are_answered(
    listener: Listener, handler: Handler, packed: bool
) -> None:
    body = bytes(LARGE)
    lines = ["content-encoding: gzip"] if packed else []
    asked = [asyncio.create_task(post(listener, gzip.compress(body) if packed else body, *lines)) for _ in range(6)]
    # To be unpacked takes room for the largest that may come out.
    most = 1 if packed else 2
    await handler.until(most)
    await handler.until_waiting(6 - most)
    assert len(handler.inside) == most
    held = handler.sample("body_bytes")
    assert held is not None
    assert held >= LARGE * WORK

    handler.open.set()
    answers = await asyncio.gather(*asked)

    assert {(status, answer.rpartition(b"\r\n")[2]) for status, answer in answers} == {(200, str(LARGE).encode())}
    assert handler.sample("body_bytes") == 0


async def test_small_bodies_do_not_wait_for_large_ones(listener: Listener, handler: Handler) -> None:
    large = [asyncio.create_task(post(listener, bytes(LARGE))) for _ in range(3)]
    await handler.until(2)

    small = [asyncio.create_task(post(listener, bytes(size))) for size in (10, 60_000, 100_000, SMALL)]
    await handler.until(6)
    handler.open.set()

    assert {status for status, _ in await asyncio.gather(*large, *small)} == {200}
    assert sorted(handler.inside[2:6]) == [10, 60_000, 100_000, SMALL]


async def test_released_body_makes_room_while_its_request_goes_on(listener: Listener, handler: Handler) -> None:
    asked = [asyncio.create_task(post(listener, bytes(LARGE), path="/release")) for _ in range(6)]

    await handler.until(6)
    assert handler.sample("body_bytes") == 0
    assert handler.inside == [0] * 6

    handler.open.set()
    assert {status for status, _ in await asyncio.gather(*asked)} == {200}


async def test_body_that_waits_too_long_is_refused_and_may_be_sent_again(
    listener: Listener, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [asyncio.create_task(post(listener, bytes(LARGE))) for _ in range(2)]
    await handler.until(2)
    monkeypatch.setattr(body_budget, "_DEADLINE", 0.05)

    status, answer = await post(listener, bytes(LARGE))

    assert status == 503
    assert b"\r\nRetry-After: " in answer
    assert b"Too many large request bodies" in answer
    assert handler.sample("refused_bodies_total") == 1
    handler.open.set()
    assert {status for status, _ in await asyncio.gather(*held)} == {200}
    assert (await post(listener, bytes(LARGE)))[0] == 200
    assert handler.sample("body_bytes") == 0


async def test_a_client_that_leaves_while_waiting_frees_its_lease(listener: Listener, handler: Handler) -> None:
    held = [asyncio.create_task(post(listener, bytes(LARGE))) for _ in range(2)]
    await handler.until(2)
    _, leaving = await asyncio.open_connection("127.0.0.1", listener.port)
    leaving.write(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE + bytes(LARGE))
    await handler.until_waiting(1)

    # Without a reset it may wait for its answer with its sending half closed.
    leaving.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    leaving.transport.abort()
    await until(lambda: listener.running == 2)
    handler.open.set()
    await asyncio.gather(*held)

    await until(lambda: not listener.running)
    assert handler.sample("body_bytes") == 0
    assert len(handler.inside) == 2


async def test_body_that_trickles_is_cut_once_others_wait_for_its_place(
    listener: Listener, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_budget, "_ARRIVAL", -1.0)
    monkeypatch.setattr(body_budget, "_PATIENCE", 0.05)
    handler.open.set()
    trickling = []
    for _ in range(LIMIT * 3 // 4 // (4 * MB) + 1):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"POST /work HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n{" % (4 * MB))
        trickling.append((reader, writer))
    await handler.until_waiting(1)

    assert (await post(listener, bytes(LARGE)))[0] == 200

    # The last one has found room, and keeps others from nothing.
    async with asyncio.timeout(WAIT):
        answers = [await reader.readline() for reader, _ in trickling[:-1]]
    for _, writer in trickling:
        writer.close()
    assert set(answers) == {b"HTTP/1.1 408 Request Timeout\r\n"}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(SMALL + 1, 3 * SMALL), st.booleans()), max_size=30), st.randoms())
def test_leases_stay_within_the_budget_and_all_are_granted(bodies: list[tuple[int, bool]], random: Any) -> None:
    capacity = 4 * SMALL

    async def run() -> None:
        budget = BodyBudget(-(-capacity * 4 // 3), Metrics(), "t")
        now = [0]

        async def body(size: int) -> None:
            lease = await budget.read(size)
            now[0] += lease.size
            assert now[0] <= capacity + 1
            try:
                for _ in range(random.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                now[0] -= lease.size
                lease.shrink(0)
                lease.shrink(0)

        tasks = []
        for size, leaves in bodies:
            task = asyncio.create_task(body(size))
            await asyncio.sleep(0)
            if leaves:
                task.cancel()
            tasks.append(task)
        async with asyncio.timeout(WAIT):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        whole = await budget.read(capacity)
        assert whole.size >= capacity - 1

    asyncio.run(run())
