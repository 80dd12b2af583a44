"""The host of an extension under test: a real listener, real events and peer calls, and the kit's own model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp import web
from dynamo_core.contracts.discovery import Lease
from dynamo_core.contracts.extension import AdminAccess, Extension, ExtensionServices, FrontendView
from dynamo_core.contracts.frontend import ServedModel
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.plugin import FRONTEND_ROLE, WORKER_ROLE
from dynamo_core.contracts.requests.request_events import CAPACITY, RequestEvent, Subscription
from dynamo_core.contracts.thresholds import Thresholds
from dynamo_core.contracts.transports.events import Publisher
from dynamo_core.errors import ModelNotFound
from dynamo_core.plugins.loader import PluginLoader
from dynamo_core.protocol.records import AGGREGATED, Instance, ModelCard
from dynamo_http.auth import AdminToken, Operators
from dynamo_http.listener import Listener
from dynamo_runtime.dispatch.frontend_peer_calls import ExtensionPeers, PeerCalls
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_runtime.telemetry.request_events import BoundedSubscription, RequestEventHub
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.events.harness import LoneDirectory, LoneLease
from dynamo_testing.extension.sample_events import MODEL, WORKERS
from dynamo_testing.frontend.host import KitModel, kit_listener
from dynamo_testing.router.doubles import KitEvents
from dynamo_testing.router.harness import no_worker_answers

#: What operators show the admin listener.
TOKEN: Final = "kit-" + "0123456789" * 4
PREFIX: Final = "dynamo_frontend"


class _Lease(LoneLease):
    """A lease whose records stay in this object."""

    async def put(self, key: str, value: bytes) -> None:
        """Do nothing: there is no other client that could look."""


class _Directory(LoneDirectory):
    """A discovery that takes everything, and shows nothing of it."""

    async def lease(self, ttl: float | None = None) -> Lease:
        return _Lease()

    async def put_value(self, key: str, value: bytes | None) -> None:
        """Do nothing: there is no other client that could look."""


class _Publisher(Publisher):
    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send

    def send(self, payload: bytes) -> bool:
        self._send(payload)
        return True

    async def aclose(self) -> None:
        """Do nothing: nothing is held."""


class _Events(KitEvents):
    """Events within one process."""

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        return _Publisher(lambda payload: self.send(subject, payload))


class _Models:
    """The model of the kit: there to be seen, not to answer."""

    synced = True

    def __init__(self) -> None:
        no_tokenizer: Any = None
        self._model = KitModel(MODEL, no_tokenizer)

    def get(self, name: str) -> ServedModel:
        if name != MODEL:
            raise ModelNotFound(f"there is no model {name!r}")
        return self._model

    def list(self) -> Sequence[ServedModel]:
        return [self._model]

    def missing_roles(self, name: str) -> Sequence[str]:
        return ()

    def readiness(self) -> Mapping[str, bool]:
        return {MODEL: True}


class _OneProcess:
    """The part of a transport that peers need within one process."""

    CROSS_PROCESS = False


class _Settings:
    """A few settings, as `dynamo config show` has them."""

    def rows(self) -> Sequence[tuple[str, Any, str]]:
        return [
            ("namespace", "dynamo", "default"),
            ("admin.token", "***", "kit.yaml:1"),
            ("extensions.feed.use", "feed", "kit.yaml:2"),
            ("frontend.port", 0, "--set"),
        ]


class ExtensionHost:
    """An extension in a process of a role, as core makes it, with two workers of one model beside a frontend."""

    def __init__(
        self,
        make_extension: Callable[[ExtensionServices], Extension],
        role: str = FRONTEND_ROLE,
        *,
        workers: Sequence[int] = WORKERS,
    ) -> None:
        self.metrics = Metrics()
        #: What the extension has reported to be wrong with it.
        self.failure = ""
        self._hub = RequestEventHub()
        self._subscriptions: list[BoundedSubscription] = []
        self._dropped = self.metrics.counter(f"{PREFIX}_extension_events_dropped_total", "Lost.", ("extension",))
        directory: Any = _Directory()
        transport: Any = _OneProcess()
        self._calls = PeerCalls(directory, transport, namespace="dynamo")
        self._peers = ExtensionPeers(self._calls, "kit")
        self._guard = AdminToken(TOKEN)
        self._operators = Operators(self._guard)
        thresholds = ThresholdBook(
            directory, "dynamo", common=Thresholds(), models={}, armed=False, changed=lambda model: None
        )
        pool = Pool(MODEL, AGGREGATED)
        for worker in workers:
            pool.add(Instance(instance_id=worker), ModelCard(name=MODEL, instance_id=worker, kv_cache_block_size=16))
        view = FrontendView(
            models=_Models(),
            pools=lambda: [pool],
            loads=LoadTracker(),
            requests=self,
            peers=self._peers,
            thresholds=thresholds,
            admin=AdminAccess(token=True, opens=self._guard.opens, accept=self._operators.accept),
        )
        self.extension = make_extension(
            ExtensionServices(
                role=role,
                name="kit",
                namespace="dynamo",
                metrics=self.metrics,
                metrics_prefix=PREFIX,
                settings=_Settings(),
                discovery=directory,
                events=_Events(),
                call=no_worker_answers,
                report_failure=self._report,
                load_plugin=lambda kind, name: PluginLoader().load(kind, name),
                frontend=None if role == WORKER_ROLE else view,
            )
        )
        self.routes = [] if role == WORKER_ROLE else list(self.extension.routes())
        self._listener: Listener | None = None

    def _report(self, reason: str) -> None:
        self.failure = reason

    # As the events of requests.

    def subscribe(self, capacity: int = CAPACITY, candidates: int = 0) -> Subscription:
        """See `dynamo_core.contracts.requests.request_events.RequestEvents.subscribe`."""
        subscription = self._hub.subscribe(capacity, candidates, self._dropped.labels("kit"))
        self._subscriptions.append(subscription)
        return subscription

    @property
    def url(self) -> str:
        """The URL of its routes, once started."""
        assert self._listener is not None
        return self._listener.url

    @property
    def subscribes(self) -> bool:
        """Whether it has asked for events of requests."""
        return bool(self._subscriptions)

    @property
    def candidates(self) -> int:
        """The number of ranks in an event of a choice."""
        return self._hub.candidates

    @property
    def unread(self) -> int:
        """The number of events that are held for it."""
        return sum(subscription.waiting for subscription in self._subscriptions)

    def publish(self, event: RequestEvent) -> None:
        """Publish an event of a request."""
        self._hub.publish(event)

    # Its life.

    async def start(self) -> None:
        """Start it, then its listener, as core does; one listener has the routes of both."""
        self._calls.start()
        await self.extension.start()
        self._listener = kit_listener([] if unserved(self.routes) else [self._guarded(route) for route in self.routes])
        await self._listener.start()

    def _guarded(self, route: HttpRoute) -> HttpRoute:
        return self._operators.protect(route) if route.listener is ListenerName.ADMIN else route

    @asynccontextmanager
    async def asked(
        self, method: str, path: str, body: bytes | None = None, *, token: str = ""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request, of which the body may yet have to come."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession(self.url) as session,
            session.request(method, path, data=body, headers=headers, allow_redirects=False) as response,
        ):
            yield response
            response.close()

    async def aclose(self) -> None:
        """Close the listener and the extension, then what core ends by itself."""
        if self._listener is not None:
            await self._listener.aclose()
        try:
            await self.extension.aclose()
        finally:
            for subscription in self._subscriptions:
                subscription.close()
            self._peers.close()
            await self._calls.aclose()


def unserved(routes: Sequence[HttpRoute]) -> str:
    """Return why core would serve none of these routes; empty if it would."""
    known: set[tuple[str, str]] = set()
    for route in routes:
        try:
            web.UrlDispatcher().add_route(route.method, route.path, route.handler)
        except Exception as error:
            return f"{route.method} {route.path} cannot be served: {error}"
        if (route.method, route.path) in known:
            return f"{route.method} {route.path} is there twice"
        known.add((route.method, route.path))
    return ""
