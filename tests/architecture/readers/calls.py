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
from dynamo_core.contracts.call import EMBED, GENERATE, MODEL_FILE, SCORE
from dynamo_core.protocol import UNREADABLE
from dynamo_wire import encode as pack
from dynamo_wire.brokered import fragments
from dynamo_wire.messages import item_decoder

from tests.architecture.bad_bytes import msgpack_bodies
from tests.architecture.readers.registry import READERS, Feed, Reader, reader


def _wire(decode: Callable[[bytes], object], sites: Sequence[str], name: str, raises: type[Exception]) -> None:
    async def make() -> AsyncGenerator[Feed, None]:
        yield decode

    READERS[name] = Reader(make, tuple(sites), msgpack_bodies, (), (raises,))


_wire(
    lambda data: fragments.read_bundle(fragments.worker_decoder, data),
    ["dynamo_wire.brokered.fragments:worker_decoder msgspec.msgpack.Decoder"],
    "bundles to workers",
    fragments.LinkError,
)
_wire(
    lambda data: fragments.read_bundle(fragments.caller_decoder, data),
    ["dynamo_wire.brokered.fragments:caller_decoder msgspec.msgpack.Decoder"],
    "bundles to callers",
    fragments.LinkError,
)
_wire(
    lambda data: fragments.read_count(memoryview(data)),
    ["dynamo_wire.brokered.fragments:_count_decoder msgspec.msgpack.Decoder"],
    "counts of what has arrived",
    fragments.LinkError,
)
_wire(
    lambda data: fragments.read_answer(memoryview(data)),
    ["dynamo_wire.brokered.fragments:_busy_decoder msgspec.msgpack.Decoder"],
    "answers to probes over a broker",
    fragments.LinkError,
)
_wire(
    fragments.read_fragment,
    ["dynamo_wire.brokered.fragments:_fragment_decoder msgspec.msgpack.Decoder"],
    "fragments",
    fragments.LinkError,
)


def _items(decoder: Callable[[Endpoint], msgspec.msgpack.Decoder[Any]]) -> Callable[[], AsyncGenerator[Feed, None]]:
    """Items and requests of every endpoint. Both ends catch `UNREADABLE`, and end the one call."""

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
