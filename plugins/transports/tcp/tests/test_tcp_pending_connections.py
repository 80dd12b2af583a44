"""Clients of the listener that are no callers: refused with a reason where it helps, within limits."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from dynamo_core import Endpoint, EngineContext, ServedContext
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.acceptor import BURST, PACE
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.frames import frame
from dynamo_plugin_transport_tcp.messages import MAGIC, Challenge, Hello, Proof, Ready, caller_decoder, pack
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_wire import Accepted, Ack, Bye, Open, Ping, Pong, encode

from plugins.conftest import until

Make = Callable[..., TcpTransport]

#: Loops behave alike here: the other one runs in the long lanes.
QUICK_LOOP = "uvloop"
WAIT = 10.0
BYTES = Endpoint("bytes", int, bytes)
OTHER = Endpoint("other", int, bytes)
TEXT = Endpoint("text", str, bytes)


class RawClient:
    """A socket on which anything can be said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonce: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._nonce = nonce

    @classmethod
    async def at(cls, address: str, limit: int = 65536, host: str = "127.0.0.1") -> RawClient:
        place = Address.parse(address)
        streams = await asyncio.open_connection(place.host, place.port, limit=limit, local_addr=(host, 0))
        return cls(*streams, place.nonce)

    def say(self, *data: bytes) -> None:
        self._writer.write(b"".join(data))

    def hello(self, **other: Any) -> bytes:
        message = Hello(MAGIC, 1, self._nonce, bytes(32), 1 << 20)
        return pack(msgspec.structs.replace(message, **other))

    async def hear(self) -> Any:
        async with asyncio.timeout(WAIT):
            length = int.from_bytes(await self._reader.readexactly(4), "big")
            return caller_decoder.decode(await self._reader.readexactly(length))

    async def farewell(self) -> str:
        """Return why the listener closed the connection, which it must have done."""
        bye = await self.hear()
        assert isinstance(bye, Bye)
        async with asyncio.timeout(WAIT):
            assert await self._reader.read() == b""
        self.leave()
        return bye.error.message

    async def shake_hands(self) -> None:
        self.say(self.hello())
        assert isinstance(await self.hear(), Challenge)
        self.say(pack(Proof(b"")))
        assert isinstance(await self.hear(), Ready)

    def buffer_little(self) -> None:
        """Let the system keep little of what is not read."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def leave(self) -> None:
        self._writer.transport.abort()


async def nothing(request: object, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield b""

    return items()


async def serve(transport: TcpTransport, handler: Any = nothing) -> str:
    return (await transport.serve(7, BYTES, handler)).address["tcp"]


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "announced"),
        (b"\xff\xff\xff\xff", "announced"),
        ((4097).to_bytes(4, "big"), "at most 4096"),
        (frame(b"\xc1"), "cannot be understood"),
        (frame(b"\x91" * 4000), "cannot be understood"),
        (pack(Open(1, 7, "bytes", "r", "r", {}, msgspec.Raw(encode(1)))), "Open was not expected now"),
        (pack(Proof(b"")), "Proof was not expected now"),
    ],
)
async def test_an_invalid_handshake_is_refused_with_the_reason(make_transport: Make, said: bytes, answer: str) -> None:
    client = await RawClient.at(await serve(make_transport()))

    client.say(said)

    assert answer in await client.farewell()


async def test_other_protocols_versions_and_processes_are_refused_by_name(make_transport: Make) -> None:
    address = await serve(make_transport())
    answers = []

    for other in ({"proto": 2}, {"proto": 0}, {"magic": b"http"}, {"wanted": bytes(16)}):
        client = await RawClient.at(address)
        client.say(client.hello(**other))
        answers.append(await client.farewell())

    assert answers[0].startswith("protocol 2 is not understood here, only 1")
    assert answers[1].startswith("protocol 0")
    assert answers[2] == "this is another protocol"
    assert answers[3].startswith("not me")


async def test_a_handshake_that_is_not_finished_is_cut_after_the_deadline(make_transport: Make) -> None:
    address = await serve(make_transport(connect_timeout=0.3))
    silent, halfway = await RawClient.at(address), await RawClient.at(address)
    halfway.say(halfway.hello())
    assert isinstance(await halfway.hear(), Challenge)

    assert "longer than 0.3 s" in await silent.farewell()
    assert "longer than 0.3 s" in await halfway.farewell()


async def test_a_handshake_without_the_secret_is_refused(make_transport: Make) -> None:
    address = await serve(make_transport(secret="a secret of some length"))

    for proof in (b"", bytes(32)):
        client = await RawClient.at(address)
        client.say(client.hello())
        assert (await client.hear()).secret
        client.say(pack(Proof(proof)))
        assert "secrets" in await client.farewell()


@pytest.mark.parametrize(
    "said",
    [
        frame(b"\xc1"),
        frame(encode([99, 1])),
        pack(Ready(b"")),
        pack(Proof(b"")),
        pack(Ack(1)),
        (1 << 30).to_bytes(4, "big"),
        pack(Open(1, 7, "bytes", "r", "r", {}, msgspec.Raw(encode(1)))) * 2,
    ],
)
async def test_a_caller_that_talks_nonsense_is_cut_and_others_are_not(make_transport: Make, said: bytes) -> None:
    server = make_transport()
    bad, good = [await RawClient.at(await address) for address in (serve(server), _address(server))]
    await bad.shake_hands()
    await good.shake_hands()

    bad.say(said)

    assert await bad.farewell()
    good.say(pack(Ping()))
    assert isinstance(await good.hear(), Pong)
    good.leave()


async def _address(server: TcpTransport) -> str:
    return (await server.serve(8, BYTES, nothing)).address["tcp"]


async def test_a_caller_that_reads_nothing_is_cut_and_its_handlers_end(make_transport: Make) -> None:
    left = asyncio.Event()
    waited: list[ServedContext] = []

    async def plenty(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            waited.append(ctx)
            try:
                while True:
                    yield bytes(65536)
            finally:
                left.set()

        return items()

    server = make_transport(write_stall=0.2, write_high_water_kb=64)
    client = await RawClient.at(await serve(server, plenty), limit=1024)
    await client.shake_hands()

    client.say(pack(Open(1, 7, "bytes", "r", "r", {}, msgspec.Raw(encode(1)))))
    assert isinstance(await client.hear(), Accepted)
    async with asyncio.timeout(WAIT):
        await left.wait()

    assert not waited[0].is_stopped()
    client.leave()


async def test_answers_to_an_unreading_caller_are_bounded(make_transport: Make) -> None:
    server = make_transport(write_high_water_kb=64)
    client = await RawClient.at(await serve(server), limit=1024)
    client.buffer_little()
    await client.shake_hands()
    [link] = server._registry.links

    # More than all socket buffers on the way hold.
    client.say(pack(Ping()) * 1_000_000)
    await until(lambda: link.blocked)
    for _ in range(100):
        await asyncio.sleep(0)

    assert link._transport is not None
    # What one turn of a loop reads and answers, which is far less than all of it.
    assert link._transport.get_write_buffer_size() < 8 << 20
    client.leave()


# Many at once.


def silent(address: str, number: int, *, said: bytes = b"", host: str = "127.0.0.1") -> list[socket.socket]:
    """Return connections that say this, and then nothing."""
    there = Address.parse(address)
    made = []
    for _ in range(number):
        made.append(socket.create_connection((there.host, there.port), source_address=(host, 0)))
        made[-1].sendall(said)
    return made


def is_open(connection: socket.socket) -> bool:
    """Return whether the other end has not closed it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


