"""Whoever connects to the listener without being a caller: refused, by name where it helps, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import pytest
from dynamo_core.contracts.call import Endpoint, ServedContext
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.frames import frame
from dynamo_plugin_transport_tcp.messages import (
    MAGIC,
    Accepted,
    Bye,
    Challenge,
    Hello,
    Open,
    Ping,
    Pong,
    Proof,
    Ready,
    Taken,
    caller_decoder,
    encode,
    pack,
)
from dynamo_plugin_transport_tcp.transport import TcpTransport

Make = Callable[..., TcpTransport]

WAIT = 10.0
BYTES = Endpoint("bytes", int, bytes)


class Stranger:
    """A socket on which anything can be said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, nonce: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._nonce = nonce

    @classmethod
    async def at(cls, address: str, limit: int = 65536) -> Stranger:
        place = Address.parse(address)
        return cls(*await asyncio.open_connection(place.host, place.port, limit=limit), place.nonce)

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
        """Why the listener closed the connection, which it must have done."""
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

    def leave(self) -> None:
        self._writer.transport.abort()


async def nothing(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
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
async def test_what_is_no_handshake_is_answered_with_the_reason_and_closed(
    make_transport: Make, said: bytes, answer: str
) -> None:
    stranger = await Stranger.at(await serve(make_transport()))

    stranger.say(said)

    assert answer in await stranger.farewell()


async def test_other_protocols_versions_and_processes_are_refused_by_name(make_transport: Make) -> None:
    address = await serve(make_transport())
    answers = []

    for other in ({"proto": 2}, {"proto": -1}, {"magic": b"http"}, {"wanted": bytes(16)}):
        stranger = await Stranger.at(address)
        stranger.say(stranger.hello(**other))
        answers.append(await stranger.farewell())

    assert answers[0].startswith("protocol 2 is not understood here, only 1 and 0")
    assert answers[1].startswith("protocol -1")
    assert answers[2] == "this is another protocol"
    assert answers[3].startswith("not me")


async def test_the_version_before_is_accepted(make_transport: Make) -> None:
    stranger = await Stranger.at(await serve(make_transport()))

    stranger.say(stranger.hello(proto=0))
    challenge = await stranger.hear()
    stranger.say(pack(Proof(b"")))

    assert challenge.proto == 0
    assert isinstance(await stranger.hear(), Ready)
    stranger.leave()


async def test_a_handshake_that_is_not_finished_is_cut_after_the_deadline(make_transport: Make) -> None:
    address = await serve(make_transport(connect_timeout=0.1))
    silent, halfway = await Stranger.at(address), await Stranger.at(address)
    halfway.say(halfway.hello())
    assert isinstance(await halfway.hear(), Challenge)

    assert "longer than 0.1 s" in await silent.farewell()
    assert "longer than 0.1 s" in await halfway.farewell()


async def test_without_the_secret_nobody_is_let_in(make_transport: Make) -> None:
    address = await serve(make_transport(secret="a secret of some length"))

    for proof in (b"", bytes(32)):
        stranger = await Stranger.at(address)
        stranger.say(stranger.hello())
        assert (await stranger.hear()).secret
        stranger.say(pack(Proof(proof)))
        assert "secrets" in await stranger.farewell()


@pytest.mark.parametrize(
    "said",
    [
        frame(b"\xc1"),
        frame(encode([99, 1])),
        pack(Ready(b"")),
        pack(Proof(b"")),
        pack(Taken(1)),
        (1 << 30).to_bytes(4, "big"),
        pack(Open(1, 7, "bytes", "r", "r", {}, msgspec.Raw(encode(1)))) * 2,
    ],
)
async def test_a_caller_that_talks_nonsense_is_cut_and_others_are_not(make_transport: Make, said: bytes) -> None:
    server = make_transport()
    bad, good = [await Stranger.at(await address) for address in (serve(server), _address(server))]
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
    stranger = await Stranger.at(await serve(server, plenty), limit=1024)
    await stranger.shake_hands()

    stranger.say(pack(Open(1, 7, "bytes", "r", "r", {}, msgspec.Raw(encode(1)))))
    assert isinstance(await stranger.hear(), Accepted)
    async with asyncio.timeout(WAIT):
        await left.wait()

    assert not waited[0].is_stopped()
    stranger.leave()


async def test_answers_do_not_pile_up_for_a_caller_that_asks_and_never_reads(make_transport: Make) -> None:
    server = make_transport(write_high_water_kb=64)
    stranger = await Stranger.at(await serve(server), limit=1024)
    await stranger.shake_hands()
    [link] = server._registry.links

    # More than all socket buffers on the way hold.
    stranger.say(pack(Ping()) * 4_000_000)
    async with asyncio.timeout(WAIT):
        while not link.blocked:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)

    assert link._transport is not None
    # What one turn of a loop reads and answers, which is far less than all of it.
    assert link._transport.get_write_buffer_size() < 8 << 20
    stranger.leave()
