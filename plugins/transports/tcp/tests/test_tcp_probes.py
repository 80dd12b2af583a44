"""Probes: who is answered, what an answer is worth, and what callers make of it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core import Endpoint, EngineContext, ServedContext
from dynamo_core.errors import Disconnected, ResponseTimeout, chain_has
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.frames import HEAD
from dynamo_plugin_transport_tcp.messages import Challenge, Hello, Proof, Ready, listener_decoder, pack
from dynamo_plugin_transport_tcp.probes import ANSWER_LENGTH, ProbeKey, probe
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_testing.faults import Direction, FaultProxy, Throttle
from dynamo_testing.transport.worker_process import ITEMS, WORK, Elsewhere, Work
from dynamo_wire import Accepted, Open, liveness
from hypothesis import given
from hypothesis import strategies as st

Make = Callable[..., TcpTransport]

#: Loops behave alike here: the other one runs in the long lanes.
QUICK_LOOP = "asyncio"
WAIT = 10.0
SECRET = "sixteen or more characters"
ECHO = Endpoint("echo", bytes, bytes)


async def echo(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield request

    return items()


async def never(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        await ctx.stopped()
        yield b""

    return items()


async def place(transport: TcpTransport) -> Address:
    return Address.parse((await transport.serve(7, ECHO, echo)).address["tcp"])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Answers.


async def test_only_probes_with_nonce_and_secret_are_answered(make_transport: Make) -> None:
    there = await place(make_transport(secret=SECRET))
    secret = SECRET.encode()

    assert await probe(there.host, there.port, ProbeKey(secret, there.nonce)) == 0.0
    assert await probe(there.host, there.port, ProbeKey(None, there.nonce)) is None
    assert await probe(there.host, there.port, ProbeKey(secret, bytes(16))) is None


async def test_a_probe_in_pieces_is_answered_and_one_that_is_none_is_not(make_transport: Make) -> None:
    there = await place(make_transport(connect_timeout=0.3))
    key, challenge = ProbeKey(None, there.nonce), b"c" * 16
    said = key.probe(challenge)

    async def ask(*pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(there.host, there.port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.02)
        async with asyncio.timeout(WAIT):
            answer = await reader.read()
        writer.transport.abort()
        return answer

    whole = await ask(said[:3], said[3:11], said[11:30], said[30:])
    assert key.read_answer(challenge, whole) == 0.0
    assert await ask(said[:-1] + bytes([said[-1] ^ 1])) == b""
    assert key.read_answer(challenge, await ask(said[:30])) is None


@given(st.floats(0, 1e6), st.integers(HEAD, ANSWER_LENGTH - 1), st.integers(1, 255))
def test_no_byte_of_an_answer_can_be_changed_and_it_answers_one_probe_only(busy: float, at: int, flip: int) -> None:
    key, challenge = ProbeKey(b"secret", b"n" * 16), b"c" * 16
    answer = bytearray(key.answer(challenge, busy))

    assert key.read_answer(challenge, bytes(answer)) == busy
    assert key.read_answer(b"d" * 16, bytes(answer)) is None
    answer[at] ^= flip
    assert key.read_answer(challenge, bytes(answer)) is None


async def test_a_blocked_event_loop_is_reported_with_its_duration(make_transport: Make) -> None:
    there = await place(make_transport())
    key = ProbeKey(None, there.nonce)
    blocked, asked = threading.Event(), threading.Event()

    def ask() -> list[float | None]:
        async def twice() -> list[float | None]:
            return [await probe(there.host, there.port, key) for _ in range(2)]

        blocked.wait(WAIT)
        try:
            return asyncio.run(twice())
        finally:
            asked.set()

    asking = asyncio.create_task(asyncio.to_thread(ask))
    await asyncio.sleep(0)
    blocked.set()
    asked.wait(WAIT)  # This is the blocked loop.
    first, second = await asking

    assert first is not None
    assert second is not None
    assert 0 < first < second
    assert await probe(there.host, there.port, key) == 0.0


# The listener.


async def test_a_worker_is_called_and_probed_over_ipv6(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(bind="[::1]:0"), make_transport(), recorder()
    served = await server.serve(7, ECHO, echo)
    there = Address.parse(served.address["tcp"])

    await client.call(Instance(instance_id=7, address=served.address), ECHO, b"x", EngineContext("r"), sink)

    assert await sink.end() is None
    assert await probe(there.host, there.port, ProbeKey(None, there.nonce)) == 0.0


async def test_a_port_can_be_bound_again_as_soon_as_its_transport_is_closed(make_transport: Make) -> None:
    for _ in range(5):
        transport = make_transport(bind="127.0.0.1:0")
        there = await place(transport)
        assert await probe(there.host, there.port, ProbeKey(None, there.nonce)) == 0.0
        await transport.aclose()
        again = make_transport(bind=f"127.0.0.1:{there.port}")
        await place(again)
        await again.aclose()


async def test_no_socket_leaks_while_the_loop_is_blocked_or_the_transport_closes(
    make_transport: Make,
) -> None:
    before = descriptors()
    transport = make_transport()
    there = await place(transport)
    callers = []
    for number in range(60):
        caller = socket.create_connection((there.host, there.port))
        # A third is silent, a third begins a handshake, and a third is a probe that is not finished.
        caller.sendall([b"", b"GET / HTTP/1.1\r\n", ProbeKey(None, there.nonce).probe(bytes(16))[:20]][number % 3])
        callers.append(caller)
    time.sleep(0.3)  # noqa: ASYNC251 - this is the blocked loop

    async with asyncio.timeout(WAIT):
        await transport.aclose()
    for caller in callers:
        caller.close()

    async with asyncio.timeout(WAIT):
        # The event loops close their ends a turn later.
        while descriptors() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# The caller.


@pytest.fixture
async def elsewhere() -> AsyncIterator[Elsewhere]:
    """Yield a worker in a process of its own."""
    process = await Elsewhere.start(TcpTransport, {}, lease_ttl=30.0)
    yield process
    await process.end()


async def test_connect_and_accept_timeouts_wait_for_a_busy_loop_with_one_warning(
    make_transport: Make, recorder: Any, elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    short = {"heartbeat": 0.1, "connect_timeout": 0.7, "accept_timeout": 0.7}
    client, other = make_transport(**short), make_transport(**short)
    sinks = [recorder() for _ in range(3)]
    await client.call(elsewhere.instance, WORK, Work(block=2.0), EngineContext("r"), sinks[0])
    await sinks[0].until(lambda: len(sinks[0].items) >= ITEMS // 2)

    async with asyncio.TaskGroup() as group:
        for transport, sink in ((client, sinks[1]), (other, sinks[2])):
            group.create_task(transport.call(elsewhere.instance, WORK, Work(), EngineContext("s"), sink))

    assert [await sink.end() for sink in sinks] == [None] * 3
    assert [len(sink.items) for sink in sinks] == [ITEMS] * 3
    told = [record.getMessage() for record in caplog.records if "is busy" in record.getMessage()]
    assert len(told) == 1
    assert "2 calls wait" in told[0] or "1 calls wait" in told[0]


async def test_a_large_request_over_a_slow_link_is_not_a_silence(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(), make_transport(heartbeat=0.2, accept_timeout=60), recorder()
    there = await place(server)
    async with FaultProxy(there.host, there.port) as proxy:
        address = {"tcp": str(Address(proxy.host, proxy.port, there.nonce))}
        instance = Instance(instance_id=7, address=address, lease_ttl=0.2)
        proxy.plan.inject(Throttle(2_500_000), direction=Direction.UP, when=lambda body: len(body) > 1_000_000)

        await client.call(instance, ECHO, bytes(2_500_000), EngineContext("r"), sink)

        assert await sink.end() is None
        assert sink.items == [bytes(2_500_000)]


class Former(asyncio.Protocol):
    """A worker of the version before: it accepts one call, and then says nothing more."""

    def __init__(self) -> None:
        self.connections = 0
        self._held = b""

    def connection_made(self, transport: Any) -> None:
        self.connections += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= 4 and len(self._held) >= 4 + int.from_bytes(self._held[:4], "big"):
            end = 4 + int.from_bytes(self._held[:4], "big")
            body, self._held = self._held[4:end], self._held[end:]
            match listener_decoder.decode(body):
                case Hello():
                    # As it was: without the fields that came later.
                    fields = (Challenge.__struct_config__.tag, 1, bytes(32), 1 << 20, False)
                    self._transport.write(pack(fields))
                case Proof():
                    self._transport.write(pack(Ready(b"")))
                case Open(sid=sid):
                    self._transport.write(pack(Accepted(sid)))


async def test_a_worker_of_the_version_before_is_not_probed_and_judged_as_it_was(
    make_transport: Make, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "WITHOUT_PROBES", 0.5)
    former, client, sink = Former(), make_transport(heartbeat=0.1), recorder()
    server = await asyncio.get_running_loop().create_server(lambda: former, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    instance = Instance(instance_id=7, address={"tcp": str(Address(host, port, bytes(16)))}, lease_ttl=60.0)

    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    error = await sink.end()
    server.close()

    assert isinstance(error, Disconnected)
    assert chain_has(error, ResponseTimeout)
    assert former.connections == 1
