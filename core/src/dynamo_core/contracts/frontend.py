"""The frontend: an API for clients, as routes on a listener of core, over the services of core."""

from __future__ import annotations

import asyncio
import enum
import math
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from aiohttp import web

from dynamo_core.contracts.admission import Permit, Principal
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.explain import RouteView
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.parsers import Parsers
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.thresholds import ThresholdControl
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.errors import DynamoError, Problem, problem_of
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest
from dynamo_core.protocol.request_ids import client_request_id, new_request_id
from dynamo_core.resources import AsyncResource

HttpHandler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Where the listener notes on a request who asks.
PRINCIPAL = web.RequestKey("dynamo.principal", Principal)
_ANONYMOUS = Principal()
_REQUEST_ID = web.RequestKey("dynamo.request_id", str)
#: Seconds that the client waits for the whole answer, or for the next bytes of it; and how often it has asked before.
_TIMEOUT, _READ_TIMEOUT, _RETRIES = "x-stainless-timeout", "x-stainless-read-timeout", "x-stainless-retry-count"


_VARIABLE = re.compile(r"\{(\w+)(?::[^}]*)?\}")


def principal_of(http: web.Request) -> Principal:
    """Who asks, as the listener found out before it called the handler; nobody in particular if no keys are asked for.

    A frontend hands it to the model, and treats a model that it does not allow as one that is not there. What clients
    say of their patience and of earlier attempts, as the official SDKs do, is in `deadline` and `retries`.
    """
    principal: Principal = http.get(PRINCIPAL, _ANONYMOUS)
    headers = http.headers
    seconds = _number(headers.get(_TIMEOUT) or headers.get(_READ_TIMEOUT))
    retries = int(_number(headers.get(_RETRIES)) or 0)
    if seconds is not None:
        principal = replace(principal, deadline=asyncio.get_running_loop().time() + seconds)
    return replace(principal, retries=retries) if retries else principal


def request_id_of(http: web.BaseRequest) -> str:
    """What the answer calls the request in ``x-request-id``: the client's own name for it, else one of ours.

    The listener writes it; only who writes an answer past aiohttp has to do so itself.
    """
    known: str | None = http.get(_REQUEST_ID)
    if known is None:
        known = http[_REQUEST_ID] = client_request_id(http.headers.get("x-request-id")) or new_request_id()
    return known


def set_request_id(http: web.BaseRequest, request_id: str) -> None:
    """The request has an id in the books; its answer is called by that, unless the client has a name of its own."""
    http[_REQUEST_ID] = client_request_id(http.headers.get("x-request-id")) or request_id


def _number(value: str | None) -> float | None:
    """What a header says, if it is a number from 0 on."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None


class ListenerName(enum.StrEnum):
    """Where a route is reachable: for everybody, or for operators."""

    PUBLIC = "public"
    ADMIN = "admin"


#: Words an error in the body of an API.
ErrorResponse: TypeAlias = Callable[[Problem], web.Response]


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """A route that a plugin contributes. `summary` is one line for the route list.

    The handler reads a body with `read`, `text` or `json` of the request, which unpack what the client has packed.

    `respond_error` words what the listener answers in place of the handler: to a caller that may not call it, and to an
    error that it raises; without it core does. With `early` the route is answered also while the process is still
    starting; others get a 503 then.
    """

    method: str
    path: str
    handler: HttpHandler
    summary: str = ""
    listener: ListenerName = ListenerName.PUBLIC
    respond_error: ErrorResponse | None = None
    early: bool = False

    @property
    def display_path(self) -> str:
        """The path as it is told: variables without their patterns, ``/models/{id}``."""
        return _VARIABLE.sub(r"{\1}", self.path)


class TokenStream(Protocol):
    """The answer to one request. Iterating yields everything that waits, merged; closing it stops the generation.

    Either iterate, or set `on_ready` and use `take`; not both at once.
    """

    def __aiter__(self) -> AsyncIterator[LLMEngineOutput]: ...

    async def __anext__(self) -> LLMEngineOutput:
        """The next merged item. Raises the stream's error, or `StopAsyncIteration` after the complete stream."""

    def take(self) -> Sequence[LLMEngineOutput]:
        """Everything that waits, merged per choice, without waiting; empty if nothing does."""

    def on_ready(self, callback: Callable[[], None] | None, *, coalesce: int = 1) -> None:
        """Calls `callback` once per loop turn in which something arrived or the stream ended; at once if so already.

        A reader in no hurry sets `coalesce`, at most a few hundred. It is called when so many items wait, or at the
        end.
        """

    @property
    def waiting(self) -> int:
        """How many items wait, before merging. A reader in no hurry may let a few hundred gather."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come; what waits can still be taken."""

    @property
    def error(self) -> DynamoError | None:
        """Why the stream ended badly, once `ended`."""

    @property
    def instance_id(self) -> int | None:
        """The worker that serves the request now; of two, the one that decodes."""

    @property
    def prefill_instance_id(self) -> int | None:
        """The worker that computed the prompt; None if `instance_id` did that too."""

    def pause(self) -> None:
        """The reader cannot keep up: asks for no more until `resume`."""

    def resume(self) -> None:
        """Takes `pause` back."""

    async def aclose(self) -> None:
        """Ends the request, wherever it is. When this returns, all it held is released. Safe twice."""


