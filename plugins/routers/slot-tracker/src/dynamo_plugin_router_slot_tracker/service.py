"""The service: its registry, listener and replicas, and the task that expires old requests."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dynamo_core import ServerTls, TaskSet, server_context
from dynamo_core.errors import ConfigError
from dynamo_http import PREFIX, AdminToken, Listener, metrics_route, refuse_pages

from dynamo_plugin_router_slot_tracker.api import BODY_LIMIT, Api, respond_listener_error
from dynamo_plugin_router_slot_tracker.held_capacity import MAX_HELD
from dynamo_plugin_router_slot_tracker.metrics import ServiceMetrics
from dynamo_plugin_router_slot_tracker.registry import EXPIRY, MAX_HASHES, MAX_RANKS, MAX_TRACKERS, Registry
from dynamo_plugin_router_slot_tracker.replication.replicas import Replicas, SyncSettings
from dynamo_plugin_router_slot_tracker.snapshot import snapshot_route, take_snapshot

log = logging.getLogger(__name__)

DEFAULT_PORT = 8091
_MAX_CONNECTIONS = 10_000
_IDLE_TIMEOUT = 75.0
#: Seconds that calls which run may take to end when the service stops.
_DRAIN = 5.0


def listener_tls(cert: str | None, key: str | None, client_ca: str | None) -> ServerTls:
    """Return the certificate of the listener, as the options name it.

    Raises:
        ConfigError: the others are given without `cert`.
    """
    if cert is None and (key is not None or client_ca is not None):
        given = "key" if key is not None else "client-ca"
        raise ConfigError(f"--tls-{given} is given without --tls-cert: give that too, or leave both out")
    return ServerTls(cert=cert, key=key, client_ca=client_ca)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """The settings of a service. Times are in seconds; the last six are off unless given."""

    host: str = "0.0.0.0"
    port: int = DEFAULT_PORT
    expiry: float = EXPIRY
    max_ranks: int = MAX_RANKS
    max_trackers: int = MAX_TRACKERS
    max_hashes: int = MAX_HASHES
    max_held: int = MAX_HELD
    sync: SyncSettings | None = None
    token: str | None = None
    tls: ServerTls = field(default_factory=ServerTls)
    metrics: bool = False
    snapshot: bool = False
    snapshot_from: tuple[str, ...] = ()
    snapshot_ca: str | None = None

    def check(self) -> None:
        """Raise ConfigError for what does not go together."""
        if self.snapshot_from and self.token is not None and self.token.startswith(PREFIX):
            raise ConfigError("--token is a hash, which the peer of --snapshot-from cannot take: give the token itself")


class Service:
    """One slot tracker. It begins empty, unless a peer gives a snapshot."""

    def __init__(self, settings: ServiceSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        settings.check()
        self._settings = settings
        self.registry = Registry(
            clock=clock,
            expiry=settings.expiry,
            max_ranks=settings.max_ranks,
            max_trackers=settings.max_trackers,
            max_hashes=settings.max_hashes,
            max_held=settings.max_held,
        )
        self.replicas = None if settings.sync is None else Replicas(settings.sync, self.registry)
        metrics = ServiceMetrics(self.registry, self.replicas) if settings.metrics else None
        routes = Api(self.registry, self.replicas, None if metrics is None else metrics.count).routes()
        if settings.snapshot:
            routes.append(snapshot_route(self.registry))
        if metrics is not None:
            routes.append(metrics_route(metrics.render))
        guard = refuse_pages if settings.token is None else AdminToken(settings.token, where="--token").protect
        # Probes of liveness have no token.
        routes = [
            route if route.path == "/health" else guard(replace(route, respond_error=respond_listener_error))
            for route in routes
        ]
        self.listener = Listener(
            "slot tracker",
            host=settings.host,
            port=settings.port,
            routes=routes,
            body_limit=BODY_LIMIT,
            max_connections=_MAX_CONNECTIONS,
            idle_timeout=_IDLE_TIMEOUT,
            ssl=_tls_context(settings.tls),
            port_option="--port",
            respond_error=respond_listener_error,
        )
        self._tasks = TaskSet()

    async def start(self) -> None:
        """Serve from now on.

        Raises:
            ConfigError: an address cannot be bound, or a file not be read.
        """
        # The port is taken at once, so that a second process is told before it does anything else.
        await self.listener.start(accept=False)
        if self.replicas is not None:
            self.replicas.open()
        if self._settings.snapshot_from:
            await self._take_snapshot()
        if self.replicas is not None:
            # What peers told meanwhile has waited, and comes on top of the snapshot.
            self.replicas.start()
        self._tasks.spawn(self._sweep(), name="slot-tracker-expiry")
        await self.listener.accept()

    async def aclose(self) -> None:
        """Let calls that run end, and close everything. Safe twice, and without `start`."""
        await self.listener.drain_and_close(_DRAIN)
        await self._tasks.aclose()
        if self.replicas is not None:
            self.replicas.close()

    async def _take_snapshot(self) -> None:
        settings = self._settings
        ca = None
        if settings.snapshot_ca is not None:
            try:
                ca = ssl.create_default_context(cafile=settings.snapshot_ca)
            except OSError as error:
                raise ConfigError(f"--snapshot-ca: {settings.snapshot_ca} cannot be used: {error}") from error
        if not await take_snapshot(self.registry, settings.snapshot_from, token=settings.token, ca=ca):
            log.warning("no peer gave a snapshot: starting empty")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.registry.sweep_interval)
            if count := self.registry.sweep():
                log.info(
                    "%d requests were active for more than %g s and do not count any more", count, self._settings.expiry
                )


def _tls_context(files: ServerTls) -> ssl.SSLContext | None:
    try:
        return server_context(files, "--tls")
    except ConfigError as error:
        # Options are spelt otherwise than the keys of a config file.
        raise ConfigError(error.message.replace("--tls.", "--tls-")) from error
