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
        """The next frames."""
        async with asyncio.timeout(WAIT):
            return [await self._frame() for _ in range(count)]

    async def _frame(self) -> bytes:
        return await self.reader.readexactly(int.from_bytes(await self.reader.readexactly(4), "big"))

    async def rest(self) -> bytes:
        """All bytes up to the end."""
        async with asyncio.timeout(WAIT):
            return await self.reader.read()

    async def reset(self) -> bool:
        """Whether the connection ends by being reset."""
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
        """The connection that came as this one."""
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
    """Makes clients that begin with these frames, and closes them at the end."""
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
    """Nothing reaches this end, from now on and during the block."""
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


@pytest.mark.parametrize("direction", Direction)
async def test_a_dropped_frame_is_missing_and_the_others_are_not(
    proxy: FaultProxy, connect: Connect, direction: Direction
) -> None:
    rule = proxy.plan.inject(Drop(), direction=direction, at=1)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(3) == [b"0", b"2", b"3"]
    assert [(passing.direction, passing.number, passing.body) for passing in rule.met] == [(direction, 1, b"1")]


async def test_a_duplicated_frame_comes_twice(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Duplicate(), direction=Direction.UP, at=2)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(5) == [b"0", b"1", b"2", b"2", b"3"]


async def test_a_reordered_frame_changes_places_with_the_next(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Reorder(), direction=Direction.DOWN, at=1)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(4) == [b"0", b"2", b"1", b"3"]


async def test_a_frame_that_was_to_change_places_with_none_comes_before_the_end(
    proxy: FaultProxy, connect: Connect
) -> None:
    proxy.plan.inject(Reorder(), direction=Direction.UP, at=3)
    client = await connect(proxy, *NUMBERS)
    client.writer.write_eof()

    assert await client.rest() == b"".join(framed(body) for body in NUMBERS)


async def test_two_frames_in_a_row_that_are_reordered_move_one_after_the_other(
    proxy: FaultProxy, connect: Connect
) -> None:
    proxy.plan.inject(Reorder(), direction=Direction.UP, at=0, times=2)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(4) == [b"0", b"2", b"1", b"3"]


@pytest.mark.parametrize(("offset", "expected"), [(0, b"\x9ebc"), (-1, b"ab\x9c")])
async def test_a_corrupted_frame_has_one_wrong_byte(
    proxy: FaultProxy, connect: Connect, offset: int, expected: bytes
) -> None:
    proxy.plan.inject(Corrupt(offset), direction=Direction.UP)
    client = await connect(proxy, b"abc", b"def")

    assert await client.hear(2) == [expected, b"def"]


async def test_a_frame_without_the_byte_to_be_corrupted_is_not_counted(proxy: FaultProxy, connect: Connect) -> None:
    rule = proxy.plan.inject(Corrupt(offset=2, flip=1), direction=Direction.UP)
    client = await connect(proxy, b"", b"xy", b"xyz")

    assert await client.hear(3) == [b"", b"xy", b"xy{"]
    assert rule.met[0].number == 2


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


async def test_a_cut_by_hand_resets_what_is_open_and_new_connections_are_carried(
    proxy: FaultProxy, connect: Connect
) -> None:
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


async def test_a_black_hole_that_is_taken_back_lets_new_connections_pass(proxy: FaultProxy, connect: Connect) -> None:
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


async def test_what_was_delayed_comes_in_order(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Delay(0.02), direction=Direction.DOWN, times=None)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(4) == NUMBERS


async def test_a_throttled_direction_carries_everything_slower(proxy: FaultProxy, connect: Connect) -> None:
    loop = asyncio.get_running_loop()
    proxy.plan.inject(Throttle(200_000), direction=Direction.UP)
    client = await connect(proxy)
    body = bytes(range(256)) * 200

    begun = loop.time()
    await client.say(body)

    assert await client.hear() == [body]
    # Not a measurement: it cannot be faster.
    assert loop.time() - begun >= len(body) / 200_000 * 0.9


async def test_a_throttled_direction_reads_no_faster_than_it_sends(
    echo: Echo, proxy: FaultProxy, connect: Connect
) -> None:
    proxy.plan.inject(Throttle(1000), direction=Direction.UP)
    client = await connect(proxy)
    flood = framed(bytes(60_000)) * 500

    client.writer.write(flood)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.writer.drain(), 0.5)

    assert proxy.connections == 1
    client.writer.transport.abort()


async def test_a_server_that_does_not_read_holds_up_its_client(echo: Echo, proxy: FaultProxy, connect: Connect) -> None:
    echo.mute = True
    client = await connect(proxy)
    await echo.wire()

    # More than the sockets hold: what is more would be held by the proxy.
    client.writer.write(framed(bytes(60_000)) * 1000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.writer.drain(), 0.5)

    client.writer.transport.abort()


async def test_a_rule_may_ask_for_what_a_frame_says(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Drop(), direction=Direction.UP, when=lambda body: body.startswith(b"b"), at=1)
    client = await connect(proxy, b"a1", b"b1", b"a2", b"b2", b"b3")

    assert await client.hear(4) == [b"a1", b"b1", b"a2", b"b3"]


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


async def test_a_rule_for_either_direction_counts_each_for_itself(proxy: FaultProxy, connect: Connect) -> None:
    rule = proxy.plan.inject(Drop(), at=2, times=None)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(2) == [b"0", b"1"]
    assert [passing.number for passing in rule.met] == [2, 3]


async def test_a_rule_may_be_for_one_connection(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Drop(), direction=Direction.UP, connection=1)
    first = await connect(proxy, b"0")
    assert await first.hear() == [b"0"]
    second = await connect(proxy, b"0", b"1")

    assert await second.hear() == [b"1"]


async def test_of_several_rules_the_oldest_applies_and_all_of_them_count(proxy: FaultProxy, connect: Connect) -> None:
    proxy.plan.inject(Drop(), direction=Direction.UP, at=1)
    later = proxy.plan.inject(Duplicate(), direction=Direction.UP, at=2)
    client = await connect(proxy, *NUMBERS)

    assert await client.hear(4) == [b"0", b"2", b"2", b"3"]
    assert later.met[0].number == 2


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


async def test_faults_of_ones_own_may_be_written(proxy: FaultProxy, connect: Connect) -> None:
    class Shout(Fault):
        async def carry(self, frame: Frame, lane: Lane) -> None:
            await lane.send(frame.head + frame.body.upper())

    proxy.plan.inject(Shout(), direction=Direction.UP)
    client = await connect(proxy, b"quiet")

    assert await client.hear() == [b"QUIET"]


async def test_every_frame_is_shown_before_anything_happens_to_it(echo: Echo, connect: Connect) -> None:
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


async def test_a_predicate_that_fails_ends_the_connection_and_is_told(
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
async def test_closing_ends_everything_whatever_goes_on(echo: Echo, connect: Connect, fault: Fault | None) -> None:
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