class ServedModel(Protocol):
    """A model that can be asked now."""

    @property
    def name(self) -> str:
        """The public name."""

    @property
    def card(self) -> ModelCard:
        """The card of one of its workers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def instance_count(self) -> int:
        """How many workers answer for it; prefill workers do not."""

    @property
    def missing_roles(self) -> Sequence[str]:
        """Roles (as in `ModelCard.worker_type`) without which it cannot be asked now; empty if it can."""

    @property
    def parsers(self) -> Parsers:
        """The parsers that its card names; not for models whose engine gives text."""

    def file(self, name: str) -> bytes | None:
        """A file of the model folder, such as ``chat_template.jinja``; None if the card does not list it."""

    def precheck(self, principal: Principal) -> None:
        """A quick look before any work is done for a request.

        Raises:
            ServiceOverloaded: it would be refused anyway.
            Unavailable: a role is missing.
        """

    async def admit(self, request: PreprocessedRequest, principal: Principal) -> Permit:
        """Lets in what a client asked and several calls will answer, of which `request` is the first.

        The caller hands each call a `SharedPermit` made from it, and ends that when all are over.
        """

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, permit: Permit | None = None
    ) -> TokenStream:
        """Admits, routes and starts a request; returns once a worker has accepted it.

        With `permit` it has been let in already; the call releases it. Stopping `ctx` stops the request. The caller
        owns the stream and must close it.
        """

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        """Embeds.

        Raises:
            NotSupported: the engine does not make embeddings.
        """

    def explain(self, request: PreprocessedRequest) -> Sequence[RouteView]:
        """For operators: how the workers of each role look to a request now. Nothing is chosen or reserved."""


class ModelDirectory(Protocol):
    """The models that are served now."""

    def get(self, name: str) -> ServedModel:
        """The model with this name.

        Raises:
            Unavailable: no model at all is registered, or this one has lost its workers or has prefill workers only.
            ModelNotFound: others are.
        """

    def list(self) -> Sequence[ServedModel]:
        """All models, by name."""

    def missing_roles(self, name: str) -> Sequence[str]:
        """Roles (as in `ModelCard.worker_type`) without which this model cannot be asked now.

        Empty if it can, and if none of its workers is there to tell.
        """

    @property
    def synced(self) -> bool:
        """Whether discovery's first snapshot is in."""


class RequestLog(Protocol):
    """Begins the accounting of client requests."""

    def begin(
        self, *, model: str, endpoint: str, streaming: bool, headers: dict[str, str], key_id: str = ""
    ) -> InflightRequest:
        """Counts a request in. `headers` holds lower-case names; `traceparent` and `x-request-id` are used.

        `key_id` is that of the principal.
        """

    def refused(self, error_type: str) -> None:
        """Counts a request that failed before it was known for which model it is."""


class InflightRequest(Protocol):
    """One client request being served. A context manager: leaving it counts the request out and announces the record.

    Until `succeed` is called the request counts as failed.
    """

    request_id: str
    trace_id: str
    #: What to send along with the request: trace context and the client's own request id.
    metadata: dict[str, str]

    def __enter__(self) -> InflightRequest: ...

    def __exit__(self, *exc: object) -> None: ...

    def prompt_tokens(self, count: int) -> None:
        """The length of the prompt is known."""

    def output(self, tokens: int) -> None:
        """New tokens are about to be shown to the client; call once per write, not per token."""

    def routed(self, instance_id: int | None) -> None:
        """A worker accepted the request; after a migration, another one."""

    def succeed(self, finish_reason: str | None, cached_tokens: int | None = None) -> None:
        """The whole answer was given to the client. `cached_tokens` is what the engine says it had of the prompt."""

    def fail(self, error_type: str, http_status: int) -> None:
        """The request ends with an error that the client is told."""

    def disconnected(self) -> None:
        """The client went away."""


@dataclass(frozen=True, slots=True)
class FrontendServices:
    """What a frontend is made with."""

    models: ModelDirectory
    requests: RequestLog
    metrics: MetricsScope
    #: Seconds a client may stall a write before it is cut off.
    write_stall: float
    #: Seconds of silence after which a stream gets a comment line.
    keep_alive: float
    #: How the names of a frontend's metrics begin.
    metrics_prefix: str = "dynamo_frontend"
    #: The HTTP status of a request that is refused for load.
    overload_status: int = 503
    #: How many bytes of prompts a tokenizer may remember together with their tokens; 0 for none.
    token_cache: int = 0
    #: When workers are busy, to be looked at and changed by operators; None where that is not offered.
    thresholds: ThresholdControl | None = None
    #: All routes of a listener, core's own too, for a description of them. Known once the listeners are made.
    routes: Callable[[ListenerName], Sequence[HttpRoute]] = lambda _: ()

    def problem_of(self, error: BaseException) -> Problem:
        """What a client is told of an error, with the status that the settings have for overload."""
        return problem_of(error, self.overload_status)


class Frontend(Plugin, AsyncResource):
    """An API for clients."""

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        self.config = config
        self.services = services

    @abstractmethod
    def routes(self) -> Iterable[HttpRoute]:
        """The routes of this frontend. Asked once, before the listeners open.

        Where there is no admin listener, its routes are served by the public one; of two with the same method and path
        the public one is kept.
        """

    @abstractmethod
    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """Makes the tokenizer of a model that has appeared. Called in a thread, once per model.

        `kind` is what the model's card says; `files` maps the bare names of its files to their contents.

        Raises:
            ConfigError: the kind is not known, or a file is missing or broken.
        """

    async def start(self) -> None:
        """Begins background work. Called once, before the routes can be reached."""

    async def aclose(self) -> None:
        """Ends background work, after the listeners have closed. Safe twice, and without `start`."""
