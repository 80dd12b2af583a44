"""The listeners of a frontend, what their callers must show, and the routes that each of them serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

from aiohttp.web import Request
from dynamo_core.certificates import server_context
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_http.auth import MISSING, UNKNOWN, AdminToken, ApiKeys, Operators
from dynamo_http.body_budget import BodyBudget
from dynamo_http.client_headers import client_headers, with_client_headers
from dynamo_http.cors import Cors
from dynamo_http.health import health_routes, metrics_route
from dynamo_http.listener import Listener
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.assembly.extensions import Extensions
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.settings import Settings

MB = 1024 * 1024


class Guards(NamedTuple):
    """The credentials of callers: clients show one of the keys, operators a token; without them nothing."""

    keys: ApiKeys | None
    operators: Operators

    @classmethod
    def of(cls, settings: Settings, metrics: Metrics) -> Self:
        """Make those that the settings ask for."""
        failures = metrics.counter(
            f"{settings.http.metrics_prefix}_unauthorized_requests_total",
            "Requests without a valid API key or operator token: missing, or unknown.",
            ("listener", "reason"),
        )

        def failed(listener: str) -> Callable[[str], None]:
            counters = {reason: failures.labels(listener, reason) for reason in (MISSING, UNKNOWN)}
            return lambda reason: counters[reason].inc()

        keys = ApiKeys.load(settings.auth, os.environ, failed(ListenerName.PUBLIC))
        secret = settings.admin.token
        return cls(keys, Operators(None if secret is None else AdminToken(secret, failed(ListenerName.ADMIN))))


@dataclass(frozen=True, slots=True)
class Listeners:
    """The public listener, and the admin listener where there is one."""

    public: Listener
    admin: Listener | None
    #: Where the port is shared: which of the processes this is, as `/health` tells it. `open` adds its own address.
    identity: dict[str, Any] | None

    @property
    def all(self) -> list[Listener]:
        """Every listener there is."""
        return [self.public] if self.admin is None else [self.public, self.admin]

    @property
    def routes(self) -> Mapping[ListenerName, Sequence[HttpRoute]]:
        """The routes by the listener that serves them."""
        return {ListenerName.PUBLIC: self.public.routes, ListenerName.ADMIN: (self.admin or self.public).routes}

    async def open(self) -> None:
        """Open them for the routes that answer before the start. A shared port is held, and not joined yet.

        Raises:
            ConfigError: an address cannot be bound.
        """
        await self.public.start(accept=self.identity is None, starting=True)
        if self.admin is not None:
            await self.admin.start(starting=True)
            if self.identity is not None:
                self.identity["system_url"] = self.admin.url


def make_listeners(
    plane: ProcessServices,
    role: Role,
    guards: Guards,
    health: Health,
    routes: Sequence[HttpRoute],
    extensions: Extensions,
) -> Listeners:
    """Make the listeners. `routes` are those of the API and of operators; the others are added here."""
    settings, (keys, operators) = plane.settings, guards
    identity = {"pid": os.getpid(), "replica": role.replica} if role.shares_port else None
    # A client of a shared port cannot choose which process answers, so each process has a port of its own too.
    port = 0 if settings.admin.port is None and role.shares_port else settings.admin.port
    if port:
        port += role.replica or 0
    # Where models are guarded, health is told in full only to callers who are known.
    known = [guard for guard in (keys, operators.token) if guard is not None] if keys is not None else []
    answer_health = partial(health_routes, health, process=None if identity is None else lambda: identity)
    public_health = answer_health(trusted=partial(_is_known, known))
    admin_health = answer_health(trusted=partial(_is_known, known if operators.token is not None else []))

    routes = [*routes, metrics_route(plane.metrics.render, listener=ListenerName.ADMIN)]
    routes += extensions.routes([(route.method, route.path) for route in (*routes, *public_health)])
    admin = [operators.protect(route) for route in routes if route.listener is ListenerName.ADMIN]
    public = _for_clients([route for route in routes if route.listener is ListenerName.PUBLIC], settings, keys)
    if settings.admin.port is None:
        taken = {(route.method, route.path) for route in public}
        public += [route for route in admin if (route.method, route.path) not in taken]

    frontend, cors = settings.frontend, settings.http.cors
    listener = _listener(plane)
    return Listeners(
        listener(
            "frontend",
            host=frontend.host,
            port=frontend.port,
            routes=[*public, *public_health],
            ssl=server_context(frontend.tls, "frontend.tls"),
            cors=Cors(cors.origins) if cors.origins else None,
            port_option="--http-port or DYN_HTTP_PORT",
            reuse_port=role.shares_port,
        ),
        None
        if port is None
        else listener(
            "admin",
            host=settings.admin.host,
            port=port,
            routes=[*admin, *admin_health],
            ssl=server_context(settings.admin.tls, "admin.tls"),
            port_option="admin.port",
        ),
        identity,
    )


def _listener(plane: ProcessServices) -> Callable[..., Listener]:
    """Return `Listener` with the limits that both listeners have."""
    http, client = plane.settings.http, plane.settings.client
    return partial(
        Listener,
        body_limit=http.body_limit_mb * MB,
        body_budget=BodyBudget(http.bodies_limit_mb * MB, plane.metrics, http.metrics_prefix),
        max_connections=http.max_connections,
        idle_timeout=http.idle_timeout,
        header_timeout=http.header_timeout,
        body_timeout=http.body_timeout,
        write_stall=client.write_stall,
        overload_status=http.overload_status,
    )


def _is_known(guards: Sequence[ApiKeys | AdminToken], http: Request) -> bool:
    return not guards or any(guard.knows(http) for guard in guards)


def _for_clients(routes: list[HttpRoute], settings: Settings, keys: ApiKeys | None) -> list[HttpRoute]:
    """Return the routes with the checks of the callers' names and keys around them."""
    named = client_headers(settings.http)
    if named is not None:
        routes = [with_client_headers(route, named) for route in routes]
    if keys is not None:
        routes = [keys.protect(route) if route.guarded else route for route in routes]
    return routes
