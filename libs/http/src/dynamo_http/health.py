"""Health routes: health, liveness, readiness, metrics."""

from __future__ import annotations

import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.protocol.ids import format_instance_id
from dynamo_core.protocol.records import Instance
from dynamo_telemetry.metrics import CONTENT_TYPE

_encoder = msgspec.json.Encoder()


class HealthSource(Protocol):
    """The runtime's view of its own state."""

    @property
    def shutting_down(self) -> bool:
        """Whether the process has been asked to end."""

    def instances(self) -> Iterable[Instance]:
        """Return the workers that discovery shows now."""

    def failures(self) -> Mapping[str, str]:
        """Return what is wrong with extensions, by name; empty if all is well."""

    def readiness(self) -> tuple[bool, str]:
        """Return whether requests can be served now, and if not, why."""


def health_routes(
    source: HealthSource,
    *,
    listener: ListenerName = ListenerName.PUBLIC,
    host: str | None = None,
    process: Callable[[], dict[str, Any]] | None = None,
    trusted: Callable[[web.Request], bool] = lambda _: True,
) -> list[HttpRoute]:
    """Return ``GET /health``, ``/live`` and ``/ready``. `host` is this host's name, as workers publish it.

    `process` tells which process answered, where several share a port. Hosts, processes, instances and failures of
    extensions are told only to requests that are `trusted`.
    """
    here = host if host is not None else socket.gethostname()

    async def health(http: web.Request) -> web.Response:
        instances = list(source.instances())
        stopping = source.shutting_down
        body: dict[str, Any] = {
            "status": "shutting_down" if stopping else "healthy",
            "endpoints": sorted({_endpoint(instance) for instance in instances}),
        }
        if trusted(http):
            body["instances"] = [_entry(instance, here) for instance in instances]
            if process is not None:
                body["process"] = process()
            if failures := source.failures():
                body["extensions"] = dict(failures)
        return _answer(body, not stopping)

    async def live(_: web.Request) -> web.Response:
        if source.shutting_down:
            return _answer({"status": "shutting_down", "message": "Service is shutting down"}, False)
        return _answer({"status": "live", "message": "Service is live"}, True)

    async def ready(_: web.Request) -> web.Response:
        if source.shutting_down:
            return _answer({"status": "shutting_down", "message": "Service is shutting down"}, False)
        is_ready, reason = source.readiness()
        return _answer(_readiness(is_ready, reason), is_ready)

    return [
        HttpRoute(
            "GET", "/health", health, "state of this process and the workers it sees", listener, before_ready=True
        ),
        HttpRoute("GET", "/live", live, "200 while the process serves", listener, before_ready=True),
        HttpRoute("GET", "/ready", ready, "200 once requests can be served", listener, before_ready=True),
    ]


def metrics_route(render: Callable[[], Awaitable[bytes]], *, listener: ListenerName = ListenerName.PUBLIC) -> HttpRoute:
    """Return ``GET /metrics``; `render` gives the Prometheus text."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=await render(), headers={"Content-Type": CONTENT_TYPE})

    return HttpRoute("GET", "/metrics", metrics, "metrics as Prometheus text", listener, before_ready=True)


class WorkerHealthSource(Protocol):
    """The runtime's view of the workers of this process."""

    @property
    def starting(self) -> bool:
        """Whether they are on their way to being registered."""

    def endpoints(self) -> dict[str, bool]:
        """Return their endpoints, and whether each serves."""

    def states(self) -> dict[str, str]:
        """Return what operators have set, by endpoint: ``serving``, ``cordoned`` or ``draining``."""

    def failures(self) -> Mapping[str, str]:
        """Return what is wrong with extensions, by name; empty if all is well."""

    def readiness(self) -> tuple[bool, str]:
        """Return whether all serve, and if not, why."""


def system_routes(source: WorkerHealthSource) -> list[HttpRoute]:
    """Return what the system listener of a worker process answers."""
    begun = time.monotonic_ns()

    def state() -> tuple[dict[str, Any], bool]:
        is_ready, reason = source.readiness()
        seconds, nanos = divmod(time.monotonic_ns() - begun, 10**9)
        body = {
            "status": "ready" if is_ready else "notready",
            "uptime": {"secs": seconds, "nanos": nanos},
            "endpoints": {name: "ready" if up else "notready" for name, up in source.endpoints().items()},
            "states": source.states(),
        }
        if failures := source.failures():
            body["extensions"] = dict(failures)
        return body if is_ready else body | {"message": reason}, is_ready

    async def health(_: web.Request) -> web.Response:
        return _answer(*state())

    async def live(_: web.Request) -> web.Response:
        # A worker that loads its model for minutes must not be killed for it.
        body, is_ready = state()
        return _answer(body, is_ready or source.starting)

    async def ready(_: web.Request) -> web.Response:
        is_ready, reason = source.readiness()
        return _answer(_readiness(is_ready, reason), is_ready)

    async def metadata(_: web.Request) -> web.Response:
        return web.Response(status=404, text="Discovery metadata not available")

    return [
        HttpRoute("GET", "/health", health, "200 while all endpoints of this worker serve"),
        HttpRoute("GET", "/live", live, "the same, and 200 while they start"),
        HttpRoute("GET", "/ready", ready, "200 while all endpoints of this worker serve; if not, why"),
        HttpRoute("GET", "/metadata", metadata, "404: no discovery here keeps what it knows with the workers"),
    ]


def _readiness(is_ready: bool, reason: str) -> dict[str, Any]:
    if is_ready:
        return {"status": "ready", "message": reason or "Service is ready"}
    return {"status": "notready", "message": reason}


def _endpoint(instance: Instance) -> str:
    return f"dyn://{instance.namespace}.{instance.component}.{instance.endpoint}"


def _entry(instance: Instance, here: str) -> dict[str, Any]:
    # A process id means something on its own host only.
    local = instance.host == here
    return {
        "instance_id": format_instance_id(instance.instance_id),
        "worker": instance.worker,
        "pid": instance.pid if local else None,
        "host": instance.host,
        "endpoint": _endpoint(instance),
        "state": instance.state_name,
    }


def _answer(body: dict[str, Any], good: bool) -> web.Response:
    return web.Response(status=200 if good else 503, body=_encoder.encode(body), content_type="application/json")
