"""The frontend's half of a process: models, pipeline, admission, the API, and the listeners."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from ssl import SSLContext
from typing import Any

from aiohttp.web import Request
from dynamo_core.certificates import server_context
from dynamo_core.contracts.admission import Admission, AdmissionServices
from dynamo_core.contracts.extension import AdminAccess, FrontendView
from dynamo_core.contracts.frontend import Frontend, FrontendServices
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.response_store import ResponseStore, ResponseStoreServices
from dynamo_core.contracts.router import Router, RouterServices
from dynamo_core.contracts.thresholds import THRESHOLDS, Changes, Thresholds
from dynamo_core.errors import OVERLOAD
from dynamo_core.protocol.records import RequestRecord
from dynamo_core.resources import ClosingStack
from dynamo_core.tasks import TaskSet
from dynamo_http.auth import MISSING, UNKNOWN, AdminToken, ApiKeys, Operators
from dynamo_http.body_budget import BodyBudget
from dynamo_http.client_headers import client_headers, with_client_headers
from dynamo_http.cors import Cors
from dynamo_http.health import health_routes, metrics_route
from dynamo_http.listener import Listener

from dynamo_runtime.assembly.extensions import Extensions, Provided
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.assembly.plane import Plane
from dynamo_runtime.assembly.reload import Plan, Reload, Standing, Step, reload_route, switch
from dynamo_runtime.assembly.resolve import RESPONSE_STORE, load_parsers, store_remark
from dynamo_runtime.assembly.roles import Role
from dynamo_runtime.assembly.routers import RouterMaker
from dynamo_runtime.assembly.worker_routes import WorkerRoutes
from dynamo_runtime.dispatch.admission import AdmissionChain
from dynamo_runtime.dispatch.execution.caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.load.monitor import WorkerMonitor
from dynamo_runtime.dispatch.load.peer_load_sync import PeerLoadSync
from dynamo_runtime.dispatch.load.retry_after import RetryAfterEstimator
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.cache import ModelCache
from dynamo_runtime.dispatch.models.gauges import FrontGauges
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.dispatch.peer_calls import ExtensionPeers, PeerCalls
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.thresholds import ThresholdBook
from dynamo_runtime.dispatch.unread import UnreadAnswers
from dynamo_runtime.settings import Settings
from dynamo_runtime.telemetry.inflight import RequestTracker
from dynamo_runtime.telemetry.loop_lag import LoopLag
from dynamo_runtime.telemetry.request_events import ExtensionRequestEvents, RequestEventHub

log = logging.getLogger(__name__)

MB = 1024 * 1024
#: Seconds that the event loop waits for a thread to yield the interpreter's lock, if no call into C keeps it.
_SWITCH_INTERVAL = 0.001
#: Seconds that a process waits to be ready before it joins a port that it shares.
JOIN_WAIT = 10.0


class FrontendProcess:
    """Made from a plane; `open` before the plane's `start`, `start` after it, the rest before the plane is closed."""

    def __init__(self, plane: Plane, role: Role, reload: Callable[[], Reload]) -> None:
        """`reload` gives what `POST /admin/reload` calls."""
        self._plane = plane
        self._reload = reload
        self._role = role
        self._settings = plane.settings
        resolved = plane.resolved
        if resolved.frontend is None or resolved.router is None:
            raise ValueError("the plane was made for a role without a frontend")
        self._picked, self._routers = resolved.frontend, RouterMaker(resolved.router)
        self._request_events = RequestEventHub()
        self.tracker = LoadTracker()
        self._retry_after = RetryAfterEstimator()
        self._thresholds = self._make_thresholds()
        #: The admission plugins by their sections, and what asks them all.
        self._admissions: dict[str, Admission] = {}
        self._admission = self._make_admission()
        self._monitor = self._make_monitor()
        self._caller = Caller(plane.transport)
        self._pipeline = self._make_pipeline()
        self.models = Models(
            discovery=plane.discovery,
            pipeline=self._pipeline,
            caller=self._caller,
            make_router=self._make_router,
            announce=plane.announce,
            load_tokenizer=lambda kind, files: self._frontend.load_tokenizer(kind, files),
            expected={worker.model.name for worker in self._settings.workers.values()},
            model_cache=self._make_model_cache(),
            load_parsers=partial(load_parsers, plane.loader),
        )
        self._lag = LoopLag(plane.metrics, prefix=self._settings.http.metrics_prefix)
        self._response_store = self._make_response_store()
        self._frontend = self._make_frontend()
        self._peers = PeerCalls(
            plane.discovery, plane.transport, namespace=self._settings.namespace, replica=role.replica
        )
        self._keys, self._operators = self._make_guards()
        self._extensions = self._make_extensions()
        self._health = Health(self._settings, self.models, lambda: plane.waits_for, lambda: self._extensions.failures)
        self._load_sync = self._make_load_sync()
        http = self._settings.http
        self._body_budget = BodyBudget(http.bodies_limit_mb * MB, plane.metrics, http.metrics_prefix)
        self._listeners = self._make_listeners()
        self._joined = asyncio.Event()
        self._tasks = TaskSet()

    @property
    def url(self) -> str:
        """Where clients reach it, once started."""
        return self._listeners[0].url

    @property
    def busy(self) -> bool:
        """Whether requests are being answered."""
        return any(listener.running for listener in self._listeners)

    async def open(self) -> None:
        """Opens the listeners: health and metrics are answered from here on, everything else with 503 until `start`.

        A port that is shared is held at once, and joined when this process is ready: until then the others answer.

        Raises:
            ConfigError: an address cannot be bound.
        """
        public, *others = self._listeners
        await public.start(accept=not self._shared, starting=True)
        for listener in others:
            await listener.start(starting=True)
        log.info("listening at %s", self.url)
        if self._shared:
            log.info("health and metrics of this process are at %s", others[0].url)
            self._tasks.spawn(self._join(public), name="join-port")
        else:
            self._joined.set()

    async def start(self, stack: ClosingStack, api: ClosingStack) -> None:
        """Begins to watch for workers, and to answer requests, if only with 503.

        `api` closes the frontend, and `stack` what it stands on. The listeners are closed by `drain`.
        """
        # Threads parse and encode large bodies meanwhile.
        sys.setswitchinterval(_SWITCH_INTERVAL)
        stack.enter(self._thresholds).start()
        await stack.enter(self._admission).start()
        stack.enter(self._lag).start()
        stack.enter(self._pipeline)
        stack.enter(self._monitor).start()
        stack.enter(self.models).start()
        if self._load_sync is not None:
            stack.enter(self._load_sync).start()
        if self._plane.resolved.extensions:
            api.enter(self._peers).start()
        if self._response_store is not None:
            await api.enter(self._response_store).start()
        await api.enter(self._extensions).start()
        await api.enter(self._frontend).start()
        for listener in self._listeners:
            listener.started()

    async def ready(self) -> None:
        """Returns once every model of the config has enough workers, as /ready says it."""
        await self._models_ready()
        await self._joined.wait()

    def leave(self) -> None:
        """Says on /ready, /live and /health that it goes, so that nothing more comes, and sends clients elsewhere."""
        self._health.shutting_down = True
        for listener in self._listeners:
            listener.leave()

    async def drain(self, timeout: float) -> None:
        """Stops accepting and lets running requests end for up to `timeout` seconds; what is left is cut."""
        await self._tasks.aclose()
        await asyncio.gather(*(listener.drain_and_close(timeout) for listener in self._listeners))

    async def close_listeners(self) -> None:
        """Closes whatever a drain that was cut short left open."""
        await self._tasks.aclose()
        for listener in self._listeners:
            await listener.aclose()

    @property
    def _shared(self) -> bool:
        """Whether the port is shared with other frontend processes."""
        return self._role.processes > 1

    async def _models_ready(self) -> None:
        while not self._health.readiness()[0]:
            await self.models.changed()

    async def _join(self, public: Listener) -> None:
        """Begins to accept on a shared port; in the end also without being ready, so that clients are told why."""
        try:
            async with asyncio.timeout(JOIN_WAIT):
                await self._models_ready()
        except TimeoutError:
            log.info("not ready after %g s: %s", JOIN_WAIT, self._health.readiness()[1])
        await public.accept()
        self._joined.set()

    # Reloading.

    def standing(self) -> list[Standing]:
        """What was set through the API."""
        return [Standing(f"admission.models.{model}.{name}", value) for model, name, value in self._thresholds.rows()]

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """See `dynamo_runtime.assembly.reload.Reloadable`."""
        old, new = plan.before.settings, plan.loaded.settings
        keys = ApiKeys.load(old.auth, os.environ), ApiKeys.load(new.auth, os.environ)
        if plan.touches("auth.keys") and self._keys is not None:
            yield switch("auth.keys", self._keys.take, *keys)
        token = self._operators.token
        if plan.touches("admin.token") and token is not None and old.admin.token and new.admin.token:
            yield switch("admin.token", token.take, old.admin.token, new.admin.token)
        tls = ("frontend.tls", new.frontend.tls, self._listeners[0]), ("admin.tls", new.admin.tls, self._listeners[-1])
        for section, files, listener in tls:
            if plan.touches(section):
                yield switch(section, listener.use_certificate, listener.certificate, server_context(files, section))
        if _thresholds(old) != _thresholds(new):
            configure = self._thresholds.configure
            yield Step("admission", partial(configure, *_thresholds(new)), partial(configure, *_thresholds(old)))
        for section, admission in self._admissions.items():
            yield from plan.reconfigured(section, [admission])
        yield from plan.reconfigured("frontend", [self._frontend])
        if self._response_store is not None:
            yield from plan.reconfigured(RESPONSE_STORE, [self._response_store])
        yield from self._extensions.reload_steps(plan)
        yield from self._routers.reload_steps(plan, self.models.routers)

    # Construction.

    def _make_admission(self) -> Admission:
        plane, chain = self._plane, self._plane.resolved.admission
        services = AdmissionServices(
            plane.metrics, thresholds=self._thresholds, retry_after=self._retry_after.retry_after
        )
        parts: dict[str, Admission] = {}
        for picked in chain:
            name = picked.section.rpartition(".")[2]
            if sum(other.name == picked.name for other in chain) > 1:
                # Two of a kind have metrics of the same names.
                own = replace(services, metrics=plane.metrics.scope(entry=name))
            else:
                own = services
            self._admissions[picked.section] = parts[name] = picked.cls(picked.config, own)
        return AdmissionChain.of(parts, services, patience=self._settings.client.total_timeout)

    def _make_thresholds(self) -> ThresholdBook:
        common, models = _thresholds(self._settings)
        return ThresholdBook(
            self._plane.discovery,
            self._settings.namespace,
            common=common,
            models=models,
            armed=any(picked.cls.ARMS_THRESHOLDS for picked in self._plane.resolved.admission),
            changed=lambda model: self._monitor.reconsider(model),
        )

    def _make_monitor(self) -> WorkerMonitor:
        plane = self._plane
        rule = self._admission.is_busy if self._thresholds.armed else None
        return WorkerMonitor(self.tracker, plane.events, plane.discovery, rule=rule)

    def _make_model_cache(self) -> ModelCache | None:
        # Within one process the worker holds the files anyway; fetching them costs nothing.
        if not self._plane.transport.CROSS_PROCESS:
            return None
        return ModelCache.from_setting(self._settings.client.model_cache)

    def _make_pipeline(self) -> Pipeline:
        client = self._settings.client
        return Pipeline(
            transport=self._plane.transport,
            admission=self._admission,
            tracker=self.tracker,
            deadlines=Deadlines(
                retries=client.retries,
                accept=client.accept_timeout,
                first_item=client.first_item_timeout,
                total=client.total_timeout,
                decode_wait=client.decode_wait,
                migration_wait=client.migration_wait,
                migration_max_seq_len=client.migration_max_seq_len,
                stall=client.stall_timeout,
            ),
            metrics=self._plane.metrics,
            prefix=self._settings.http.metrics_prefix,
            unread=UnreadAnswers(
                self._plane.metrics,
                self._settings.http.metrics_prefix,
                most_each=client.unread_answer_limit_mb * MB,
                most_all=client.unread_answers_limit_mb * MB,
                stall=client.place_stall,
            ),
            retry_after=self._retry_after.retry_after,
            forward_identity=self._settings.http.forward_identity,
            events=self._request_events,
        )

    def _make_router(self, pool: Pool) -> Router:
        plane = self._plane
        self._monitor.take(pool)
        services = RouterServices(
            pool=pool,
            tracker=self.tracker,
            events=plane.events,
            directory=plane.discovery,
            metrics=plane.metrics,
            call=self._caller,
        )
        return self._routers.make(services)

    def _make_load_sync(self) -> PeerLoadSync | None:
        plane, wanted = self._plane, self._settings.client.share_loads
        if wanted is None:
            # What the others have placed counts for the thresholds too.
            wanted = self._shared or self._thresholds.armed
        if not plane.transport.CROSS_PROCESS or not wanted:
            return None
        peers = plane.metrics.gauge(
            f"{self._settings.http.metrics_prefix}_load_peers",
            "Frontends, other than this one, that have reported their loads lately.",
        )
        return PeerLoadSync(self.tracker, plane.events, plane.discovery, peers=peers.labels().set)

    def _make_response_store(self) -> ResponseStore | None:
        plane, picked = self._plane, self._plane.resolved.response_store
        if picked is None:
            return None
        remark = store_remark(plane.resolved, self._settings.frontend.processes)
        if remark:
            log.warning("%s: %s", RESPONSE_STORE, remark)
        return picked.cls(picked.config, ResponseStoreServices(plane.metrics, self._settings.namespace))

    def _make_frontend(self) -> Frontend:
        plane, settings = self._plane, self._settings
        picked = self._picked

        gauges = FrontGauges(self.models, self.tracker, settings.http.metrics_prefix, self._monitor)
        plane.metrics.registry.register(gauges)

        def finished(record: RequestRecord) -> None:
            gauges.finished(record)
            if record.instance_id is not None:
                self._retry_after.ended(record.model)
            elif record.error_type == OVERLOAD:
                self._retry_after.refused(record.model)
            plane.announce("dynamo_request_finished", record=record)

        services = FrontendServices(
            models=self.models,
            requests=RequestTracker(
                plane.metrics, finished, prefix=settings.http.metrics_prefix, events=self._request_events
            ),
            metrics=plane.metrics,
            write_stall=settings.client.write_stall,
            keep_alive=settings.client.keep_alive,
            metrics_prefix=settings.http.metrics_prefix,
            overload_status=settings.http.overload_status,
            token_cache=settings.client.token_cache_mb * MB,
            thresholds=self._thresholds,
            response_store=self._response_store,
            routes=lambda name: self._listeners[-1 if name is ListenerName.ADMIN else 0].routes,
        )
        return picked.cls(picked.config, services)

    def _make_extensions(self) -> Extensions:
        plane, prefix = self._plane, self._settings.http.metrics_prefix
        token = self._operators.token
        dropped = plane.metrics.counter(
            f"{prefix}_extension_events_dropped_total",
            "Events of requests that an extension has lost because it did not read them in time.",
            ("extension",),
        )

        def provide(name: str) -> Provided:
            requests = ExtensionRequestEvents(self._request_events, dropped.labels(name))
            peers = ExtensionPeers(self._peers, name)
            view = FrontendView(
                models=self.models,
                pools=self.models.pools,
                loads=self.tracker,
                requests=requests,
                peers=peers,
                thresholds=self._thresholds,
                admin=AdminAccess(
                    token=token is not None,
                    opens=token.opens if token is not None else lambda text: False,
                    accept=self._operators.accept,
                ),
            )

            def withdraw() -> None:
                requests.close()
                peers.close()

            return Provided(view, withdraw)

        return Extensions(plane, plane.resolved.extensions, provide)

    def _make_listeners(self) -> list[Listener]:
        routes = [
            *self._frontend.routes(),
            *WorkerRoutes(self.models, self._caller).routes(),
            metrics_route(self._plane.metrics.render, listener=ListenerName.ADMIN),
            reload_route(self._reload),
        ]
        keys, token = self._keys, self._operators.token
        known = [guard for guard in (keys, token) if guard is not None] if keys is not None else []
        health = self._health_routes(known)
        routes += self._extensions.routes([(route.method, route.path) for route in (*routes, *health)])
        public = [route for route in routes if route.listener is ListenerName.PUBLIC]
        admin = [route for route in routes if route.listener is ListenerName.ADMIN]
        named = client_headers(self._settings.http)
        if named is not None:
            public = [with_client_headers(route, named) for route in public]
        if keys is not None:
            public = [keys.protect(route) if route.guarded else route for route in public]
        admin = [self._operators.protect(route) for route in admin]
        frontend, operators = self._settings.frontend, self._settings.admin
        # A client of a shared port cannot choose which process answers, so each process has a port of its own too.
        port = 0 if operators.port is None and self._shared else operators.port
        if port:
            port += self._role.replica or 0
        if operators.port is None:
            taken = {(route.method, route.path) for route in public}
            public += [route for route in admin if (route.method, route.path) not in taken]
        listeners = [
            self._make_listener(
                "frontend",
                frontend.host,
                frontend.port,
                [*public, *self._health_routes(known)],
                ssl=server_context(frontend.tls, "frontend.tls"),
                cors=self._make_cors(),
                reuse_port=self._shared,
            )
        ]
        if port is not None:
            listeners.append(
                self._make_listener(
                    "admin",
                    operators.host,
                    port,
                    [*admin, *self._health_routes(known if token is not None else [])],
                    ssl=server_context(operators.tls, "admin.tls"),
                    port_option="admin.port",
                )
            )
        return listeners

    def _describe(self) -> dict[str, Any]:
        """Which of the processes on a shared port this is."""
        return {"pid": os.getpid(), "replica": self._role.replica, "system_url": self._listeners[1].url}

    def _health_routes(self, guards: Sequence[ApiKeys | AdminToken]) -> list[HttpRoute]:
        """The routes that ask for nothing; with `guards`, only a request that one of them knows is told all."""

        def trusted(http: Request) -> bool:
            return not guards or any(guard.knows(http) for guard in guards)

        return health_routes(self._health, process=self._describe if self._shared else None, trusted=trusted)

    def _make_guards(self) -> tuple[ApiKeys | None, Operators]:
        """What the callers of either listener must show."""
        prefix = self._settings.http.metrics_prefix
        failures = self._plane.metrics.counter(
            f"{prefix}_unauthorized_requests_total",
            "Requests without a valid API key or operator token: missing, or unknown.",
            ("listener", "reason"),
        )

        def failed(listener: str) -> Callable[[str], None]:
            counters = {reason: failures.labels(listener, reason) for reason in (MISSING, UNKNOWN)}
            return lambda reason: counters[reason].inc()

        keys = ApiKeys.load(self._settings.auth, os.environ, failed(ListenerName.PUBLIC))
        secret = self._settings.admin.token
        return keys, Operators(None if secret is None else AdminToken(secret, failed(ListenerName.ADMIN)))

    def _make_cors(self) -> Cors | None:
        origins = self._settings.http.cors.origins
        return Cors(origins) if origins else None

    def _make_listener(
        self,
        name: str,
        host: str,
        port: int,
        routes: list[HttpRoute],
        *,
        ssl: SSLContext | None,
        cors: Cors | None = None,
        port_option: str = "--http-port or DYN_HTTP_PORT",
        reuse_port: bool = False,
    ) -> Listener:
        http = self._settings.http
        return Listener(
            name,
            host=host,
            port=port,
            routes=routes,
            body_limit=http.body_limit_mb * MB,
            body_budget=self._body_budget,
            max_connections=http.max_connections,
            idle_timeout=http.idle_timeout,
            header_timeout=http.header_timeout,
            body_timeout=http.body_timeout,
            write_stall=self._settings.client.write_stall,
            ssl=ssl,
            cors=cors,
            port_option=port_option,
            reuse_port=reuse_port,
            overload_status=http.overload_status,
        )


def _thresholds(settings: Settings) -> tuple[Thresholds, dict[str, Changes]]:
    """What the configuration says of all models, and of some over it."""
    section = settings.thresholds
    common = Thresholds(**{name: getattr(section, name) for name in THRESHOLDS})
    return common, {model: own.model_dump(exclude_unset=True) for model, own in section.models.items()}
