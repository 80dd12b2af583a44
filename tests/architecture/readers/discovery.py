"""Readers of what discovery holds, and of what the stores behind it answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, cast

from dynamo_core import PREFILL_TOKENS, PluginConfig, Thresholds, WatchEvent, WatchKind
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol import EventSource, FrontendRecord, Instance, ModelCard
from dynamo_core.protocol.records import CARDS, FRONTENDS, INSTANCES, RuntimeConfig
from dynamo_leases import Fanout
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.dispatch.frontend_peer_calls import PeerCalls
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_telemetry import Metrics

from tests.architecture.bad_bytes import json_bodies, plain_bodies
from tests.architecture.readers.registry import Feed, reader, says, to_json

CARD = ModelCard(
    name="m",
    instance_id=1,
    model_types=["chat"],
    context_length=100,
    kv_cache_block_size=16,
    needs=[["decode"]],
    runtime_config=RuntimeConfig(total_kv_blocks=10, data_parallel_size=2, runtime_data={"a": {"b": [1]}}),
)
INSTANCE = Instance(instance_id=1, address={"tcp": "127.0.0.1:1/" + "0" * 32}, pid=1, host="h", worker="w")


async def _put(prefix: str, is_there: Callable[[Any], bool]) -> AsyncGenerator[Feed, None]:
    """Feed the record of one worker."""
    nothing = cast(Any, None)
    models = Models(
        discovery=nothing,
        pipeline=nothing,
        caller=nothing,
        make_router=nothing,
        announce=lambda *a, **k: None,
        load_tokenizer=nothing,
    )
    yield lambda data: models._apply(WatchEvent(WatchKind.PUT, prefix + "w", data), set())
    assert is_there(models._workers["w"])
    await models.aclose()


@reader("dynamo_core.protocol.cards:_cards msgspec.json.Decoder", good=[to_json(CARD)])
async def cards() -> AsyncGenerator[Feed, None]:
    async for feed in _put(CARDS, lambda worker: worker.card == CARD):
        yield feed


@reader("dynamo_core.protocol.cards:_instances msgspec.json.Decoder", good=[to_json(INSTANCE)])
async def instances() -> AsyncGenerator[Feed, None]:
    async for feed in _put(INSTANCES, lambda worker: worker.instance == INSTANCE):
        yield feed


FRONTEND = FrontendRecord(frontend_id=7, address={"tcp": "127.0.0.1:1/" + "0" * 32}, pid=1, host="h", version="1")


@reader("dynamo_core.protocol.cards:_frontends msgspec.json.Decoder", good=[to_json(FRONTEND)])
async def frontends() -> AsyncGenerator[Feed, None]:
    calls = PeerCalls(cast(Any, None), InprocTransport(PluginConfig(), Metrics()), namespace="dynamo")
    key = FRONTENDS + FRONTEND.path
    yield lambda data: calls._apply(WatchEvent(WatchKind.PUT, key, data), set())
    assert FRONTEND in calls.frontends()


@reader("dynamo_runtime.dispatch.pools.thresholds:_decoder msgspec.json.Decoder", good=[b"7"])
async def thresholds() -> AsyncGenerator[Feed, None]:
    book = ThresholdBook(
        cast(Any, None), "dynamo", common=Thresholds(), models={}, armed=True, changed=lambda model: None
    )

    def feed(data: bytes) -> None:
        book._take(book._key(data.decode(errors="replace"), PREFILL_TOKENS), b"7", set())
        book._take(book._key("m", PREFILL_TOKENS), data, set())

    yield feed
    assert all(model.isprintable() and len(model) <= 256 for model in book.changed_models())
    assert book.of("m").active_prefill_tokens_threshold == 7


@reader(bodies=json_bodies, good=[b"{}"])
async def stores() -> AsyncGenerator[Feed, None]:
    """Yield what every discovery tells its watches, whatever the store holds: keys here, values of any kind."""
    fanout = Fanout()

    def feed(data: bytes) -> None:
        key = data.decode(errors="surrogateescape")
        fanout.publish([WatchEvent(WatchKind.PUT, key, b"1"), WatchEvent(WatchKind.PUT, "k", data * 2)], synced=True)

    yield feed
    assert fanout.records["k"] == b"{}{}"
    assert all(len(key.encode()) <= 1024 for key in fanout.records)


SOURCE = EventSource(subject="s", source=7, address={"inproc": "x"})


@reader("dynamo_plugin_transport_tcp.events:_record msgspec.json.Decoder", good=[to_json(SOURCE)])
async def event_sources() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_transport_tcp.events import _Subscriber

    subscriber = _Subscriber("s", cast(Any, None), 10, Metrics().counter("n", "n").labels())
    yield lambda data: subscriber._changed(WatchEvent(WatchKind.PUT, "key", data))
    assert set(subscriber._sources) == {"key"}
    await subscriber.aclose()


@reader(bodies=plain_bodies, good=[b"1:x"])
async def records_in_redis() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_discovery_redis.config import RedisConfig
    from dynamo_plugin_discovery_redis.reader import Reader as RedisReader
    from dynamo_plugin_discovery_redis.reader import _number

    redis = RedisReader(RedisConfig())
    held: list[Any] = []

    def feed(data: bytes) -> None:
        _number(data)
        held[:] = [redis._held([b"", data, b"key", data, data, b"1:x"])]

    yield feed
    assert held[0].records["key"] == (1, b"x")
    await redis.aclose()


@reader(bodies=plain_bodies, good=[b"dynamo-record"], raises=[ValueError])
async def records_in_files() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_discovery_file.record import Record, decode, decode_lease, encode

    def feed(data: bytes) -> None:
        with suppress(ValueError):
            decode_lease(data)
        decode(encode(Record("a", b"x", 0)) if data.startswith(b"dynamo") else data)

    yield feed


ANSWER = to_json({"header": {"revision": "1"}, "result": {"events": []}})


@reader(good=[ANSWER], raises=[CannotConnect])
async def etcd_answers() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_discovery_etcd.client import Client
    from dynamo_plugin_discovery_etcd.config import EtcdConfig

    async with says() as (url, say):
        client = Client(EtcdConfig(endpoints=(url,)), None)

        async def feed(data: bytes) -> None:
            say(data)
            await client.ask("/v3/kv/range", {})

        yield feed
        await client.aclose()


class Sent:
    """The body of an answer that goes on, as far as a stream reads it."""

    content: Sent
    data = b""

    def __init__(self) -> None:
        self.content = self

    async def readany(self) -> bytes:
        return self.data


@reader("dynamo_leases.json_client:JsonStream._message read_json", good=[ANSWER], raises=[CannotConnect])
async def etcd_watches() -> AsyncGenerator[Feed, None]:
    from dynamo_leases import JsonStream
    from dynamo_plugin_discovery_etcd.client import Messages

    async def feed(data: bytes) -> None:
        sent = Sent()
        sent.data = data + b"\n"
        await Messages(JsonStream("etcd", "http://etcd", cast(Any, sent))).read()

    yield feed


LEASE = {
    "kind": "Lease",
    "metadata": {
        "name": "l",
        "uid": "u",
        "resourceVersion": "1",
        "labels": {"discovery.dynamo/lease": "1"},
        "annotations": {"discovery.dynamo/key": "k"},
    },
    "spec": {"leaseDurationSeconds": 5, "renewTime": "2024-01-01T00:00:00.000000Z"},
    "binaryData": {"value": "eA=="},
}


@reader("dynamo_leases.json_client:JsonClient.read_object read_json", good=[to_json(LEASE)])
async def kubernetes_answers() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_discovery_kubernetes.access import Access, Token
    from dynamo_plugin_discovery_kubernetes.client import Client

    async with says() as (url, say):
        client = Client(Access(url, "ns", "p", Token(None, None, "token"), None), 5.0)

        async def feed(data: bytes) -> None:
            say(data)
            with suppress(CannotConnect):
                await client.ask("GET", "/x")

        yield feed
        await client.aclose()


@reader(
    "dynamo_plugin_discovery_kubernetes.objects:record_fact base64.b64decode",
    good=[to_json({"type": "ADDED", "object": LEASE})],
    raises=[CannotConnect],
)
async def kubernetes_objects() -> AsyncGenerator[Feed, None]:
    from dynamo_leases import JsonStream
    from dynamo_plugin_discovery_kubernetes.client import Events
    from dynamo_plugin_discovery_kubernetes.objects import lease_fact, lease_number, record_fact

    facts: list[Any] = []

    async def feed(data: bytes) -> None:
        sent = Sent()
        sent.data = data + b"\n"
        for event in await Events(JsonStream("Kubernetes", "http://kubernetes", cast(Any, sent))).read():
            item = event["object"]
            facts[:] = [lease_fact(item), record_fact(item), lease_number(item)]

    yield feed
    assert (facts[0].ttl, facts[1].value, facts[2]) == (5.0, b"x", 1)
