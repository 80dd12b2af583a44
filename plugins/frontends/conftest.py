"""A real listener, a real book of requests and real response streams; only the workers behind them are the test's."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import openai
import pytest
from dynamo_core import (
    DynamoError,
    EmbedOutput,
    EmbedRequest,
    EngineContext,
    FinishReason,
    Frontend,
    FrontendServices,
    HttpRoute,
    LLMEngineOutput,
    Parsers,
    Permit,
    PreprocessedRequest,
    Principal,
    ResponseStore,
    ScoreOutput,
    ScoreRequest,
    Sink,
    Source,
)
from dynamo_core.contracts.requests.explain import RouteView
from dynamo_core.errors import ModelNotFound, Unavailable
from dynamo_core.protocol import Annotated, ModelCard, RequestRecord
from dynamo_core.protocol.output import merge_outputs
from dynamo_generation.api import Generation
from dynamo_http import Listener
from dynamo_http.auth import ApiKeys
from dynamo_http.settings import AuthSettings
from dynamo_plugin_frontend_anthropic.frontend import AnthropicFrontend
from dynamo_plugin_frontend_openai.frontend import OpenAIFrontend
from dynamo_plugin_frontend_responses.frontend import ResponsesFrontend
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.think_tags import ThinkParser
from dynamo_runtime.assembly.api_set import api_set
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_telemetry import Metrics
from dynamo_testing.frontend.host import QuietOwner
from dynamo_text import ByteTokenizer

WAIT = 10.0
#: The APIs on one listener, as they are where all of them are installed.
APIS = api_set({api.NAME: api for api in (OpenAIFrontend, ResponsesFrontend, AnthropicFrontend)})


#: The principal of a request without a key.
NO_KEY = Principal()


class Grip(Source):
    """What the stream can do to the worker of a test."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()

    async def aclose(self) -> None:
        self.closed.set()

    def stop(self) -> None:
        self.closed.set()

    def pause(self) -> None:
        self.paused.set()

    def resume(self) -> None:
        self.resumed.set()


class Call(QuietOwner):
    """One accepted request, seen from the worker's side."""

    def __init__(self, request: PreprocessedRequest, ctx: EngineContext) -> None:
        self.request = request
        self.ctx = ctx
        self.grip = Grip()
        self.released = asyncio.Event()
        self.stream = ResponseStream(merge_outputs, FlushQueue(), owner=self)
        self.sink: Sink = self.stream.begin()
        self.stream.attach(self.grip, 7)

    def stream_closed(self) -> None:
        self.released.set()

    # As the worker.

    def say(self, text: str, **fields: Any) -> None:
        """Send some tokens: the bytes of a text."""
        self.sink.data(LLMEngineOutput(list(text.encode()), **fields))

    def put(self, output: LLMEngineOutput) -> None:
        self.sink.data(output)

    def finish(self, reason: FinishReason = FinishReason.STOP, text: str = "") -> None:
        """Send the terminal and the flag after it."""
        self.sink.data(LLMEngineOutput(list(text.encode()), reason))
        self.complete()

    def complete(self) -> None:
        self.sink.event(Annotated.from_complete_final())

    def fail(self, error: DynamoError) -> None:
        self.sink.event(Annotated.from_error(error))


