"""The fault proxy: each fault, seen from both ends of real connections, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from dynamo_core import TaskSet
from dynamo_testing.faults import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    Direction,
    Drop,
    Duplicate,
    Fault,
    FaultProxy,
    Frame,
    HalfOpen,
    Lane,
    Passing,
    Raw,
    Reorder,
    Throttle,
)
from dynamo_testing.faults.link import reset

WAIT = 10.0


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@dataclass
class Wire:
    """One end of a connection that speaks in frames. Every wait has a deadline."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, *bodies: bytes) -> None:
        self.writer.write(b"".join(framed(body) for body in bodies))
        async with asyncio.timeout(WAIT):
            await self.writer.drain()

    async def hear(self, count: int = 1) -> list[bytes]:
        """Return the next frames."""
        async with asyncio.timeout(WAIT):
            return [await self._frame() for _ in range(count)]

    async def _frame(self) -> bytes:
        return await self.reader.readexactly(int.from_bytes(await self.reader.readexactly(4), "big"))

    async def rest(self) -> bytes:
        """Return all bytes up to the end."""
        async with asyncio.timeout(WAIT):
            return await self.reader.read()

    async def reset(self) -> bool:
        """Return whether the connection ends by being reset."""
        try:
            await self.rest()
        except ConnectionResetError:
            return True
        return False

    async def close(self) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


class Echo:
    """Says again what it hears, unless it is `mute`; the connections it has got are in `wires`."""

    def __init__(self) -> None:
        self.mute = False
        self.wires: list[Wire] = []
        self.port = 0
        self._tasks = TaskSet()
        self._server: asyncio.Server | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.wires.append(Wire(reader, writer))
        self._news.set()
        if not self.mute:
            self._tasks.spawn(self._echo(reader, writer), name="echo")

    async def _echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
            writer.close()

    async def wire(self, number: int = 0) -> Wire:
        """Return the connection that came as this one."""
        async with asyncio.timeout(WAIT):
            while len(self.wires) <= number:
                self._news.clear()
                await self._news.wait()
        return self.wires[number]

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._tasks.aclose()
        for wire in self.wires:
            await wire.close()


Connect = Callable[..., Awaitable[Wire]]


@pytest.fixture
async def echo() -> AsyncIterator[Echo]:
    server = Echo()
    await server.start()
    yield server
    await server.aclose()


@pytest.fixture
async def proxy(echo: Echo) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", echo.port) as proxy:
        yield proxy


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Make clients that begin with these frames, and close them at the end."""
    made: list[Wire] = []

    async def connect(proxy: FaultProxy, *said: bytes) -> Wire:
        wire = Wire(*await asyncio.open_connection(proxy.host, proxy.port))
        made.append(wire)
        if said:
            await wire.say(*said)
        return wire

    yield connect
    for wire in made:
        await wire.close()


@asynccontextmanager
async def unheard(wire: Wire) -> AsyncIterator[None]:
    """Assert that nothing reaches this end, from now on and during the block."""
    reading = asyncio.ensure_future(wire.reader.read(1))
    yield
    assert not reading.done(), "something was heard"
    reading.cancel()
    await asyncio.wait([reading])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - what it asks for has no event
            await asyncio.sleep(0.005)


async def pass_beside(echo: Echo, proxy: FaultProxy, connect: Connect) -> None:
    """Time in which what was under way would have come: one question and one answer on a connection of their own."""
    number = len(echo.wires)
    client, server = await connect(proxy), await echo.wire(number)
    await client.say(b"question")
    await server.hear()
    await server.say(b"answer")
    await client.hear()
    await client.close()
    await server.close()


NUMBERS = [b"0", b"1", b"2", b"3"]


async def test_without_faults_frames_and_ends_pass_in_both_directions(
    echo: Echo, proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect(proxy, *NUMBERS)
    client.writer.write_eof()

    assert await client.hear(4) == NUMBERS
    assert await client.rest() == b""
    await until(lambda: proxy.connections == 0)


class Shout(Fault):
    """A fault of the test's own."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        await lane.send(frame.head + frame.body.upper())


Rules = list[tuple[Fault, dict[str, Any]]]
UP, DOWN = {"direction": Direction.UP}, {"direction": Direction.DOWN}


