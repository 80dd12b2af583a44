"""The frontend: an API for clients, as routes on a listener."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.parsers import Parsers
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.explain import RouteView
from dynamo_core.contracts.requests.principal import ANONYMOUS, Principal
from dynamo_core.contracts.response_store import ResponseStore
from dynamo_core.contracts.thresholds import ThresholdControl
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.errors import DynamoError, Problem, problem_of
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest
from dynamo_core.resources import AsyncResource


class TokenStream(Protocol):
    """The answer to one request. Iterating yields all pending items, merged; closing it stops the generation.

    Either iterate, or set `on_ready` and use `take`; not both at once.
    """

    def __aiter__(self) -> AsyncIterator[LLMEngineOutput]: ...

    async def __anext__(self) -> LLMEngineOutput:
        """Return the next merged item. Raise the stream's error, or `StopAsyncIteration` after the complete stream."""

    def take(self) -> Sequence[LLMEngineOutput]:
        """Return all pending items, merged per choice, without waiting; empty if there are none."""

    def on_ready(self, callback: Callable[[], None] | None, *, coalesce: int = 1) -> None:
        """Call `callback` once per loop turn in which items arrived or the stream ended; at once if so already.

        With `coalesce`, at most a few hundred, the callback waits for that many items or the end.
        """

    @property
    def waiting(self) -> int:
        """The number of pending items, before merging. A reader in no hurry may let a few hundred pile up."""

    @property
    def ended(self) -> bool:
        """Whether no more items will come; pending items can still be taken."""

    @property
    def error(self) -> DynamoError | None:
        """The error that ended the stream, once `ended`."""

    @property
    def instance_id(self) -> int | None:
        """The worker that serves the request now; of two, the one that decodes."""

    @property
    def prefill_instance_id(self) -> int | None:
        """The worker that computed the prompt; None if `instance_id` did that too."""

    def pause(self) -> None:
        """Ask for no more items until `resume`, because the reader cannot keep up."""

    def resume(self) -> None:
        """End a `pause`."""

    async def aclose(self) -> None:
        """End the request in any state. When this returns, all its resources are released. Safe twice."""


class ServedModel(Protocol):
    """A model that can serve requests now."""

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
        """The number of workers that answer for it; prefill workers do not count."""

    @property
    def missing_roles(self) -> Sequence[str]:
        """Roles (as in `ModelCard.worker_type`) that the model lacks to serve requests now; empty if it lacks none."""

    @property
    def parsers(self) -> Parsers:
        """The parsers that its card names; not for models whose engine gives text."""

    def file(self, name: str) -> bytes | None:
        """Return a file of the model folder, such as ``chat_template.jinja``; None if the card does not list it."""

    def precheck(self, principal: Principal) -> None:
        """Check a request quickly before any work is done for it.

        Raises:
            ServiceOverloaded, RateLimited, QuotaExceeded: `admit` would reject it anyway.
            Unavailable: a role is missing.
        """

    async def admit(self, request: PreprocessedRequest, principal: Principal) -> Permit:
        """Admit a client request that several calls will answer; `request` is the first of them.

        The caller passes each call a `SharedPermit` made from the result, and ends that after the last call.
        """

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, permit: Permit | None = None
    ) -> TokenStream:
        """Admit, route and start a request; return once a worker has accepted it.

        With `permit` it has been admitted already; the call releases that. Stopping `ctx` stops the request. The caller
        owns the stream and must close it.
        """

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        """Embed.

        Raises:
            NotSupported: the engine does not make embeddings.
        """

    async def score(
        self, request: ScoreRequest, token_ids: list[int], ctx: EngineContext, principal: Principal
    ) -> ScoreOutput:
        """Score documents; `token_ids` are those of all texts, for admission and routing.

        Raises:
            NotSupported: the engine does not score texts, or takes a single query only.
        """

    def explain(self, request: PreprocessedRequest, principal: Principal = ANONYMOUS) -> Sequence[RouteView]:
        """Explain to operators how the router rates the workers of each role for a request now. Nothing is reserved."""


class ModelDirectory(Protocol):
    """The models that are served now."""

    def get(self, name: str) -> ServedModel:
        """Return the model with this name.

        Raises:
            Unavailable: no model at all is registered, or this one has lost its workers or has prefill workers only.
            ModelNotFound: other models are registered.
        """

    def list(self) -> Sequence[ServedModel]:
        """Return all models, by name."""

    def missing_roles(self, name: str) -> Sequence[str]:
        """Return roles (as in `ModelCard.worker_type`) that this model lacks to serve requests now.

        Empty if it lacks none, and if it has no workers at all.
        """

    def readiness(self) -> Mapping[str, bool]:
        """Return whether each known model can be asked now: those of the config, of workers, and earlier ones."""

    @property
    def synced(self) -> bool:
        """Whether the first snapshot of discovery is complete."""


