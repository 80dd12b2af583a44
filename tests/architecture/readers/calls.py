"""Readers of what travels between the two ends of a call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from dynamo_core import (
    KV_HISTORY,
    Endpoint,
    KvBlock,
    KvEvent,
    KvHistoryPart,
    KvStored,
    LLMEngineOutput,
    PreprocessedRequest,
)
from dynamo_core.contracts.transports.call import EMBED, GENERATE, MODEL_FILE, SCORE
from dynamo_core.protocol import UNREADABLE, Unreadable
from dynamo_core.protocol.decoding import check_depth, read
from dynamo_plugin_extension_feed.frontend_view import Line, View, Worker, read_view
from dynamo_plugin_extension_feed.rates import FrontendCounts, ModelCounts, TenantCounts, Totals, WorkerCounts
from dynamo_plugin_extension_feed.state import Views, join_views
from dynamo_wire import encode as pack
from dynamo_wire.brokered import wire_format
from dynamo_wire.messages import item_decoder

from tests.architecture.bad_bytes import msgpack_bodies
from tests.architecture.readers.registry import READERS, Feed, Reader, reader


def _wire(decode: Callable[[bytes], object], sites: Sequence[str], name: str, raises: type[Exception]) -> None:
    async def make() -> AsyncGenerator[Feed, None]:
        yield decode

    READERS[name] = Reader(make, tuple(sites), msgpack_bodies, (), (raises,))


_wire(
    lambda data: wire_format.read_bundle(wire_format.worker_decoder, data),
    ["dynamo_wire.brokered.wire_format:worker_decoder msgspec.msgpack.Decoder"],
    "bundles to workers",
    wire_format.LinkError,
)
_wire(
    lambda data: wire_format.read_bundle(wire_format.caller_decoder, data),
    ["dynamo_wire.brokered.wire_format:caller_decoder msgspec.msgpack.Decoder"],
    "bundles to callers",
    wire_format.LinkError,
)
_wire(
    lambda data: wire_format.read_count(memoryview(data)),
    ["dynamo_wire.brokered.wire_format:_count_decoder msgspec.msgpack.Decoder"],
    "counts of what has arrived",
    wire_format.LinkError,
)
_wire(
    lambda data: wire_format.read_answer(memoryview(data)),
    ["dynamo_wire.brokered.wire_format:_busy_decoder msgspec.msgpack.Decoder"],
    "answers to probes over a broker",
    wire_format.LinkError,
)
_wire(
    wire_format.read_fragment,
    ["dynamo_wire.brokered.wire_format:_fragment_decoder msgspec.msgpack.Decoder"],
    "fragments",
    wire_format.LinkError,
)


def _items(decoder: Callable[[Endpoint], msgspec.msgpack.Decoder[Any]]) -> Callable[[], AsyncGenerator[Feed, None]]:
    """Return items and requests of every endpoint. Both ends catch `UNREADABLE`, and end the one call."""

    async def make() -> AsyncGenerator[Feed, None]:
        endpoints = (GENERATE, EMBED, SCORE, MODEL_FILE, KV_HISTORY)
        decoders = [decoder(endpoint) for endpoint in endpoints]
        decoders += [msgspec.msgpack.Decoder(endpoint.request_type) for endpoint in endpoints]

        def feed(data: bytes) -> None:
            for one in decoders:
                with suppress(*UNREADABLE):
                    one.decode(data)

        yield feed

    return make


_ITEMS = (
    pack(LLMEngineOutput([1], disaggregated_params={"a": [1]})),
    pack(PreprocessedRequest(model="m", token_ids=[1])),
    pack(KvHistoryPart(0, 1, True, [KvEvent(0, KvStored([KvBlock(1, 2)]))], 0)),
)


READERS["items"] = Reader(
    _items(item_decoder),
    (
        "dynamo_wire.messages:item_decoder msgspec.msgpack.Decoder",
        "dynamo_wire.brokered.serving:BrokeredServed.__init__ msgspec.msgpack.Decoder",
        "dynamo_plugin_transport_tcp.serving:TcpServed.__init__ msgspec.msgpack.Decoder",
    ),
    msgpack_bodies,
    _ITEMS,
    (),
)


@reader(
    "dynamo_plugin_transport_tcp.messages:listener_decoder msgspec.msgpack.Decoder",
    "dynamo_plugin_transport_tcp.messages:caller_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
)
async def frames() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_transport_tcp.frames import FrameError
    from dynamo_plugin_transport_tcp.messages import caller_decoder, listener_decoder, read

    def feed(data: bytes) -> None:
        for decoder in (caller_decoder, listener_decoder):
            with suppress(FrameError):
                read(decoder, memoryview(data))

    yield feed


@reader(
    "dynamo_plugin_transport_tcp.probes:_probe_decoder msgspec.msgpack.Decoder",
    "dynamo_plugin_transport_tcp.probes:_answer_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
)
async def probes_over_tcp() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_transport_tcp.frames import frame
    from dynamo_plugin_transport_tcp.messages import PROBE_BYTES
    from dynamo_plugin_transport_tcp.probes import ProbeKey

    key, challenge = ProbeKey(None, b"nonce"), bytes(PROBE_BYTES)

    def feed(data: bytes) -> None:
        assert key.read_probe(frame(data)) is None
        assert key.read_answer(challenge, frame(data)) is None

    yield feed
    assert key.read_probe(key.probe(challenge)) == challenge
    assert key.read_answer(challenge, key.answer(challenge, 2.5)) == 2.5


_VIEW = msgspec.msgpack.encode(
    View(
        [Worker("1", "w-0", "m", "aggregated", "serving", "free", "here", 1, "0.1.0", 1.0, 1, 2, 3, 4)],
        {"m": {"waiting": 1}},
        FrontendCounts(
            Totals({"m": ModelCounts(1, ttft={3: 1})}, {"m": ModelCounts(2, itl={3: 1})}),
            Totals({"t": TenantCounts(1)}, {"t": TenantCounts(2)}),
            {"1": WorkerCounts(1, 2, 3)},
            {10: ModelCounts(1)},
        ),
        [Line("r", "m", "chat_completions", "t", 1.0, "success", "", "stop", "1", 0.1, 1, 2, 3, 0.5, 0.2, "w-0")],
        {"m": True},
        1.0,
    )
)


@reader(
    "dynamo_plugin_extension_feed.frontend_view:read_view msgspec.convert",
    bodies=msgpack_bodies,
    good=[_VIEW],
    raises=[Unreadable],
)
async def views_of_other_frontends() -> AsyncGenerator[Feed, None]:
    """Feed views as plain values whose depth was checked. What can be read can be summed and shown."""
    decoder = msgspec.msgpack.Decoder()

    def feed(data: bytes) -> None:
        value = read(decoder, data)
        check_depth(value)
        msgspec.json.encode(
            join_views(Views([], {1: read_view(value), 2: read_view(msgspec.msgpack.decode(_VIEW))}, {}), 1)
        )

    yield feed
