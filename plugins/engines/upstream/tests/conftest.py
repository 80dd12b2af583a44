"""A real HTTP server whose answers a test decides, and an engine that asks it."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio
from aiohttp import web
from dynamo_core import (
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    WorkerConfig,
)
from dynamo_plugin_engine_upstream.config import UpstreamConfig
from dynamo_plugin_engine_upstream.engine import UpstreamEngine

Handler = Callable[["Peer", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def words(*texts: str) -> list[dict[str, Any]]:
    """Return chunks of a chat answer, each with some text."""
    return [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]


END: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE: dict[str, Any] = {
    "choices": [],
    "usage": {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}


async def plain(peer: Peer, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Return two words, the end, and the usage."""
    return await peer.stream(http, *words("one ", "two"), END, USAGE, "[DONE]")


async def endless(peer: Peer, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Send as many words as were asked for, until the client has gone."""
    answer = await peer.begin(http)
    for _ in range(body.get("max_tokens", 4)):
        await peer.send(answer, *words("word "))
        await asyncio.sleep(0.001)
    await peer.send(answer, END, USAGE, "[DONE]")
    return answer


class Peer:
    """The server. `answer` makes the answers; what it was asked is kept."""

    words = staticmethod(words)
    plain = staticmethod(plain)
    endless = staticmethod(endless)
    END = END
    USAGE = USAGE

    def __init__(self) -> None:
        self.answer: Handler = plain
        self.models: Any = {"data": [{"id": "its-model", "max_model_len": 4096}]}
        self.models_status = 200
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.listed = 0
        #: The connections that requests came over.
        self.connections: set[Any] = set()
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self, *, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"

    async def aclose(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def begin(self, http: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(http)
        return answer

    async def send(self, answer: web.StreamResponse, *chunks: dict[str, Any] | str) -> None:
        for chunk in chunks:
            text = chunk if isinstance(chunk, str) else json.dumps(chunk)
            await answer.write(f"data: {text}\n\n".encode())

    async def stream(self, http: web.Request, *chunks: dict[str, Any] | str) -> web.StreamResponse:
        answer = await self.begin(http)
        await self.send(answer, *chunks)
        return answer

    async def _models(self, http: web.Request) -> web.Response:
        self.listed += 1
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        return web.json_response(self.models, status=self.models_status)

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.asked.append({"path": http.path, **body})
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        self.connections.add(http.transport)
        self.arrived.set()
        try:
            return await self.answer(self, http, body)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    """Yield the server, on a free port of the loopback."""
    peer = Peer()
    await peer.start()
    yield peer
    await peer.aclose()


class Worker:
    """An engine, started, and requests to it."""

    def __init__(self, engine: UpstreamEngine, config: EngineConfig) -> None:
        self.engine = engine
        self.config = config

    def ask(
        self,
        ctx: EngineContext | None = None,
        n: int | None = None,
        routing: RoutingHints | None = None,
        **body: Any,
    ) -> AsyncIterator[LLMEngineOutput]:
        raw = {"model": "ours", "messages": [{"role": "user", "content": "hi"}]} | body
        request = PreprocessedRequest(token_ids=[1], body=raw, sampling_options=SamplingOptions(n=n), routing=routing)
        return self.engine.generate(request, GenerateContext(ctx or EngineContext("a-request")))

    async def answer(self, **how: Any) -> list[LLMEngineOutput]:
        return [item async for item in self.ask(**how)]


Start = Callable[..., Awaitable[Worker]]


def make(url: str, *, name: str = "ours", **settings: Any) -> UpstreamEngine:
    config = UpstreamConfig.model_validate({"url": url, "start_timeout": 0} | settings)
    return UpstreamEngine(config, WorkerConfig(model_name=name, worker="up"))


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """Start engines, which are cleaned up after the test."""
    engines: list[UpstreamEngine] = []

    async def begin(url: str, **settings: Any) -> Worker:
        engine = make(url, **settings)
        engines.append(engine)
        return Worker(engine, await engine.start(1))

    yield begin
    for engine in engines:
        await engine.cleanup()
