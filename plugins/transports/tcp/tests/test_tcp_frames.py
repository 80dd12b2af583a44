"""Frames and messages: cut out of any stream of bytes, and nothing but a typed error for what is none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import msgspec
import pytest
from dynamo_core import DynamoError, Endpoint, EngineContext, LLMEngineOutput, ServedContext, TaskSet
from dynamo_core.errors import WireError
from dynamo_core.protocol import Annotated
from dynamo_plugin_transport_tcp import messages
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.calling import CallerLink
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.connection_limiter import ConnectionLimiter
from dynamo_plugin_transport_tcp.frames import HEAD, FrameError, FrameSplitter, checked_frame, frame
from dynamo_plugin_transport_tcp.link import Link
from dynamo_plugin_transport_tcp.serving import ListenerLink, Registry, TcpServed
from dynamo_telemetry import Gauge
from dynamo_wire import messages as wire
from hypothesis import given
from hypothesis import strategies as st

MEBIBYTE = 1024 * 1024

COUNT = Endpoint("count", int, LLMEngineOutput)


# Cutting.


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in pairwise(edges):
        yield data[begin:end]


BODIES = st.lists(st.binary(max_size=300), max_size=8)


@given(checked=st.booleans(), bodies=BODIES, cuts=st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_are_found_however_the_bytes_are_cut(checked: bool, bodies: list[bytes], cuts: list[int]) -> None:
    splitter, make = FrameSplitter(300), frame
    if checked:
        splitter.check()
        make = checked_frame

    found = [bytes(body) for piece in pieces(b"".join(map(make, bodies)), cuts) for body in splitter.feed(piece)]

    assert found == bodies
    assert splitter.held == 0


@given(excess=st.integers(1, 2**32 - 101), before=st.lists(st.binary(max_size=100), max_size=3))
def test_a_length_over_the_limit_is_an_error_before_its_body_is_kept(excess: int, before: list[bytes]) -> None:
    splitter = FrameSplitter(100)
    data = b"".join(map(frame, before)) + (100 + excess).to_bytes(HEAD, "big")
    found: list[bytes] = []

    with pytest.raises(FrameError, match=str(100 + excess)):
        found.extend(map(bytes, splitter.feed(data)))

    assert found == before
    assert splitter.held == 0


@given(bodies=BODIES.filter(len), at=st.integers(0), flip=st.integers(1, 255), rest=st.binary(max_size=8))
def test_a_damaged_frame_raises_and_is_not_waited_for(bodies: list[bytes], at: int, flip: int, rest: bytes) -> None:
    splitter = FrameSplitter(MEBIBYTE)
    found: list[bytes] = []
    splitter.check()
    frames = [checked_frame(body) for body in bodies]
    data = bytearray(b"".join(frames))
    at %= len(data)
    data[at] ^= flip
    ends = list(accumulate(map(len, frames)))
    whole = sum(end <= at for end in ends)

    with pytest.raises(FrameError):
        found.extend(map(bytes, splitter.feed(bytes(data) + rest)))

    assert found == bodies[:whole]


def test_checksums_begin_with_the_next_frame_of_a_chunk() -> None:
    splitter = FrameSplitter(100)
    found: list[bytes] = []

    for body in splitter.feed(frame(b"ready") + checked_frame(b"first") + checked_frame(b"second")):
        found.append(bytes(body))
        splitter.check()

    assert found == [b"ready", b"first", b"second"]


# Mutating.

EXAMPLES: list[Any] = [
    messages.Hello(messages.MAGIC, 1, bytes(16), bytes(32), MEBIBYTE),
    messages.Challenge(1, bytes(32), MEBIBYTE, True),
    messages.Proof(bytes(32)),
    messages.Ready(bytes(32)),
    wire.Open(7, 5, "count", "r", "r-0", {"traceparent": "00"}, msgspec.Raw(wire.encode(3))),
    wire.Stop(7, False),
    wire.Pause(7),
    wire.Resume(7),
    wire.Accepted(1),
    wire.Refused(1, WireError("WorkerOverloaded", "full", [WireError("Unknown", "x")])),
    (
        wire.ROWS_TAG,
        [
            (1, 0, [1, 2, 3]),
            (1, 1, None, LLMEngineOutput([4], text="x", log_probs=[0.5])),
            (1, 2, Annotated[Any].from_error(ValueError("no"))),
            (2, 0, [7]),
            (1, 3, Annotated[Any].from_complete_final()),
        ],
        True,
    ),
    wire.Ack(1),
    wire.Ended(1, WireError("Disconnected", "cut")),
    messages.Subscribe(9, "loads", 5),
    messages.Unsubscribe(9),
    messages.Unsubscribed(9),
    (messages.EVENTS_TAG, [(9, 0, b"payload")]),
    wire.Ping(),
    wire.Pong(),
    wire.Bye(WireError("Disconnected", "bye")),
]


def mutated(source: random.Random) -> bytes:
    """Return one frame or several, with something wrong in most of them; sometimes only noise."""
    kind = source.randrange(8)
    if kind == 0:
        return source.randbytes(source.randrange(1, 200))
    data = bytearray(b"".join(messages.pack(source.choice(EXAMPLES)) for _ in range(source.randrange(1, 4))))
    if kind == 1:
        del data[source.randrange(len(data)) :]
    elif kind == 2:
        at = source.randrange(len(data))
        data[at:at] = source.randbytes(source.randrange(1, 9))
    elif kind == 3:
        # Within a frame whose length is right: what the decoder must bear.
        body = bytearray(wire.encode(source.choice(EXAMPLES)))
        for _ in range(source.randrange(1, 5)):
            body[source.randrange(len(body))] = source.choice((source.randrange(256), 0xDD, 0xC6, 0xDF, 0xCF, 0x91))
        data = bytearray(frame(bytes(body)))
    elif kind == 4:
        data = bytearray(frame(source.choice((b"\x91", b"\x81\x01")) * source.randrange(1, 3000)))
    elif kind > 5:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


class Drain:
    """A transport whose other end takes all that is written."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> None:
        assert len(data) < MEBIBYTE

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def attach(link: Link) -> Drain:
    drain = Drain()
    link.connection_made(cast(asyncio.Transport, drain))
    return drain


