"""Readers of what workers and frontends tell each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast
from unittest.mock import AsyncMock

from dynamo_core import ActiveLoad, KvBlock, KvEvent, KvStored, PluginConfig, RouterEvent
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import FrontendRecord, Unreadable
from dynamo_core.protocol.events import PlacedLoad, PlacedLoads
from dynamo_core.protocol.records import PeerRequest
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.dispatch.frontend_peer_calls import PeerCalls
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadMessages
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_telemetry import Metrics
from dynamo_testing.router.harness import Fleet
from dynamo_wire import encode as pack

from tests.architecture.bad_bytes import msgpack_bodies
from tests.architecture.readers.registry import Feed, reader

LOADS = pack([ActiveLoad(worker_id=1, active_decode_blocks=3)])


@reader(
    "dynamo_runtime.dispatch.load.monitor:_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[LOADS],
    raises=[Unreadable],
)
async def loads() -> AsyncGenerator[Feed, None]:
    monitor = WorkerMonitor(LoadTracker(), cast(Any, None), cast(Any, None))
    yield lambda data: monitor.apply(data, 0.0)
    assert monitor.load(1, 0).active_decode_blocks == 3


PLACED = pack(PlacedLoads(5, 2**62, True, [PlacedLoad(1, 0, 2, 3, 4)]))


@reader(
    "dynamo_runtime.dispatch.load.peer_load_sync:_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[PLACED],
    raises=[Unreadable],
)
async def placed_loads() -> AsyncGenerator[Feed, None]:
    tracker = LoadTracker()
    messages = PeerLoadMessages(tracker)
    yield lambda data: messages.apply(data, 0.0)
    assert tracker.peers.blocks(1, 0) >= 4


@reader(
    "dynamo_runtime.dispatch.frontend_peer_calls:_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[pack({"a": [1, None, b"x"]})],
    raises=[InvalidArgument],
)
async def calls_of_frontends() -> AsyncGenerator[Feed, None]:
    """Yield what one frontend sends another one, both as the payload and as the reply."""
    calls = PeerCalls(cast(Any, None), InprocTransport(PluginConfig(), Metrics()), namespace="dynamo")
    heard: list[Any] = []

    async def handle(payload: Any) -> None:
        heard.append(payload)

    async def feed(data: bytes) -> None:
        calls._fetch = AsyncMock(return_value=data)  # type: ignore[method-assign]
        await calls._ask(FrontendRecord(frontend_id=1), PeerRequest("n", b""), 1.0)
        await calls._reply(PeerRequest("n", data))

    calls.serve("n", handle)
    yield feed
    assert heard[-1] == {"a": [1, None, b"x"]}


STORED = pack([RouterEvent(1, KvEvent(0, KvStored([KvBlock(1, 2)], None)), 1)])


@reader(
    "dynamo_plugin_router_kv.router:_decoder msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[STORED, pack([RouterEvent(1, KvEvent(1, KvStored([KvBlock(3, 4)], 1)), 1)])],
)
async def kv_events() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_router_kv.config import KvConfig
    from dynamo_plugin_router_kv.router import KvRouter

    fleet = Fleet(lambda services: KvRouter(KvConfig(), services), 5.0)
    fleet.add(1)
    router = cast(KvRouter, fleet.router)
    yield lambda data: router._on_message(1, data)
    assert router._index.blocks > 0
    await router.aclose()


@reader("dynamo_wire.brokered.events:_events msgspec.msgpack.Decoder", bodies=msgpack_bodies)
async def brokered_events() -> AsyncGenerator[Feed, None]:
    from dynamo_wire.brokered.events import _Subscriber

    subscriber = _Subscriber("s", 10_000, Metrics().counter("n", "n").labels())
    yield lambda data: subscriber.receive("", data, "")
    subscriber.receive("", pack((1, [(2, b"x")])), "")
    assert subscriber._events[-1] == (1, 2, b"x")