class FakeModel:
    """A model whose answers a test makes by hand."""

    def __init__(self, card: ModelCard, files: dict[str, bytes]) -> None:
        self.name = card.name
        self.card = card
        self.tokenizer: Any = ByteTokenizer()
        self.parsers = Parsers()
        self.instance_count = 1
        self.missing_roles: list[str] = []
        self.files = files
        self.refusal: DynamoError | None = None
        self.precheck_refusal: DynamoError | None = None
        #: If set, `generate` waits for it.
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.embedded: list[EmbedRequest] = []
        self.scored: list[ScoreRequest] = []
        self._calls: asyncio.Queue[Call] = asyncio.Queue()
        self.count = 0
        #: What `explain` answers, and what it was asked.
        self.views: list[RouteView] = []
        self.explained: list[PreprocessedRequest] = []
        self.explained_to: list[Principal] = []
        #: Called with each new call at once, for answers that need no test in between.
        self.script: Callable[[Call], None] | None = None

    def file(self, name: str) -> bytes | None:
        return self.files.get(name)

    def precheck(self, principal: Principal) -> None:
        if self.precheck_refusal is not None:
            raise self.precheck_refusal

    async def admit(self, request: PreprocessedRequest, principal: Principal) -> Permit:
        return Permit()

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, permit: Permit | None = None
    ) -> ResponseStream:
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.refusal is not None:
                raise self.refusal
        finally:
            self.left.set()
        call = Call(request, ctx)
        self.count += 1
        self._calls.put_nowait(call)
        if self.script is not None:
            self.script(call)
        return call.stream

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        self.embedded.append(request)
        vectors = [[float(len(tokens)), 0.5] for tokens in request.token_ids]
        return EmbedOutput(embeddings=vectors, prompt_tokens=sum(map(len, request.token_ids)))

    async def score(
        self, request: ScoreRequest, token_ids: list[int], ctx: EngineContext, principal: Principal
    ) -> ScoreOutput:
        self.scored.append(request)
        return ScoreOutput(scores=[len(document) / 8 for document in request.documents], prompt_tokens=len(token_ids))

    def explain(self, request: PreprocessedRequest, principal: Principal = NO_KEY) -> list[RouteView]:
        self.explained.append(request)
        self.explained_to.append(principal)
        return self.views

    async def call(self) -> Call:
        """Return the next request that was accepted."""
        async with asyncio.timeout(WAIT):
            return await self._calls.get()

    async def prompt(self) -> str:
        """Return the prompt of the next request that was accepted."""
        text: str = self.tokenizer.decode((await self.call()).request.token_ids)
        return text

    def says(self, *pieces: str, reason: FinishReason = FinishReason.STOP) -> None:
        """Answer every request with these pieces."""

        def script(call: Call) -> None:
            for piece in pieces:
                call.say(piece)
            call.finish(reason)

        self.script = script

    def puts(self, *outputs: LLMEngineOutput) -> None:
        """Answer every request with these items."""

        def script(call: Call) -> None:
            for output in outputs:
                call.put(output)
            call.complete()

        self.script = script

    def says_cut(self, text: str, sizes: Sequence[int]) -> None:
        """Answer every request with this text, in pieces of these sizes in turn."""
        pieces: list[str] = []
        while text:
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(text[:size])
            text = text[size:]
        self.says(*pieces)


class Directory:
    def __init__(self) -> None:
        self.models: dict[str, FakeModel] = {}
        self.synced = True
        #: What models that are not there yet still need.
        self.waiting_for: dict[str, Sequence[str]] = {}

    def get(self, name: str) -> FakeModel:
        if not self.models or name in self.waiting_for:
            raise Unavailable("no worker has registered yet")
        if name not in self.models:
            raise ModelNotFound(f"no model {name}")
        return self.models[name]

    def missing_roles(self, name: str) -> Sequence[str]:
        return self.models[name].missing_roles if name in self.models else self.waiting_for.get(name, [])

    def readiness(self) -> Mapping[str, bool]:
        return {**dict.fromkeys(self.waiting_for, False), **dict.fromkeys(self.models, True)}

    def list(self) -> Sequence[FakeModel]:
        return [self.models[name] for name in sorted(self.models)]