@pytest.mark.parametrize(
    ("rules", "said", "heard", "met"),
    [
        ([(Drop(), UP | {"at": 1})], NUMBERS, [b"0", b"2", b"3"], [1]),
        ([(Drop(), DOWN | {"at": 1})], NUMBERS, [b"0", b"2", b"3"], [1]),
        # For either direction each is counted for itself.
        ([(Drop(), {"at": 2, "times": None})], NUMBERS, [b"0", b"1"], [2, 3]),
        ([(Duplicate(), UP | {"at": 2})], NUMBERS, [b"0", b"1", b"2", b"2", b"3"], [2]),
        ([(Reorder(), DOWN | {"at": 1})], NUMBERS, [b"0", b"2", b"1", b"3"], [1]),
        # Two in a row move one after the other.
        ([(Reorder(), UP | {"at": 0, "times": 2})], NUMBERS, [b"0", b"2", b"1", b"3"], None),
        ([(Corrupt(0), UP)], [b"abc", b"def"], [b"\x9ebc", b"def"], [0]),
        ([(Corrupt(-1), UP)], [b"abc", b"def"], [b"ab\x9c", b"def"], [0]),
        # Frames without the byte are not counted.
        ([(Corrupt(offset=2, flip=1), UP)], [b"", b"xy", b"xyz"], [b"", b"xy", b"xy{"], [2]),
        ([(Throttle(100_000), UP)], [bytes(range(256)) * 20, b"0"], [bytes(range(256)) * 20, b"0"], None),
        ([(Delay(0.02), DOWN | {"times": None})], NUMBERS, NUMBERS, [0, 1, 2, 3]),
        (
            [(Drop(), UP | {"when": lambda body: body.startswith(b"b"), "at": 1})],
            [b"a1", b"b1", b"a2", b"b2", b"b3"],
            [b"a1", b"b1", b"a2", b"b3"],
            [3],
        ),
        # Of several the oldest applies, and all of them count.
        (
            [(Duplicate(), UP | {"at": 2}), (Drop(), UP | {"at": 1})][::-1],
            NUMBERS,
            [b"0", b"2", b"2", b"3"],
            [1],
        ),
        ([(Shout(), UP)], [b"quiet"], [b"QUIET"], [0]),
    ],
)
async def test_rule_changes_the_frames_that_it_is_for_and_no_others(
    proxy: FaultProxy, connect: Connect, rules: Rules, said: list[bytes], heard: list[bytes], met: list[int] | None
) -> None:
    laid = [proxy.plan.inject(fault, **options) for fault, options in rules]
    client = await connect(proxy, *said)

    assert await client.hear(len(heard)) == heard
    assert met is None or [passing.number for passing in laid[0].met] == met


async def test_a_frame_that_was_to_change_places_with_none_comes_before_the_end(
    proxy: FaultProxy, connect: Connect
) -> None:
    proxy.plan.inject(Reorder(), direction=Direction.UP, at=3)
    client = await connect(proxy, *NUMBERS)
    client.writer.write_eof()

    assert await client.rest() == b"".join(framed(body) for body in NUMBERS)


async def test_a_cut_resets_both_ends_and_the_frame_is_lost(echo: Echo, proxy: FaultProxy, connect: Connect) -> None:
    echo.mute = True
    proxy.plan.inject(Cut(), direction=Direction.UP, at=1)
    client = await connect(proxy)
    server = await echo.wire()

    await client.say(b"0")
    heard = await server.hear()
    await client.say(b"1")

    assert heard == [b"0"]
    assert await client.reset()
    assert await server.reset()
    await until(lambda: proxy.connections == 0)


async def test_a_cut_may_fall_into_the_middle_of_a_frame(echo: Echo, proxy: FaultProxy, connect: Connect) -> None:
    echo.mute = True
    proxy.plan.inject(Cut(keep=6), direction=Direction.DOWN)
    client = await connect(proxy)
    server = await echo.wire()
    # A reader that was reset would no longer give out what came before: so it is asked first.
    begun = asyncio.ensure_future(client.reader.readexactly(6))

    await server.say(b"hello")

    assert await asyncio.wait_for(begun, WAIT) == framed(b"hello")[:6]
    assert await client.reset()


