"""`UpstreamEngine`: the engine contract over an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from dynamo_core import (
    EMBED,
    MULTI_CHOICE,
    RERANK,
    SCORE,
    BackendError,
    DisaggregationMode,
    DynamoError,
    EmbedOutput,
    EmbedRequest,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    ScoreOutput,
    ScoreRequest,
    WorkerConfig,
)
from dynamo_core.errors import ConfigError

from dynamo_plugin_engine_upstream import pooling
from dynamo_plugin_engine_upstream.client import Client, Stopped
from dynamo_plugin_engine_upstream.config import UpstreamConfig
from dynamo_plugin_engine_upstream.request import build_request
from dynamo_plugin_engine_upstream.response import ResponseReader, ServerError
from dynamo_plugin_engine_upstream.server_errors import stream_error
from dynamo_plugin_engine_upstream.sse import DONE, EventDecoder

log = logging.getLogger(__name__)

#: Seconds between two looks for a server that is not up yet.
_POLL_INTERVAL = 0.5
#: Headers of the client's request that are passed on, so that one trace shows both systems.
_FORWARDED_HEADERS = ("traceparent", "tracestate")
#: Headers of the connection and of the body, which are this engine's own.
_OWN_HEADERS = frozenset(
    (
        *("accept", "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect"),
        *("host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)
#: What the server can do beside answers, by the request types that the config names.
_CAPABILITIES = {"embeddings": EMBED, "score": SCORE, "rerank": RERANK}
#: Where servers say how long a context may be.
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window")
#: Names shown in a message.
_SHOWN = 10
#: Bytes of an answer that are decoded in the event loop.
_INLINE = 64 * 1024

T = TypeVar("T")


class UpstreamEngine(LLMEngine):
    """Passes requests on to one server as they are, and its answers back. One worker stands for one server."""

    NAME: ClassVar[str] = "upstream"
    Config: ClassVar[type[PluginConfig]] = UpstreamConfig
    config: UpstreamConfig

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        super().__init__(config, worker)
        self._client: Client | None = None
        self._model = ""
        self._names: dict[str, str] = {}
        # No server says which of these it has; the config does.
        self._pooling = {_CAPABILITIES[name] for name in worker.endpoint_types if name in _CAPABILITIES}

    async def start(self, worker_id: int) -> EngineConfig:
        """Find the server and the model there; wait for a server that is not up yet.

        Raises:
            ConfigError: the server does not have the model, or the key or a file is wrong.
            BackendError: the server cannot be reached.
        """
        if self.worker.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            raise ConfigError("engine 'upstream' knows no prefill and decode roles: set disaggregation_mode to agg")
        self._client = client = Client(self.config)
        listed = await self._list_models(client)
        found = self._choose(listed)
        self._model = found["id"]
        public = self.worker.served_model_name or self.worker.model_name or self._model
        # Clients know neither where the model is nor what it is called there.
        self._names = {self.config.url: "…"} | ({self._model: public} if self._model != public else {})
        if self.config.api_key is not None:
            self._names[self.config.api_key.get_secret_value()] = "…"
        return EngineConfig(
            model=self.worker.model_name or self._model,
            served_model_name=self.worker.served_model_name,
            model_input="text",
            context_length=_length(found),
            # The server is asked for all choices at once, and shares the prompt among them.
            capabilities=frozenset({MULTI_CHOICE, *self._pooling}),
        )

    def _clients_headers(self, request: PreprocessedRequest) -> dict[str, str]:
        """Return the headers of the client's request that the server gets."""
        hints = request.routing
        if not self.config.forward_headers or hints is None or hints.headers is None:
            return {}
        return {name: value for name, value in hints.headers.items() if name not in _OWN_HEADERS}

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Stream the server's answer.

        Raises:
            BackendError.InvalidArgument: the server refuses the request, with its words.
            WorkerOverloaded: the server has no room.
            BackendError: it cannot be reached, breaks off, or is silent for too long.
        """
        client = self._require_client()
        if ctx.is_stopped():
            yield LLMEngineOutput.cancelled()
            return
        if request.is_probe:
            self._choose(await client.models())
            yield LLMEngineOutput.stop()
            return
        path, body = build_request(request, self._model)
        headers = {**self._clients_headers(request), **_own_headers(ctx)}
        call = client.call(path, body, headers, self._names)
        reader = ResponseReader(request.sampling_options.n or 1)
        forget = ctx.on_stop(call.stop)
        try:
            await call.open()
            events = EventDecoder()
            while not reader.complete:
                received = await call.read()
                for item in _items(events, reader, received):
                    if ctx.is_stopped():
                        raise Stopped
                    yield item
        except Stopped:
            yield LLMEngineOutput.cancelled()
        except ServerError as error:
            raise stream_error(error.error, self._names) from error
        finally:
            forget()
            await call.aclose(complete=reader.complete and not ctx.is_stopped())

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        """Return the server's vectors.

        Raises:
            BackendError: as for `generate`; `Cancelled` if the request was stopped.
        """
        read = partial(pooling.read_embeddings, inputs=len(request.token_ids))
        return await self._ask(pooling.EMBEDDINGS, pooling.embedding_body(request, self._model), read, ctx)

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        """Return the server's scores, from its route for pairs if it has one.

        Raises:
            BackendError: as for `embed`.
        """
        path = pooling.SCORE if SCORE in self._pooling else pooling.RERANK
        read = partial(pooling.read_scores, documents=len(request.documents), path=path)
        return await self._ask(path, pooling.score_body(request, self._model, path), read, ctx)

    async def _ask(self, path: str, body: dict[str, Any], read: Callable[[bytes], T], ctx: GenerateContext) -> T:
        """Return what `read` makes of the server's answer to a request that is not streamed."""
        call = self._require_client().call(path, body, _own_headers(ctx), self._names)
        if ctx.is_stopped():
            call.stop()
        forget = ctx.on_stop(call.stop)
        complete = False
        try:
            answer = await call.whole()
            complete = True
        except Stopped:
            raise BackendError.Cancelled("the request was stopped") from None
        finally:
            forget()
            await call.aclose(complete=complete)
        return read(answer) if len(answer) <= _INLINE else await asyncio.to_thread(read, answer)

    async def cleanup(self) -> None:
        """Close all connections; streams that still run end with `BackendError.Disconnected`."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _require_client(self) -> Client:
        if self._client is None:
            raise BackendError.EngineShutdown("the engine does not run")
        return self._client

    async def _list_models(self, client: Client) -> Sequence[dict[str, Any]] | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.start_timeout
        logged = False
        while True:
            try:
                return await client.models()
            except BackendError.CannotConnect as error:
                raise ConfigError(f"workers.{self.worker.worker}.engine: {error}", cause=error) from error
            except DynamoError as error:
                if isinstance(error, BackendError.InvalidArgument) or loop.time() + _POLL_INTERVAL > until:
                    raise
                if not logged:
                    logged = True
                    log.info("worker %s waits for its server: %s", self.worker.worker, error)
            except TimeoutError as error:
                if loop.time() + _POLL_INTERVAL > until:
                    raise BackendError.ResponseTimeout(f"{self.config.url}/models does not answer") from error
            await asyncio.sleep(_POLL_INTERVAL)

    def _choose(self, listed: Sequence[dict[str, Any]] | None) -> dict[str, Any]:
        """Return the model to ask for, as the server lists it.

        Raises:
            ConfigError: it has no such model, or several of which none was named.
        """
        name, where = self.config.model, f"workers.{self.worker.worker}.engine.model"
        if listed is None:
            # A server without a list: what it has shows when it is asked.
            name = name or self.worker.model_name
            if not name:
                raise ConfigError(f"{where}: {self.config.url} lists no models; name the one to ask for")
            return {"id": name}
        by_name = {model["id"]: model for model in listed}
        wanted = name or self.worker.model_name
        if wanted in by_name:
            return by_name[wanted]
        if name is None and len(by_name) == 1:
            return next(iter(by_name.values()))
        names = ", ".join(sorted(by_name)[:_SHOWN]) or "none"
        raise ConfigError(f"{where}: {self.config.url} has no model {wanted!r}; it lists {names}: name one of them")


def _own_headers(ctx: GenerateContext) -> dict[str, str]:
    """Return the headers that every request has."""
    traced = {name: ctx.metadata[name] for name in _FORWARDED_HEADERS if name in ctx.metadata}
    return traced | {"x-request-id": ctx.id}


def _items(events: EventDecoder, reader: ResponseReader, received: bytes) -> Iterator[LLMEngineOutput]:
    """Yield what the bytes bring, one by one, so that what came before an error is not lost; no bytes are the end."""
    for data in events.feed(received) if received else events.end():
        if data == DONE:
            yield from reader.end(done=True)
            return
        yield from reader.read(data)
    if not received:
        yield from reader.end()


def _length(model: dict[str, Any]) -> int | None:
    """Return the context of a listed model, in tokens, if the server says it."""
    for name in _CONTEXT_FIELDS:
        value = model.get(name)
        if isinstance(value, int) and value > 1:
            return value
    return None