class Reply:
    """An HTTP answer as it came over the wire."""

    def __init__(self, head: bytes, body: bytes, whole: bool) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:] if line)}
        self.body = body
        #: Whether the body ended as its framing says it must.
        self.whole = whole

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the events, `[DONE]` as it is."""
        items = [item for item in self.body.decode().split("\n\n") if item.startswith("data: ")]
        return [item if item == "data: [DONE]" else json.loads(item[6:]) for item in items]

    def text(self, index: int = 0) -> str:
        """Return the text of one choice."""
        choices = [choice for event in self.events if isinstance(event, dict) for choice in event["choices"]]
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "")
            for choice in choices
            if choice["index"] == index
        )


class Connection:
    """A raw connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, path: str, body: Any, *, version: str = "1.1", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": "test", "content-type": "application/json", "content-length": str(len(data))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.writer.write(f"POST {path} HTTP/{version}\r\n{lines}\r\n".encode() + data)

    async def head(self) -> bytes:
        async with asyncio.timeout(WAIT):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def until(self, mark: bytes) -> bytes:
        """Return everything up to some bytes."""
        async with asyncio.timeout(WAIT):
            return await self.reader.readuntil(mark)

    async def reply(self) -> Reply:
        head = await self.head()
        async with asyncio.timeout(WAIT):
            lower = head.lower()
            if b"transfer-encoding: chunked" in lower:
                return Reply(head, *await self._chunks())
            if b"content-length: " in lower:
                length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
                return Reply(head, await self.reader.readexactly(length), True)
            return Reply(head, await self.reader.read(), True)

    async def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        try:
            while True:
                size = int(await self.reader.readline(), 16)
                body += await self.reader.readexactly(size)
                assert await self.reader.readexactly(2) == b"\r\n"
                if not size:
                    return body, True
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            return body, False

    async def ended(self) -> bytes:
        """Return what comes until the server closes the connection."""
        async with asyncio.timeout(WAIT):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def aclose(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class Server:
    """The frontend on a port of its own."""

    def configure(self, **settings: Any) -> None:
        """Give it other settings than the default, before it starts."""
        self.config = self.apis.Config(**settings)

    def __init__(self, apis: type[Frontend] = APIS) -> None:
        self.apis = apis
        self.directory = Directory()
        self.records: list[RequestRecord] = []
        self._record = asyncio.Event()
        self.metrics = Metrics()
        self.body_limit = 1024 * 1024
        #: What stands before each route.
        self.protect: Callable[[HttpRoute], HttpRoute] = lambda route: route
        self.config = apis.Config()
        self.response_store: ResponseStore | None = None
        self.write_stall = 5.0
        self.keep_alive = 15.0
        self.listener: Listener | None = None
        self.frontend: Frontend | None = None
        self._connections: list[Connection] = []

    def add_model(self, name: str = "m", files: dict[str, bytes] | None = None, **card: Any) -> FakeModel:
        fields: dict[str, Any] = {"instance_id": 7, "model_types": ["chat", "completions"], "context_length": 1000}
        model = FakeModel(ModelCard(name=name, **{**fields, **card}), files or {})
        self.directory.models[name] = model
        return model

    def _announce(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._record.set()

    async def record(self) -> RequestRecord:
        """Return the record of the one finished request."""
        async with asyncio.timeout(WAIT):
            await self._record.wait()
        return self.records[-1]

    def gauge(self, name: str, model: str = "m") -> float | None:
        return self.metrics.registry.get_sample_value(f"dynamo_frontend_{name}", {"model": model})

    async def start(self) -> None:
        services = FrontendServices(
            models=self.directory,
            requests=RequestTracker(self.metrics, self._announce),
            metrics=self.metrics,
            write_stall=self.write_stall,
            keep_alive=self.keep_alive,
            response_store=self.response_store,
        )
        self.frontend = self.apis(self.config, services)
        self.generation = Generation.find(services)
        await self.frontend.start()
        # As core does without an admin listener: what is offered on both is there once, as the public has it.
        routes = {(route.method, route.path): self.protect(route) for route in reversed(list(self.frontend.routes()))}
        self.listener = Listener(
            "public",
            host="127.0.0.1",
            port=0,
            routes=list(reversed(routes.values())),
            body_limit=self.body_limit,
            max_connections=100,
            idle_timeout=75,
            write_stall=self.write_stall,
        )
        await self.listener.start()

    @property
    def url(self) -> str:
        assert self.listener is not None
        return self.listener.url

    async def connect(self, limit: int = 2**16, receive_buffer: int | None = None) -> Connection:
        assert self.listener is not None
        if receive_buffer is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.port, limit=limit)
        else:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.listener.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        connection = Connection(reader, writer)
        self._connections.append(connection)
        return connection

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Return a request and its whole answer."""
        connection = await self.connect(limit=2**22)
        connection.send(path, body, **headers)
        reply = await connection.reply()
        await connection.aclose()
        return reply

    async def asked(self, path: str, body: Any, **how: Any) -> tuple[Connection, Call]:
        """Return a request that was sent, and its call as the worker has it."""
        connection = await self.connect()
        connection.send(path, body, **how)
        return connection, await self.directory.models["m"].call()

    async def begun(self, path: str, body: Any) -> tuple[Connection, Call, bytes]:
        """Return a stream of which "Hel" has come, and what was seen until then."""
        connection, call = await self.asked(path, body)
        call.say("Hel")
        return connection, call, await connection.until(b"Hel")

    async def shown(self, path: str, body: Any) -> str:
        """Return the prompt that the model is shown of a request."""
        model = self.directory.models["m"]
        model.says("x")
        reply = await self.post(path, body)
        assert reply.status == 200, reply.body
        return await model.prompt()

    async def hello(self, path: str, body: Any, *end: bytes) -> bytes:
        """Return the text a client sees of "Hel" and "lo" after these bytes have come, one after the other."""
        connection, call, seen = await self.begun(path, body)
        call.say("lo")
        seen += await connection.until(b'"lo"')
        call.finish()
        for mark in end:
            seen += await connection.until(mark)
        return seen

    async def chat(self, **fields: Any) -> Reply:
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def complete(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": "m", "prompt": "Hi", **fields})

    async def get(self, path: str) -> Reply:
        connection = await self.connect()
        connection.writer.write(f"GET {path} HTTP/1.1\r\nhost: test\r\n\r\n".encode())
        reply = await connection.reply()
        await connection.aclose()
        return reply

    async def aclose(self) -> None:
        for connection in self._connections:
            await connection.aclose()
        if self.listener is not None:
            await self.listener.aclose()
        if self.frontend is not None:
            await self.frontend.aclose()


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


@pytest.fixture
def apis() -> type[Frontend]:
    """Return the APIs that are served. A module of tests may have others."""
    return APIS


@pytest.fixture
async def cold_server(apis: type[Frontend]) -> AsyncIterator[Server]:
    """Yield a server that a test still changes and starts."""
    server = Server(apis)
    yield server
    await server.aclose()


@pytest.fixture
def template() -> str | None:
    """Return the chat template of the model.

    With one of a module's own the model reasons and writes calls like Qwen.
    """
    return None


@pytest.fixture
async def server(cold_server: Server, template: str | None) -> Server:
    """Return a started server with the model ``m``."""
    if template is None:
        cold_server.add_model()
    else:
        model = cold_server.add_model(files={"chat_template.jinja": template.encode()})
        model.parsers = Parsers(HermesParser, ThinkParser)
    await cold_server.start()
    return cold_server


@pytest.fixture
async def guarded(cold_server: Server, keys: AuthSettings) -> Server:
    """Return a server that asks for one of the `keys` of a module, with the models ``m`` and ``secret``."""
    known = ApiKeys.load(keys, {})
    assert known is not None
    cold_server.protect = known.protect
    for name in ("m", "secret"):
        model = cold_server.add_model(name)
        model.script = lambda call: call.finish(text="yes")
    await cold_server.start()
    return cold_server


@pytest.fixture
def model(server: Server) -> FakeModel:
    """Return the model of the server."""
    return server.directory.models["m"]


@pytest.fixture
async def sdk(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield the official client."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
