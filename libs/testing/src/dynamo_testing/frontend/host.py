"""The host of a frontend under test: a real listener, accounting and streams, and the kit's own models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from aiohttp import web
from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.frontend import Frontend, FrontendServices
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.parsers import Parsers
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.explain import RouteView
from dynamo_core.contracts.requests.principal import ANONYMOUS, Principal
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.contracts.transports.call import Sink, Source
from dynamo_core.errors import DynamoError, ModelNotFound, NotSupported
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput, merge_outputs
from dynamo_core.protocol.records import ModelCard, RequestRecord
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest
from dynamo_http.listener import Listener
from dynamo_http.request_identity import PRINCIPAL
from dynamo_runtime.dispatch.execution.response_stream import FlushQueue, ResponseStream
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_telemetry.metrics import Metrics

MODEL, OTHER = "kit-model", "kit-other"
#: The worker that answers every request.
WORKER = 7


class Grip(Source):
    """The calling end's control over a call of the kit."""

    def __init__(self) -> None:
        self.stopped = asyncio.Event()

    async def aclose(self) -> None:
        self.stopped.set()

    def stop(self) -> None:
        self.stopped.set()


class QuietOwner:
    """The owner of a stream that counts nothing, holds nothing and tries nothing again."""

    def first_item(self) -> None:
        """Count nothing."""

    def attempt_failed(self, error: DynamoError) -> DynamoError | None:
        return error

    def stream_ended(self, error: DynamoError | None) -> None:
        """Do nothing: nothing is held."""

    async def settle(self) -> None:
        """Do nothing: nothing is under way."""


class Answering(QuietOwner):
    """One request that reached a model, as the worker's side sees it. It is the owner of its stream."""

    def __init__(self, request: PreprocessedRequest, permit: Permit | None) -> None:
        self.request = request
        self.grip = Grip()
        self.closed = asyncio.Event()
        self.stream = ResponseStream(merge_outputs, FlushQueue(), owner=self)
        self._permit = permit
        self._sink: Sink = self.stream.begin()
        self.stream.attach(self.grip, WORKER)

    def say(self, text: str, end: FinishReason | None = None) -> None:
        """Send a text, one token per byte; with `end` it is the last."""
        self._sink.data(LLMEngineOutput(list(text.encode()), end))
        if end is not None:
            self._sink.event(Annotated.from_complete_final())

    def fail(self, error: DynamoError) -> None:
        """End the answer with an error."""
        self._sink.event(Annotated.from_error(error))

    def stream_closed(self) -> None:
        if self._permit is not None:
            self._permit.release(0)
        self.closed.set()


def kit_listener(routes: list[HttpRoute]) -> Listener:
    """Return a listener on a free port of the loopback address."""
    return Listener(
        "kit",
        host="127.0.0.1",
        port=0,
        routes=routes,
        body_limit=1024 * 1024,
        max_connections=100,
        idle_timeout=75,
        write_stall=5.0,
    )


class KitModel:
    """A model whose tokens are bytes, answered by a check."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self.card = ModelCard(
            name=name, instance_id=WORKER, model_types=["chat", "completions"], context_length=100_000
        )
        self.tokenizer = tokenizer
        self.parsers = Parsers()
        self.instance_count = 1
        self.missing_roles: Sequence[str] = ()
        #: Raised in place of an answer.
        self.refusal: DynamoError | None = None
        #: Called with each request that arrives; without it a check answers by hand.
        self.script: Callable[[Answering], None] | None = None
        self._arrived: asyncio.Queue[Answering] = asyncio.Queue()

    def file(self, name: str) -> bytes | None:
        return None

    def precheck(self, principal: Principal) -> None:
        """Let everything in."""

    async def admit(self, request: PreprocessedRequest, principal: Principal) -> Permit:
        if self.refusal is not None:
            raise self.refusal
        return Permit()

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, permit: Permit | None = None
    ) -> ResponseStream:
        if self.refusal is not None:
            raise self.refusal
        answering = Answering(request, permit)
        self._arrived.put_nowait(answering)
        if self.script is not None:
            self.script(answering)
        return answering.stream

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        raise NotSupported("models of the kit make no embeddings")

    async def score(
        self, request: ScoreRequest, token_ids: list[int], ctx: EngineContext, principal: Principal
    ) -> ScoreOutput:
        raise NotSupported("models of the kit score no texts")

    def explain(self, request: PreprocessedRequest, principal: Principal = ANONYMOUS) -> Sequence[RouteView]:
        return ()

    def says(self, text: str) -> None:
        """Answer every request from now on with a text."""
        self.script = lambda answering: answering.say(text, FinishReason.STOP)

    async def request(self) -> Answering:
        """Return the next request that arrives."""
        return await self._arrived.get()


class House:
    """A frontend behind a listener, with two models."""

    def __init__(self, make_frontend: Callable[[FrontendServices], Frontend]) -> None:
        self.metrics = Metrics()
        self.records: asyncio.Queue[RequestRecord] = asyncio.Queue()
        self.models: dict[str, KitModel] = {}
        #: Who asks.
        self.principal = Principal()
        self.synced = True
        services = FrontendServices(
            models=self,
            requests=RequestTracker(self.metrics, self.records.put_nowait),
            metrics=self.metrics,
            write_stall=5.0,
            keep_alive=15.0,
        )
        self.frontend = make_frontend(services)
        self.routes = list(self.frontend.routes())
        self._listener: Listener | None = None

    # As the directory of models.

    def get(self, name: str) -> KitModel:
        if name not in self.models:
            raise ModelNotFound(f"there is no model {name!r}")
        return self.models[name]

    def list(self) -> Sequence[KitModel]:
        return [self.models[name] for name in sorted(self.models)]

    def missing_roles(self, name: str) -> Sequence[str]:
        return ()

    def readiness(self) -> Mapping[str, bool]:
        return dict.fromkeys(self.models, True)

    @property
    def url(self) -> str:
        """The URL of the listener."""
        assert self._listener is not None
        return self._listener.url

    async def start(self) -> None:
        """Start the frontend, then its listener, as core does."""
        self.models = {name: KitModel(name, self.frontend.load_tokenizer("bytes", {})) for name in (MODEL, OTHER)}
        await self.frontend.start()
        routes = {(route.method, route.path): route for route in reversed(self.routes)}
        self._listener = kit_listener([self._known(route) for route in routes.values()])
        await self._listener.start()

    def _known(self, route: HttpRoute) -> HttpRoute:
        """Return a route whose requests come from `principal`, as the listener notes it."""

        async def handler(http: web.Request) -> web.StreamResponse:
            http[PRINCIPAL] = self.principal
            return await route.handler(http)

        return replace(route, handler=handler)

    async def aclose(self) -> None:
        """Close the listener, then the frontend."""
        if self._listener is not None:
            await self._listener.aclose()
        await self.frontend.aclose()
