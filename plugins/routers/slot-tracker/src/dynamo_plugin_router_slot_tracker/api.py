"""The HTTP routes of the service. Each reads its body, changes the registry once, and informs the replicas."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import msgspec
from aiohttp import web
from dynamo_core import DynamoError, HttpHandler, HttpRoute, Problem
from dynamo_core.errors import problem_of
from dynamo_http import error_response

from dynamo_plugin_router_slot_tracker.decoding import BodyOf
from dynamo_plugin_router_slot_tracker.errors import Conflict, Malformed, Refusal
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication.replicas import Replicas
from dynamo_plugin_router_slot_tracker.schemas import (
    Addition,
    Peer,
    Projection,
    Registration,
    RequestKey,
    Unregistration,
)

#: Bytes of the largest body.
BODY_LIMIT = 2 * 1024 * 1024

#: Called for each call with its route and the status of the answer.
Count = Callable[[str, int], None]

_encoder = msgspec.json.Encoder()
_OK = b'{"status":"ok"}'
_FILTERS = ("model_name", "tenant_id")

#: What the listener refuses by itself, in the words of this service. Other refusals keep the listener's.
_TEXTS = {
    404: "route not found",
    405: "method not allowed",
    413: "Failed to buffer the request body: length limit exceeded",
}


def respond_error(problem: Problem) -> web.Response:
    """Return an error as the routes of this service word it."""
    text = problem.message.encode("utf-8", "replace").decode()
    return error_response(problem, _encoder.encode({"error": text}))


def respond_listener_error(problem: Problem) -> web.Response:
    """Return an error of the listener, not of a route."""
    return respond_error(msgspec.structs.replace(problem, message=_TEXTS.get(problem.status, problem.message)))


class Api:
    """The routes of the service over one registry; without `replicas` synchronization is off."""

    def __init__(self, registry: Registry, replicas: Replicas | None, count: Count | None = None) -> None:
        self._registry = registry
        self._replicas = replicas
        self._count = count
        self._registration = BodyOf(Registration)
        self._unregistration = BodyOf(Unregistration)
        self._addition = BodyOf(Addition)
        self._key = BodyOf(RequestKey)
        self._projection = BodyOf(Projection)
        self._peer = BodyOf(Peer)

    def routes(self) -> list[HttpRoute]:
        """Return all of them; the first one is `/health`."""
        table: list[tuple[str, str, HttpHandler, str]] = [
            ("GET", "/health", self._health, "200 while this process listens"),
            ("POST", "/register", self._register, "adds a worker"),
            ("POST", "/unregister", self._unregister, "removes a worker and its requests"),
            ("GET", "/workers", self._workers, "all workers"),
            ("POST", "/add", self._add, "counts a request in"),
            ("POST", "/prefill_complete", self._prefill_complete, "a request's prompt is processed"),
            ("POST", "/free", self._free, "counts a request out"),
            ("GET", "/loads", self._loads, "what every rank is busy with"),
            ("POST", "/potential_loads", self._potential_loads, "what every rank would be busy with"),
            ("POST", "/register_peer", self._register_peer, "listens to a replica"),
            ("POST", "/deregister_peer", self._deregister_peer, "listens to a replica no longer"),
            ("GET", "/peers", self._peers, "the replicas listened to"),
        ]
        return [
            HttpRoute(method, path, self._guarded(path, handler), summary) for method, path, handler, summary in table
        ]

    def _guarded(self, path: str, handler: HttpHandler) -> HttpHandler:
        count = self._count

        async def handle(http: web.Request) -> web.StreamResponse:
            try:
                response = await handler(http)
            except Refusal as error:
                response = respond_error(msgspec.structs.replace(problem_of(error), retry_after=error.RETRY_AFTER))
            except DynamoError as error:
                response = respond_error(problem_of(error))
            if count is not None:
                count(path, response.status)
            return response

        return handle

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    # Workers.

    async def _register(self, http: web.Request) -> web.Response:
        self._registry.register(await self._registration.read(http))
        if self._replicas is not None:
            self._replicas.replication.worker_registered()
        return _done(HTTPStatus.CREATED)

    async def _unregister(self, http: web.Request) -> web.Response:
        self._registry.unregister(await self._unregistration.read(http))
        return _done()

    async def _workers(self, http: web.Request) -> web.Response:
        return _answer(self._registry.workers(*_filters(http)))

    # Requests.

    async def _add(self, http: web.Request) -> web.Response:
        addition = await self._addition.read(http)
        block_size = self._registry.add(addition)
        if self._replicas is not None:
            self._replicas.replication.added(addition, block_size)
        return _done(HTTPStatus.CREATED)

    async def _prefill_complete(self, http: web.Request) -> web.Response:
        key = await self._key.read(http)
        rank = self._registry.complete_prefill(key)
        if self._replicas is not None:
            self._replicas.replication.prefill_completed(key, rank, self._block_size(key))
        return _done()

    async def _free(self, http: web.Request) -> web.Response:
        key = await self._key.read(http)
        rank = self._registry.free(key)
        if self._replicas is not None and rank is not None:
            self._replicas.replication.freed(key, rank, self._block_size(key))
        return _done()

    def _block_size(self, key: RequestKey) -> int:
        return self._registry.scope(key.model_name, key.tenant_id).block_size

    # Loads.

    async def _loads(self, http: web.Request) -> web.Response:
        return _answer(self._registry.loads(*_filters(http)))

    async def _potential_loads(self, http: web.Request) -> web.Response:
        return _answer(self._registry.potential_loads(await self._projection.read(http)))

    # Replicas.

    async def _register_peer(self, http: web.Request) -> web.Response:
        peer = await self._peer.read(http)
        return _done(HTTPStatus.CREATED if self._sync().add_peer(peer.url) else HTTPStatus.OK)

    async def _deregister_peer(self, http: web.Request) -> web.Response:
        peer = await self._peer.read(http)
        self._sync().remove_peer(peer.url)
        return _done()

    async def _peers(self, _: web.Request) -> web.Response:
        return _answer([] if self._replicas is None else self._replicas.peers)

    def _sync(self) -> Replicas:
        if self._replicas is None:
            raise Conflict("replica sync is disabled")
        return self._replicas


def _filters(http: web.Request) -> list[str | None]:
    """Return the model and the tenant that are asked for; None stands for all."""
    query = http.query
    for name in _FILTERS:
        if len(query.getall(name, ())) > 1:
            raise Malformed(f"Failed to deserialize query string: duplicate field `{name}`")
    return [query.get(name) for name in _FILTERS]


def _done(status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=_OK, content_type="application/json")


def _answer(body: object) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")