async def test_cut_resets_open_connections_and_carries_new_ones(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect(proxy, b"0")
    await client.hear()

    proxy.cut()

    assert await client.reset()
    again = await connect(proxy, b"1")
    assert await again.hear() == [b"1"]


@pytest.mark.parametrize("how", ["closes", "resets"])
async def test_a_black_hole_swallows_both_directions_and_keeps_both_connections(
    echo: Echo, proxy: FaultProxy, connect: Connect, how: str
) -> None:
    echo.mute = True
    rule = proxy.plan.inject(BlackHole(), direction=Direction.UP, at=1)
    client = await connect(proxy)
    server = await echo.wire()
    await client.say(b"0")
    await server.hear()

    async with unheard(client), unheard(server):
        await client.say(b"1", b"2")
        await rule.hit()
        # More than all buffers together: whoever sends into the hole is not told that nobody is there.
        await client.say(*[bytes(8000)] * 1000)
        await server.say(*[bytes(8000)] * 1000)
        await pass_beside(echo, proxy, connect)
    async with unheard(server):
        if how == "resets":
            reset(client.writer)
        await client.close()
        await server.say(b"still there?")
        await pass_beside(echo, proxy, connect)

    await until(lambda: proxy.connections == 1)
    await server.close()
    await until(lambda: proxy.connections == 0)


async def test_a_removed_black_hole_lets_new_connections_pass(proxy: FaultProxy, connect: Connect) -> None:
    rule = proxy.plan.inject(BlackHole(), times=None)
    lost = await connect(proxy, b"0")
    await rule.hit()

    proxy.plan.clear()
    found = await connect(proxy, b"1")

    assert await found.hear() == [b"1"]
    async with unheard(lost):
        await lost.say(b"2")
        await found.say(b"3")
        await found.hear()


@pytest.mark.parametrize("dead", Direction)
async def test_a_half_open_connection_carries_the_other_direction_only(
    echo: Echo, proxy: FaultProxy, connect: Connect, dead: Direction
) -> None:
    echo.mute = True
    rule = proxy.plan.inject(HalfOpen(), direction=dead)
    client = await connect(proxy)
    server = await echo.wire()
    speaker, listener = (client, server) if dead is Direction.UP else (server, client)

    async with unheard(listener):
        await speaker.say(b"lost")
        await rule.hit()
        await listener.say(b"0", b"1")
        assert await speaker.hear(2) == [b"0", b"1"]
        await speaker.close()
        # Whether what is said now finds nobody is told in the dead direction: so it is not told.
        with suppress(OSError):
            await listener.say(b"2", b"3")
        await pass_beside(echo, proxy, connect)

    await until(lambda: proxy.connections == 1)


async def test_a_delayed_frame_holds_up_those_behind_it_and_not_the_other_direction(
    echo: Echo, proxy: FaultProxy, connect: Connect
) -> None:
    echo.mute = True
    rule = proxy.plan.inject(Delay(3600), direction=Direction.UP, at=1)
    client = await connect(proxy)
    server = await echo.wire()

    await client.say(*NUMBERS)
    heard = await server.hear()
    await rule.hit()
    async with unheard(server):
        await server.say(b"answer")
        assert await client.hear() == [b"answer"]

    assert heard == [b"0"]
    proxy.cut()
    assert await client.reset()
    # A cut does not wait for what is delayed.
    await until(lambda: proxy.connections == 0)


@pytest.mark.parametrize("slow", ["a throttled direction", "a server that does not read"])
async def test_direction_is_read_no_faster_than_it_is_sent(
    echo: Echo, proxy: FaultProxy, connect: Connect, slow: str
) -> None:
    if slow.startswith("a throttled"):
        proxy.plan.inject(Throttle(1000), direction=Direction.UP)
    echo.mute = True
    client = await connect(proxy)
    await echo.wire()

    # More than the sockets hold: what is more would be held by the proxy.
    client.writer.write(framed(bytes(60_000)) * 1000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.writer.drain(), 0.5)

    client.writer.transport.abort()


async def test_a_rule_counts_from_when_it_was_laid_down(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect(proxy, b"0", b"1")
    await client.hear(2)

    rule = proxy.plan.inject(Drop(), direction=Direction.UP, at=1)
    await client.say(b"2", b"3", b"4")

    assert await client.hear(2) == [b"2", b"4"]
    assert rule.met[0].number == 3


async def test_a_rule_counts_the_frames_of_each_connection_for_itself(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Drop(), direction=Direction.UP, at=1, times=None)
    clients = [await connect(proxy) for _ in range(2)]

    for client in clients:
        await client.say(*NUMBERS)

    assert [await client.hear() for client in clients] == [[b"0"], [b"0"]]
    for client in clients:
        async with unheard(client):
            await client.say(b"4")


async def test_a_rule_may_be_for_one_connection(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Drop(), direction=Direction.UP, connection=1)
    first = await connect(proxy, b"0")
    assert await first.hear() == [b"0"]
    second = await connect(proxy, b"0", b"1")

    assert await second.hear() == [b"1"]


async def test_a_rule_that_is_removed_applies_no_more(proxy: FaultProxy, connect: Connect) -> None:
    rule = proxy.plan.inject(Drop(), direction=Direction.UP, times=None)
    client = await connect(proxy, b"0")
    await rule.hit()

    proxy.plan.remove(rule)
    proxy.plan.remove(rule)
    await client.say(b"1")

    assert await client.hear() == [b"1"]


async def test_a_hit_that_never_comes_is_a_timeout(proxy: FaultProxy) -> None:
    with pytest.raises(TimeoutError):
        await proxy.plan.inject(Drop()).hit(timeout=0.01)


async def test_the_tap_sees_every_frame_before_its_fault(echo: Echo, connect: Connect) -> None:
    seen: list[Passing] = []
    async with FaultProxy("127.0.0.1", echo.port, tap=seen.append) as proxy:
        proxy.plan.inject(Drop(), direction=Direction.DOWN, at=1)
        client = await connect(proxy, b"0", b"1")
        await client.hear()
        await until(lambda: len(seen) == 4)

    assert [passing.body for passing in seen if passing.direction is Direction.UP] == [b"0", b"1"]
    assert [passing.body for passing in seen if passing.direction is Direction.DOWN] == [b"0", b"1"]


async def test_without_frames_every_piece_that_arrives_counts(echo: Echo, connect: Connect) -> None:
    async with FaultProxy("127.0.0.1", echo.port, framing=Raw()) as proxy:
        lost = proxy.plan.inject(Drop(), direction=Direction.UP)
        client = await connect(proxy)

        client.writer.write(b"\xff\xff no frame at all")
        await lost.hit()
        client.writer.write(b"passes")

        assert await asyncio.wait_for(client.reader.readexactly(6), WAIT) == b"passes"


async def test_a_length_that_cannot_be_one_ends_the_connection(
    proxy: FaultProxy, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect(proxy)

    with caplog.at_level(logging.WARNING):
        client.writer.write(b"GET / HTTP/1.1\r\n")

        assert await client.reset()
    assert "bytes was announced" in caplog.text


async def test_a_failing_predicate_ends_the_connection_and_is_logged(
    proxy: FaultProxy, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.plan.inject(Drop(), when=lambda body: body[100] == 0)
    client = await connect(proxy, b"short")

    assert await client.reset()
    await until(lambda: proxy.connections == 0)
    assert "IndexError" in caplog.text


async def test_a_server_that_cannot_be_reached_is_a_reset(proxy: FaultProxy, connect: Connect) -> None:
    closed = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    proxy.target = closed.sockets[0].getsockname()[:2]
    closed.close()
    await closed.wait_closed()

    assert await (await connect(proxy)).reset()


async def test_a_server_that_was_moved_is_found_by_new_connections(
    echo: Echo, proxy: FaultProxy, connect: Connect
) -> None:
    other = Echo()
    await other.start()
    proxy.target = "127.0.0.1", other.port

    client = await connect(proxy, b"0")

    assert await client.hear() == [b"0"]
    assert echo.wires == []
    await other.aclose()


async def test_the_reset_of_one_end_is_passed_on_to_the_other(echo: Echo, proxy: FaultProxy, connect: Connect) -> None:
    echo.mute = True
    client = await connect(proxy, b"0")
    server = await echo.wire()
    await server.hear()

    reset(client.writer)

    assert await server.reset()
    await until(lambda: proxy.connections == 0)


@pytest.mark.parametrize("fault", [None, BlackHole(), HalfOpen(), Delay(3600), Throttle(1)], ids=str)
async def test_closing_the_proxy_ends_every_connection(echo: Echo, connect: Connect, fault: Fault | None) -> None:
    before = asyncio.all_tasks()
    proxy = FaultProxy("127.0.0.1", echo.port)
    await proxy.start()
    if fault is not None:
        proxy.plan.inject(fault, times=None)
    clients = [await connect(proxy) for _ in range(3)]
    for client in clients[:2]:
        await client.say(bytes(5000))
        await echo.wire(clients.index(client))

    async with asyncio.timeout(WAIT):
        await proxy.aclose()
        await proxy.aclose()

    assert proxy.connections == 0
    for client in clients[:2]:
        assert await client.reset()
    with pytest.raises(ConnectionRefusedError):
        await connect(proxy)
    await until(lambda: asyncio.all_tasks() - before == set())


@pytest.mark.parametrize("make", [lambda: Throttle(0), lambda: Corrupt(flip=0), lambda: Corrupt(flip=256)])
def test_faults_that_do_nothing_are_refused(make: Callable[[], Fault]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
