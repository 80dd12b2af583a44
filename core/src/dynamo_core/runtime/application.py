"""`Application`: every stage of one process, built from settings, started and stopped in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo_core.client.admission import NoAdmission
from dynamo_core.client.board import LoadBoard
from dynamo_core.client.caller import Caller
from dynamo_core.client.models import Models
from dynamo_core.client.pipeline import Deadlines, Pipeline
from dynamo_core.client.pool import Pool
from dynamo_core.contracts.admission import Admission
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine, WorkerConfig
from dynamo_core.contracts.frontend import Frontend, FrontendServices, HttpRoute, ListenerName
from dynamo_core.contracts.router import Router, RouterServices
from dynamo_core.contracts.transport import Transport
from dynamo_core.http.health import health_routes, metrics_route
from dynamo_core.http.listener import Listener
from dynamo_core.plugins.loader import PluginLoader
from dynamo_core.runtime.health import Health
from dynamo_core.runtime.resolve import Resolved, resolve
from dynamo_core.settings import LoadedSettings, WorkerSettings
from dynamo_core.tasks import TaskSet
from dynamo_core.telemetry.access_log import AccessLog
from dynamo_core.telemetry.inflight import Requests
from dynamo_core.telemetry.loop_lag import LoopLag
from dynamo_core.telemetry.metrics import Metrics
from dynamo_core.worker.worker import Worker, WorkerLimits

log = logging.getLogger(__name__)

MB = 1024 * 1024


class Application:
    """All stages in one process: listeners, frontend, models, workers, transport, discovery.

    Making it loads the plugins that the settings name and validates their settings; nothing is started yet.

    Raises:
        ConfigError: the settings or a plugin are wrong.
    """

    def __init__(self, loaded: LoadedSettings) -> None:
        self._settings = loaded.settings
        self._loader = PluginLoader()
        self._loader.register_builtin(AccessLog(), "access-log")
        self._resolved = resolve(loaded, self._loader)
        self._metrics = Metrics()
        self._transport = self._make_transport(self._resolved)
        self._events_transport = self._make_events(self._resolved)
        self._discovery = self._make_discovery(self._resolved)
        self._board = LoadBoard()
        self._admission = self._make_admission(self._resolved)
        client = self._settings.client
        self._pipeline = Pipeline(
            transport=self._transport,
            admission=self._admission,
            board=self._board,
            deadlines=Deadlines(
                retries=client.retries,
                accept=client.accept_timeout,
                first_item=client.first_item_timeout,
                total=client.total_timeout,
            ),
        )
        self._caller = Caller(self._transport)
        self._models = Models(
            discovery=self._discovery,
            pipeline=self._pipeline,
            caller=self._caller,
            make_router=self._make_router,
            announce=self._loader.hooks.announce,
        )
        self._lag = LoopLag(self._metrics, prefix=self._settings.http.metrics_prefix)
        self._frontend = self._make_frontend(self._resolved)
        self._health = Health(self._settings, self._models)
        self._listeners = self._make_listeners()
        self._workers = self._make_workers(self._resolved)
        self._tasks = TaskSet()
        self._stopped = False

    @property
    def url(self) -> str:
        """Where clients reach this process, once started."""
        return self._listeners[0].url

    @property
    def board(self) -> LoadBoard:
        """What runs now, as this process accounts for it."""
        return self._board

    @property
    def models(self) -> Models:
        """The models that are served now."""
        return self._models

    @property
    def metrics(self) -> Metrics:
        """The metrics of this process."""
        return self._metrics

    async def start(self) -> None:
        """Opens the listeners first, so that a taken port is told before an engine loads for minutes.

        Raises:
            ConfigError: an address cannot be bound, or a model folder cannot be used.
            DynamoError: an engine or a service did not start. What had started has been stopped.
        """
        try:
            await self._transport.start()
            if self._events_transport is not self._transport:
                await self._events_transport.start()
            await self._discovery.start()
            await self._admission.start()
            self._lag.start()
            self._models.start()
            await self._frontend.start()
            for listener in self._listeners:
                await listener.start()
            for worker in self._workers:
                await worker.start()
        except BaseException:
            await self.stop(grace=False)
            raise

    async def stop(self, *, grace: bool = True) -> None:
        """Stops everything in order: no new requests, running ones finish, then the workers. Safe twice.

        Without `grace` running requests are cut. So they are when this is cancelled; everything is still closed.
        """
        if self._stopped:
            return
        self._stopped = True
        self._health.shutting_down = True
        steps: list[Callable[[bool], Awaitable[None]]] = [
            self._drain_listeners,
            lambda _: self._close_listeners(),
            self._stop_workers,
            lambda _: self._frontend.aclose(),
            lambda _: self._models.aclose(),
            lambda _: self._admission.aclose(),
            self._stop_lag,
            lambda _: self._discovery.aclose(),
            lambda _: self._events_transport.aclose(),
            lambda _: self._transport.aclose(),
        ]
        cut = False
        for step in steps:
            try:
                await step(grace and not cut)
            except asyncio.CancelledError:
                cut = True
            except Exception:
                # One part that cannot be stopped must not keep the others from it.
                log.exception("a part could not be stopped in order")
        if cut:
            raise asyncio.CancelledError

    async def _drain_listeners(self, grace: bool) -> None:
        timeout = self._settings.client.shutdown_timeout if grace else 0.0
        await asyncio.gather(*(listener.drain_and_close(timeout) for listener in self._listeners))

    async def _close_listeners(self) -> None:
        for listener in self._listeners:
            await listener.aclose()

    async def _stop_lag(self, grace: bool) -> None:
        self._lag.stop()

    async def _stop_workers(self, grace: bool) -> None:
        stopping = [self._tasks.spawn(worker.stop(grace=grace), name="stop-worker") for worker in self._workers]
        if not stopping:
            return
        try:
            await asyncio.wait(stopping)
        except asyncio.CancelledError:
            # Each goes on with the steps that are left, without the patience.
            for task in stopping:
                task.cancel()
            await asyncio.wait(stopping)
            raise

    # Construction.

    def _make_transport(self, resolved: Resolved) -> Transport:
        picked = resolved.transport
        return picked.cls(picked.config, self._metrics)

    def _make_events(self, resolved: Resolved) -> Transport:
        picked = resolved.events
        return self._transport if picked is None else picked.cls(picked.config, self._metrics)

    def _make_discovery(self, resolved: Resolved) -> Discovery:
        picked = resolved.discovery
        return picked.cls(picked.config, self._metrics)

    def _make_admission(self, resolved: Resolved) -> Admission:
        picked = resolved.admission
        if picked is None:
            return NoAdmission(PluginConfig(), self._metrics)
        return picked.cls(picked.config, self._metrics)

    def _make_router(self, pool: Pool) -> Router:
        picked = self._resolved.router
        services = RouterServices(
            pool=pool,
            board=self._board,
            events=self._events_transport.events(),
            directory=self._discovery,
            metrics=self._metrics,
            call=self._caller,
        )
        return picked.cls(picked.config, services)

    def _make_frontend(self, resolved: Resolved) -> Frontend:
        picked = resolved.frontend
        services = FrontendServices(
            models=self._models,
            requests=Requests(self._metrics, self._announce_finished, prefix=self._settings.http.metrics_prefix),
            metrics=self._metrics,
            write_stall=self._settings.client.write_stall,
            keep_alive=self._settings.client.keep_alive,
        )
        return picked.cls(picked.config, services)

    def _announce_finished(self, record: Any) -> None:
        self._loader.hooks.announce("dynamo_request_finished", record=record)

    def _make_listeners(self) -> list[Listener]:
        settings = self._settings
        routes = [*self._frontend.routes()]
        public = [route for route in routes if route.listener is ListenerName.PUBLIC]
        admin = [route for route in routes if route.listener is ListenerName.ADMIN]
        public += health_routes(self._health)
        admin += [metrics_route(self._metrics.render)]
        front, operators = settings.frontend, settings.admin
        if operators.port is None:
            return [self._make_listener("frontend", front.host, front.port, public + admin)]
        admin += health_routes(self._health)
        return [
            self._make_listener("frontend", front.host, front.port, public),
            self._make_listener("admin", operators.host, operators.port, admin, port_option="admin.port"),
        ]

    def _make_listener(
        self, name: str, host: str, port: int, routes: list[HttpRoute], port_option: str = "--http-port"
    ) -> Listener:
        http = self._settings.http
        return Listener(
            name,
            host=host,
            port=port,
            routes=routes,
            body_limit=http.body_limit_mb * MB,
            max_connections=http.max_connections,
            idle_timeout=http.idle_timeout,
            port_option=port_option,
        )

    def _make_workers(self, resolved: Resolved) -> list[Worker]:
        workers: list[Worker] = []
        for name, settings in self._settings.workers.items():
            picked = resolved.workers[name]
            for replica in range(settings.replicas):
                config = worker_config(self._settings.namespace, name, settings, replica)
                engine: LLMEngine = picked.cls(picked.config, config)
                workers.append(self._make_worker(engine, config, settings, replica))
        return workers

    def _make_worker(self, engine: LLMEngine, config: WorkerConfig, settings: WorkerSettings, replica: int) -> Worker:
        scope = self._metrics.scope(
            dynamo_namespace=config.namespace,
            dynamo_component=config.component,
            dynamo_endpoint=config.endpoint,
            worker=f"{config.worker}-{replica}",
        )
        return Worker(
            engine,
            config,
            transport=self._transport,
            discovery=self._discovery,
            metrics=scope,
            limits=WorkerLimits(
                engine_requests=settings.engine_request_limit,
                queued_requests=settings.request_queue_limit,
                grace_period=settings.grace_period,
                drain_timeout=settings.drain_timeout,
            ),
            announce=self._loader.hooks.announce,
        )


def worker_config(namespace: str, name: str, settings: WorkerSettings, replica: int) -> WorkerConfig:
    """What the engine of one replica is told."""
    return WorkerConfig(
        model_name=settings.model.name,
        served_model_name=settings.model.name,
        model_path=settings.model.path,
        namespace=namespace,
        component=settings.component,
        endpoint=settings.endpoint,
        worker=name,
        endpoint_types=tuple(settings.endpoint_types),
        disaggregation_mode=DisaggregationMode(settings.disaggregation_mode),
        migration_limit=settings.model.migration_limit,
        replica=replica,
    )
