"""Readers of what tenants, clients and operators send."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from dynamo_core.errors import ConfigError, InvalidArgument
from dynamo_core.protocol import UNREADABLE
from dynamo_runtime.settings.documents import parse_text, read_document
from dynamo_wire import encode as pack

from tests.architecture.bad_bytes import msgpack_bodies, plain_bodies
from tests.architecture.readers.registry import Feed, reader, says, to_json


@reader(
    "dynamo_plugin_admission_fair_queue.usage_codec:_DECODER msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[pack([1, {"t": [1, 2, 3.0, 4.0]}, False])],
    raises=[ValueError],
)
async def tenants_of_frontends() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_admission_fair_queue.usage_codec import decode

    yield decode


@reader(
    "dynamo_generation.bodies.piecewise_decoding:Pieces._refuse msgspec.json.decode",
    "dynamo_generation.bodies.piecewise_decoding:_numbers msgspec.json.Decoder",
    "dynamo_generation.bodies.piecewise_decoding:_texts msgspec.json.Decoder",
    good=[to_json({"prompt": [1, 2, 3, 4], "user": "a" * 40})],
    raises=[InvalidArgument, *UNREADABLE],
)
async def large_bodies_of_clients() -> AsyncGenerator[Feed, None]:
    from dynamo_generation.bodies import piecewise_decoding

    def feed(data: bytes) -> None:
        # A small body is cut too, and a large one takes no longer.
        patched.setattr(piecewise_decoding, "_SLICE", max(16, len(data) // 64 & ~1))
        one = piecewise_decoding.Pieces()
        with suppress(InvalidArgument, *UNREADABLE):
            one._refuse(data)
        one.cut(data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(piecewise_decoding, "_PAUSE", 0)
        yield feed


CHAT = to_json({"model": "m", "messages": [{"role": "user", "content": "a"}], "metadata": {"a": "b"}})


@reader(
    "dynamo_generation.bodies.bounds:_readable msgspec.json.decode",
    "dynamo_generation.bodies.decode:_objects msgspec.json.Decoder",
    "dynamo_generation.bodies.decode:parse_object msgspec.json.decode",
    "dynamo_generation.bodies.decode:to_struct msgspec.convert",
    "dynamo_generation.bodies.duplicates:_name msgspec.json.decode",
    "dynamo_generation.bodies.invalid_json:find_unreadable json.loads",
    good=[CHAT],
    raises=[InvalidArgument],
)
async def requests_of_clients() -> AsyncGenerator[Feed, None]:
    from dynamo_generation.answers.content_blocks import Block, Kind
    from dynamo_generation.bodies.bounds import _largest, _readable
    from dynamo_generation.bodies.decode import parse_object
    from dynamo_generation.bodies.invalid_json import find_unreadable
    from dynamo_generation.requests.chat import parse_chat
    from dynamo_generation.requests.constraints import _schema
    from dynamo_generation.templates.messages import _argument_object

    def feed(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        Block(0, Kind.CALL, parts=[text]).arguments  # noqa: B018 - reads it
        _argument_object(text)
        _readable([data, *_largest(data)])
        find_unreadable(data)
        with suppress(InvalidArgument):
            _schema(text, "guided_json")
        parse_chat(parse_object(data))

    yield feed


async def _status(handle: Callable[[web.Request], Awaitable[object]]) -> AsyncGenerator[Feed, None]:
    """Yield a handler behind HTTP. What it lets through unforeseen is a 500."""
    import aiohttp

    app = web.Application(client_max_size=2**26)

    async def answer(http: web.Request) -> web.Response:
        await handle(http)
        return web.Response()

    app.router.add_post("/", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        statuses: list[int] = []

        async def feed(data: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            async with session.post(server.make_url("/"), data=data, headers=headers) as response:
                statuses.append(response.status)
                assert response.status < 500, await response.text()

        yield feed
        assert statuses[-1] == 200


@reader(
    "dynamo_plugin_frontend_openai.busy_threshold:_decoder msgspec.json.Decoder",
    good=[b'{"model": "m", "active_prefill_tokens_threshold": 1}'],
)
async def requests_for_thresholds() -> AsyncGenerator[Feed, None]:
    from dynamo_core import HttpFault
    from dynamo_core.errors import InvalidArgument
    from dynamo_plugin_frontend_openai.busy_threshold import _read

    async def handle(http: web.Request) -> None:
        try:
            await _read(http)
        except (HttpFault, InvalidArgument) as refused:
            raise web.HTTPBadRequest(text="refused") from refused

    async for feed in _status(handle):
        yield feed


@reader(
    "dynamo_plugin_extension_dashboard.dashboard:_decoder msgspec.json.Decoder",
    good=[b'{"token": "0123456789abcdef"}', b"{}"],
)
async def logins_at_the_dashboard() -> AsyncGenerator[Feed, None]:
    from dynamo_core import HttpFault
    from dynamo_plugin_extension_dashboard.dashboard import token_of

    async def handle(http: web.Request) -> None:
        try:
            await token_of(http)
        except HttpFault as refused:
            raise web.HTTPBadRequest(text="refused") from refused

    async for feed in _status(handle):
        yield feed


@reader(
    "dynamo_plugin_router_slot_tracker.decoding:BodyOf.__init__ msgspec.json.Decoder",
    "dynamo_plugin_router_slot_tracker.json_positions:_decoder json.JSONDecoder",
    "dynamo_plugin_router_slot_tracker.strict_json:_decoder json.JSONDecoder",
    good=[b'{"model_name": "m", "worker_id": 1, "block_size": 4, "dp_start": 0, "dp_size": 1}'],
)
async def requests_for_slots() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_router_slot_tracker.decoding import BodyOf
    from dynamo_plugin_router_slot_tracker.errors import Refusal
    from dynamo_plugin_router_slot_tracker.schemas import Registration

    body = BodyOf(Registration)

    async def handle(http: web.Request) -> None:
        try:
            await body.read(http)
        except Refusal as refusal:
            raise web.HTTPBadRequest(text="refused") from refusal

    async for feed in _status(handle):
        yield feed


@reader(
    "dynamo_plugin_router_slot_tracker.client:_loads msgspec.json.Decoder",
    bodies=plain_bodies,
    good=[b"[]"],
)
async def answers_about_slots() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_router_slot_tracker.client import ServiceClient, ServiceUnreachable
    from dynamo_plugin_router_slot_tracker.schemas import Projection

    async with says() as (url, say):
        client = ServiceClient(url, token=None, ca=None, timeout=5, pause=0)
        answered: list[bool] = []

        async def feed(data: bytes) -> None:
            say(data)
            try:
                await client.potential_loads(Projection(model_name="m", sequence_hashes=[]))
            except ServiceUnreachable:
                answered.append(False)
            else:
                answered.append(True)

        yield feed
        assert answered[-1]
        await client.aclose()


@reader(
    "dynamo_plugin_router_slot_tracker.snapshot:_decoder msgspec.json.Decoder",
    bodies=plain_bodies,
    good=[b'{"complete": true}'],
)
async def snapshots_of_slots() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_router_slot_tracker.registry import Registry
    from dynamo_plugin_router_slot_tracker.snapshot import take_snapshot

    async with says() as (url, say):
        taken: list[bool] = []

        async def feed(data: bytes) -> None:
            say(data + b"\n")
            taken.append(await take_snapshot(Registry(), (url,)))

        yield feed
        assert taken[-1]


class NoWire:
    """The sockets of a replica that is alone."""

    def send(self, topic: bytes, body: bytes) -> bool:
        return True

    def subscribe(self, topic: bytes) -> None:
        """Do nothing: there is nothing to subscribe at."""

    def unsubscribe(self, topic: bytes) -> None:
        """Do nothing: there is nothing to subscribe at."""


@reader(
    "dynamo_plugin_router_slot_tracker.replication.messages:Replication.__init__ msgspec.msgpack.Decoder",
    "dynamo_plugin_router_slot_tracker.replication.messages:Replication.__init__ msgspec.msgpack.Decoder #2",
    "dynamo_plugin_router_slot_tracker.replication.messages:Replication.__init__ msgspec.msgpack.Decoder #3",
    bodies=msgpack_bodies,
)
async def events_of_slots() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_router_slot_tracker.registry import Registry
    from dynamo_plugin_router_slot_tracker.replication.events import (
        FREE,
        PARTS_TOPIC,
        PROGRESS_TOPIC,
        TOPIC,
        Event,
        Message,
        WorkerRank,
    )
    from dynamo_plugin_router_slot_tracker.replication.messages import Replication

    replication = Replication(Registry(), NoWire(), gaps=True)

    def feed(data: bytes) -> None:
        for topic in (TOPIC, PROGRESS_TOPIC, PARTS_TOPIC):
            replication.receive([topic, data])

    yield feed
    before = replace(replication.counts)
    replication.receive([TOPIC, pack(Message("m", "t", 4, Event("r", WorkerRank(1, 0), FREE, 1)))])
    assert replication.counts.malformed == before.malformed > 0


@reader(
    "dynamo_runtime.settings.documents:parse_text yaml.SafeLoader",
    "dynamo_runtime.settings.documents:_read_json json.loads",
    "dynamo_runtime.settings.documents:_read_node yaml.SafeLoader",
    "dynamo_runtime.settings.documents:_read_toml tomllib.loads",
    bodies=plain_bodies,
    good=[b"# nothing"],
    raises=[ConfigError],
)
async def config_files() -> AsyncGenerator[Feed, None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def feed(data: bytes) -> None:
            parse_text(data.decode(errors="replace"), "--set")
            (path / "c.toml").write_bytes(b"a = " + data if data != b"# nothing" else data)
            (path / "c.yaml").write_bytes(data)
            with suppress(ConfigError):
                read_document(path / "c.yaml")
            read_document(path / "c.toml")

        yield feed


@reader(
    "dynamo_testing.command:_prefill_result msgspec.json.Decoder",
    "dynamo_runtime.cli.route:_messages decoding.read_json",
    good=[b'{"disaggregated_params": {}}'],
    raises=[ConfigError],
)
async def arguments() -> AsyncGenerator[Feed, None]:
    from dynamo_runtime.cli.route import _messages
    from dynamo_testing.command import _prefill_result

    def feed(data: bytes) -> None:
        text = data.decode(errors="surrogateescape").replace("@", "")
        with suppress(ConfigError):
            _messages(text)
        _prefill_result(text)

    yield feed


@reader("dynamo_http.admin_client:AdminClient.ask decoding.read_json", good=[b"{}"], raises=[ConfigError])
async def answers_to_operators() -> AsyncGenerator[Feed, None]:
    from dynamo_http.admin_client import AdminClient

    async with says() as (url, say):

        async def feed(data: bytes) -> None:
            say(data)
            await AdminClient(url, url, None, None, 5.0).ask("POST", "/", {})

        yield feed


TURN = to_json(
    {"response": {"id": "resp_1", "output": [{"id": "msg_1-0", "type": "message"}]}, "input": [], "near": []}
)
TALK = to_json({"id": "conv_1", "created_at": 1, "metadata": {"a": "b"}, "batches": 2})
BATCH = to_json({"items": [{"id": "msg_1.0-0", "type": "message"}]})


@reader(
    "dynamo_plugin_frontend_responses.records:_decoders msgspec.json.Decoder",
    good=[TURN, TALK, BATCH],
    raises=[],
)
async def records_of_response_stores() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_frontend_responses.records import Batch, Conversation, Turn, decoded, items_of_record

    def feed(data: bytes) -> None:
        items_of_record("resp_1", data)
        items_of_record("conv_1.0", data)
        conversation = decoded(Conversation, "conv_1", data)
        if conversation is not None:
            conversation.keys()

    yield feed
    assert decoded(Turn, "key", TURN) is not None
    assert decoded(Conversation, "key", TALK) is not None
    assert decoded(Batch, "key", BATCH) is not None


@reader(
    "dynamo_generation.requests.opaque_thoughts:unpack_thoughts base64.b64decode",
    bodies=plain_bodies,
    good=[b"Ab4UB2lzbywgd2VsbA=="],
    raises=[],
)
async def thoughts_that_come_back() -> AsyncGenerator[Feed, None]:
    from dynamo_generation.requests.opaque_thoughts import pack_thoughts, unpack_thoughts

    yield lambda data: unpack_thoughts(data.decode(errors="surrogateescape"))
    assert unpack_thoughts(pack_thoughts("so, well")) == "so, well"