def connect(caller: CallerLink, listener: ListenerLink) -> None:
    """Run the handshake of two links, without a socket."""
    challenges = listener._challenges[1]
    listener.data_received(
        messages.pack(messages.Hello(messages.MAGIC, 1, caller._address.nonce, caller._challenge, MEBIBYTE))
    )
    caller.data_received(messages.pack(messages.Challenge(1, challenges, MEBIBYTE, False)))
    listener.data_received(messages.pack(messages.Proof(b"")))
    caller.data_received(messages.pack(messages.Ready(b"")))
    assert caller.ready.done()


class Deaf:
    """A sink that only counts its ends."""

    ends = 0

    def data(self, item: Any) -> None:
        assert isinstance(item, LLMEngineOutput)

    def event(self, item: Annotated[Any]) -> None:
        if item.is_error():
            item.to_error()

    def closed(self, error: DynamoError | None) -> None:
        self.ends += 1


async def endless(limit: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        yield LLMEngineOutput([limit])
        await ctx.stopped()

    return items()


async def batter(number: int, seed: int) -> int:
    """Give mutated frames to both ends of connections; how many connections that took."""
    source = random.Random(seed)
    config = TcpConfig(max_frame_mb=1)
    registry = Registry(config, Gauge(), Gauge(), ConnectionLimiter(9, Gauge()))
    nowhere = Address("127.0.0.1", 1, registry.nonce)
    served = registry.served[5, "count"] = TcpServed(registry, 5, COUNT, endless, nowhere)
    made = 0
    ends: list[tuple[Link, Drain]] = []
    for _ in range(number):
        if not ends:
            listener, caller = ListenerLink(registry), CallerLink(config, nowhere, Gauge(), Gauge(), TaskSet())
            ends = [(listener, attach(listener)), (caller, attach(caller))]
            connect(caller, listener)
            calling = [
                asyncio.ensure_future(caller.calls.open(5, COUNT, 1, EngineContext("r"), Deaf())) for _ in range(2)
            ]
            await asyncio.sleep(0)
            caller.data_received(messages.pack(wire.Accepted(1)))
            made += 1
        data = mutated(source)
        for link, drain in ends:
            link.data_received(data)
            assert link.splitter.held <= link.splitter.limit + len(data) + HEAD
            if drain.closed and not link.gone.is_set():
                link.connection_lost(None)
        assert len(served.calls) <= 4 * number
        if any(link.gone.is_set() for link, _ in ends):
            for link, _ in ends:
                if not link.gone.is_set():
                    link.connection_lost(None)
            for outcome in await asyncio.gather(*calling, return_exceptions=True):
                assert isinstance(outcome, DynamoError) or not isinstance(outcome, BaseException)
            await served.calls.aclose()
            assert registry.links == set()
            ends = []
    for link, _ in ends:
        link.connection_lost(None)
    await asyncio.gather(*calling, return_exceptions=True)
    await served.aclose()
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [3_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_mutated_frames_give_typed_errors_only(number: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")

    connections = await batter(number, seed=number)

    assert connections > number // 100
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("decoder", [messages.listener_decoder, messages.caller_decoder])
def test_lengths_inside_a_frame_are_not_believed(decoder: msgspec.msgpack.Decoder[Any]) -> None:
    # An array, a map, a text and a blob that claim four thousand million entries.
    for claim in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):
        with pytest.raises(FrameError):
            messages.read(decoder, memoryview(b"\x92\x16" + claim + b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_fields_that_a_newer_version_appends_are_ignored(example: Any) -> None:
    fields = msgspec.msgpack.decode(wire.encode(example))
    longer = msgspec.msgpack.encode([*fields, "new"])
    decoders: list[Callable[[Any], Any]] = [messages.listener_decoder.decode, messages.caller_decoder.decode]

    def understood(data: bytes) -> list[Any]:
        found: list[type | None] = []
        for decode in decoders:
            try:
                found.append(type(decode(data)))
            except msgspec.ValidationError:
                found.append(None)
        return found

    assert understood(longer) == understood(wire.encode(example))
    assert any(understood(longer))