async def left(connections: list[socket.socket], number: int) -> list[socket.socket]:
    """Return those that are open, as soon as they are so few."""
    await until(lambda: sum(map(is_open, connections)) <= number)
    return [one for one in connections if is_open(one)]


#: Nothing, the beginning of what could be a probe, and of a handshake that never comes.
WORDS = [b"", b"\x00\x00", b"\x00\x00\x0f\xff" + b"x" * 100]


@pytest.mark.parametrize("said", WORDS, ids=["nothing", "two bytes", "half a frame"])
async def test_a_flood_of_silent_connections_keeps_no_caller_out(
    make_transport: Make, recorder: Any, said: bytes
) -> None:
    server, client, sink = make_transport(max_connections=8), make_transport(), recorder()
    address = await serve(server)

    flood = silent(address, 200, said=said)
    await client.call(Instance(instance_id=7, address={"tcp": address}), BYTES, 0, EngineContext("r"), sink)

    assert await sink.end() is None
    assert 0 < len(await left(flood, 128)) <= 128
    for connection in flood:
        connection.close()


async def test_the_oldest_silent_connection_makes_room_one_of_a_known_host_last(
    make_transport: Make, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    server, client, sink = make_transport(metrics, max_silent=4), make_transport(), recorder()
    closed = metrics.counter("dynamo_tcp_silent_connections_closed_total", "").labels()
    address = await serve(server)
    await client.call(Instance(instance_id=7, address={"tcp": address}), BYTES, 0, EngineContext("r"), sink)
    await sink.end()

    known = silent(address, 2)
    strange = silent(address, 6, host="127.0.0.2")

    assert await left(strange, 2) == strange[-2:]
    assert await left(known, 2) == known
    assert closed.value == 4
    told = [record.getMessage() for record in caplog.records if "max_silent" in record.getMessage()]
    assert len(told) == 1
    assert "127.0.0.2" in told[0]
    for connection in (*known, *strange):
        connection.close()


async def test_repeated_invalid_connections_of_a_host_are_warned_about_once(
    make_transport: Make, caplog: pytest.LogCaptureFixture
) -> None:
    address = await serve(make_transport())

    for _ in range(20):
        client = await RawClient.at(address)
        client.say(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert "announced" in await client.farewell()

    told = [record.getMessage() for record in caplog.records if "is closed" in record.getMessage()]
    assert len(told) == 1
    assert "announced" in told[0]


async def test_while_the_event_loop_is_blocked_silent_connections_stay_few(make_transport: Make) -> None:
    address = await serve(make_transport(max_silent=8))
    before = len(os.listdir("/proc/self/fd"))

    flood = [connection for said in WORDS for connection in silent(address, 20, said=said)]
    # This loop has no turn meanwhile: only the thread has.
    deadline = time.monotonic() + WAIT
    while sum(map(is_open, flood)) > 8 and time.monotonic() < deadline:
        time.sleep(0.01)  # noqa: ASYNC251
    accepted = len(os.listdir("/proc/self/fd")) - before - len(flood)

    assert 0 < accepted <= 8
    for connection in flood:
        connection.close()


async def test_an_idle_caller_is_evicted_when_all_places_are_taken(make_transport: Make, recorder: Any) -> None:
    async def wait(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            yield b"begun"
            await ctx.stopped()

        return items()

    server = make_transport(max_connections=2)
    await server.serve(7, BYTES, wait)
    instance = Instance(instance_id=7, address={"tcp": await serve_more(server)})
    busy, idle, new, last = (make_transport() for _ in range(4))
    sinks = [recorder() for _ in range(4)]
    await busy.call(instance, BYTES, 0, EngineContext("r"), sinks[0])
    await idle.call(instance, OTHER, 0, EngineContext("r"), sinks[1])
    await sinks[1].end()

    await new.call(instance, BYTES, 0, EngineContext("r"), sinks[2])

    await sinks[2].until(lambda: sinks[2].items)
    assert sinks[0].ends == []
    with pytest.raises(CannotConnect, match="no more are accepted"):
        await last.call(instance, BYTES, 0, EngineContext("r"), sinks[3])


async def serve_more(transport: TcpTransport) -> str:
    return (await transport.serve(7, OTHER, nothing)).address["tcp"]


async def test_callers_that_stop_in_the_handshake_keep_no_other_out(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(max_connections=4), make_transport(), recorder()
    address = await serve(server)
    halfway = [await RawClient.at(address) for _ in range(8)]
    for one in halfway:
        one.say(one.hello())
        assert isinstance(await one.hear(), Challenge)

    await client.call(Instance(instance_id=7, address={"tcp": address}), BYTES, 0, EngineContext("r"), sink)

    assert await sink.end() is None
    for one in halfway:
        one.leave()


async def test_the_host_with_the_most_silent_connections_makes_room(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(max_silent=4), make_transport(), recorder()
    address = await serve(server)
    await client.call(Instance(instance_id=7, address={"tcp": address}), BYTES, 0, EngineContext("r"), sink)
    await sink.end()

    stranger = silent(address, 1, host="127.0.0.2")
    # From where callers come, too.
    flood = silent(address, 20)

    assert len(await left(flood, 3)) == 3
    assert await left(stranger, 1) == stranger
    for connection in (*stranger, *flood):
        connection.close()


async def test_connections_are_accepted_at_a_bounded_pace(make_transport: Make) -> None:
    server = make_transport(max_silent=4096)
    address = await serve(server)
    before, begun = len(os.listdir("/proc/self/fd")), time.monotonic()

    # As many as may wait in the system, too.
    flood = silent(address, 400)
    accepted = len(os.listdir("/proc/self/fd")) - before - len(flood)
    seconds = time.monotonic() - begun

    assert accepted <= BURST + 1 + seconds / PACE
    for connection in flood:
        connection.close()


async def test_frames_that_are_begun_take_bounded_memory(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(max_frame_mb=1), make_transport(), recorder()
    address = await serve(server)
    await server.serve(8, TEXT, nothing)
    opening = pack(Open(1, 8, "text", "r", "r", {}, msgspec.Raw(encode("x" * (1000 << 10)))))
    begun = len(opening) * 9 // 10
    flood = [await RawClient.at(address, host="127.0.0.2") for _ in range(6)]
    for one in flood:
        await one.shake_hands()
    links, instance = set(server._registry.links), Instance(instance_id=8, address={"tcp": address})

    def held() -> int:
        return sum(link.splitter.held for link in links)

    for one in flood:
        one.say(opening[:begun])
    await until(lambda: held() >= 2 << 20)
    most = 0
    for _ in range(300):
        await asyncio.sleep(0)
        most = max(most, held())
    # Half of four frames, the one that goes on, and what one read of each connection brings.
    assert most <= (3 << 20) + 6 * (256 << 10) < 6 * begun

    # Another host has its own share, and the last of the flood that goes on is served as well.
    await client.call(instance, TEXT, "x" * (1000 << 10), EngineContext("r"), sink)
    assert await sink.end() is None
    flood[-1].say(opening[begun:])
    async with asyncio.timeout(WAIT):
        while isinstance(heard := await flood[-1].hear(), Pong):
            continue
    assert isinstance(heard, Accepted)
    for one in flood:
        one.leave()