class RequestLog(Protocol):
    """Starts the accounting of client requests."""

    def begin(
        self, *, model: str, endpoint: str, streaming: bool, headers: dict[str, str], principal: Principal = ANONYMOUS
    ) -> InflightRequest:
        """Count a request in. `headers` holds lower-case names; `traceparent` and `x-request-id` are used.

        The record of the request names the key, the tenant, the user and the session of `principal`.
        """

    def refused(self, error_type: str) -> None:
        """Count a request that failed before its model was known."""


class InflightRequest(Protocol):
    """One client request in progress. A context manager: leaving it ends the accounting and announces the record.

    Until `succeed` is called the request counts as failed.
    """

    request_id: str
    trace_id: str
    #: What to send along with the request: trace context and the client's own request id.
    metadata: dict[str, str]

    def __enter__(self) -> InflightRequest: ...

    def __exit__(self, *exc: object) -> None: ...

    def prompt_tokens(self, count: int) -> None:
        """Record the length of the prompt."""

    def output(self, tokens: int) -> None:
        """Record new tokens that are about to be sent to the client; call once per write, not per token."""

    def routed(self, instance_id: int | None) -> None:
        """Record the worker that accepted the request; after a migration, another one."""

    def succeed(self, finish_reason: str | None, cached_tokens: int | None = None) -> None:
        """Record that the whole answer was sent. `cached_tokens` are prompt tokens from the engine's cache."""

    def fail(self, error_type: str, http_status: int, error: BaseException | None = None) -> None:
        """Record what the client is told, and the error behind it, which operators see if it is the server's."""

    def disconnected(self) -> None:
        """Record that the client disconnected."""


@dataclass(frozen=True, slots=True, eq=False)
class FrontendServices:
    """The services that a frontend is constructed with; one object for all frontends of a process."""

    models: ModelDirectory
    requests: RequestLog
    metrics: MetricsScope
    #: Seconds that a client may stall a write before its connection is cut.
    write_stall: float
    #: Seconds of silence after which a stream gets a comment line.
    keep_alive: float
    #: How the names of a frontend's metrics begin.
    metrics_prefix: str = "dynamo_frontend"
    #: The HTTP status of a request that is refused for load.
    overload_status: int = 503
    #: How many bytes of prompts a tokenizer may remember together with their tokens; 0 for none.
    token_cache: int = 0
    #: The thresholds of busy workers, for operators to read and change; None where that is not offered.
    thresholds: ThresholdControl | None = None
    #: Where responses are kept between requests; None where the settings name no store. Core starts and closes it.
    response_store: ResponseStore | None = None
    #: All routes of a listener, core's own too, for a description of them. Known once the listeners are made.
    routes: Callable[[ListenerName], Sequence[HttpRoute]] = lambda _: ()

    def problem_of(self, error: BaseException) -> Problem:
        """Return what a client is told of an error, with the status that the settings have for overload."""
        return problem_of(error, self.overload_status)


class Frontend(Plugin, AsyncResource):
    """An API for clients. Where several are served, each gets the settings of all and one set of services."""

    #: Other frontends, by name, that are served with this one where they are installed and the config lists no APIs.
    COMPANIONS: ClassVar[Sequence[str]] = ()
    #: Whether it keeps anything in the response store that the settings name.
    USES_RESPONSE_STORE: ClassVar[bool] = False

    def __init__(self, config: PluginConfig, services: FrontendServices) -> None:
        self.config = config
        self.services = services

    @abstractmethod
    def routes(self) -> Iterable[HttpRoute]:
        """Return the routes of this frontend. Called once, before the listeners open.

        Where there is no admin listener, its routes are served by the public one; of two with the same method and path
        the public one is kept.
        """

    @classmethod
    def claims(cls, config: PluginConfig) -> Iterable[str]:
        """Return `HttpRoute.claim` of the public routes, as far as the settings alone tell them.

        ``dynamo check`` refuses two APIs with the same.
        """
        return ()

    @abstractmethod
    def load_tokenizer(self, kind: str, files: Mapping[str, bytes]) -> Tokenizer:
        """Make the tokenizer of a model that has appeared. Called in a thread, once per model.

        `kind` is what the model's card says; `files` maps the bare names of its files to their contents.

        Raises:
            ConfigError: the kind is not known, or a file is missing or broken.
        """

    @classmethod
    def describe_template(cls, files: Mapping[str, bytes]) -> Mapping[str, str]:
        """Return the forms of messages that a model's chat template reads, as words for ``dynamo check``.

        `files` maps the bare names of the model's files to their contents.
        """
        return {}

    async def start(self) -> None:
        """Start background work. Called once, before the routes can be reached."""

    async def aclose(self) -> None:
        """Stop background work, after the listeners have closed. Safe twice, and without `start`."""
