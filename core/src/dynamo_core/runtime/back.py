"""The workers' half of a process: engines with their endpoints, and a system listener if no frontend is there."""

from __future__ import annotations

import asyncio

from dynamo_core.contracts.engine import DisaggregationMode, LLMEngine, WorkerConfig
from dynamo_core.http.health import metrics_route, system_routes
from dynamo_core.http.listener import Listener
from dynamo_core.runtime.plane import Plane
from dynamo_core.runtime.roles import Role
from dynamo_core.settings import WorkerSettings
from dynamo_core.tasks import TaskSet
from dynamo_core.worker.worker import Worker, WorkerLimits

#: A system listener answers a scrape now and then; it takes no bodies.
_SYSTEM_CONNECTIONS = 100
_SYSTEM_BODY = 64 * 1024


class Back:
    """Made from a plane and a role; `start` after the plane's, `stop` before it is closed."""

    def __init__(self, plane: Plane, role: Role) -> None:
        self._plane = plane
        self._tasks = TaskSet()
        self.workers = [
            self._make_worker(name, plane.settings.workers[name], replica)
            for name in role.workers
            for replica in self._replicas(role, plane.settings.workers[name])
        ]
        self._system = None if role.whole else self._make_system(role)

    async def start(self) -> None:
        """Starts the workers one after the other.

        Raises:
            ConfigError: an address cannot be bound, or a model folder cannot be used.
            DynamoError: an engine did not start.
        """
        url = None
        if self._system is not None:
            await self._system.start()
            url = self._system.url
        for worker in self.workers:
            await worker.start(system_url=url)

    async def lost(self) -> None:
        """Returns when discovery has given up on a worker for good: it serves on, but nobody will find it."""
        if not self.workers:
            await asyncio.Event().wait()
        waiting = [self._tasks.spawn(worker.lost(), name="watch-lease") for worker in self.workers]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def stop(self, grace: bool, *, hurried: bool = False) -> None:
        """Stops all workers at once; being cancelled takes them the patience, not the steps."""
        stopping = [
            self._tasks.spawn(worker.stop(grace=grace, hurried=hurried), name="stop-worker") for worker in self.workers
        ]
        if not stopping:
            return
        try:
            await asyncio.wait(stopping)
        except asyncio.CancelledError:
            for task in stopping:
                task.cancel()
            await asyncio.wait(stopping)
            raise

    async def close_system(self) -> None:
        """Closes the system listener."""
        if self._system is not None:
            await self._system.aclose()

    @staticmethod
    def _replicas(role: Role, settings: WorkerSettings) -> range:
        return range(settings.replicas) if role.replica is None else range(role.replica, role.replica + 1)

    def _make_worker(self, name: str, settings: WorkerSettings, replica: int) -> Worker:
        plane = self._plane
        picked = plane.resolved.workers[name]
        config = worker_config(plane.settings.namespace, name, settings, replica)
        engine: LLMEngine = picked.cls(picked.config, config)
        scope = plane.metrics.scope(
            dynamo_namespace=config.namespace,
            dynamo_component=config.component,
            dynamo_endpoint=config.endpoint,
            worker=f"{config.worker}-{replica}",
        )
        return Worker(
            engine,
            config,
            transport=plane.transport,
            events=plane.events,
            discovery=plane.discovery,
            metrics=scope,
            limits=WorkerLimits(
                engine_requests=settings.engine_request_limit,
                queued_requests=settings.request_queue_limit,
                grace_period=settings.grace_period,
                drain_timeout=settings.drain_timeout,
            ),
            announce=plane.announce,
        )

    def _make_system(self, role: Role) -> Listener | None:
        if not role.workers:
            return None
        settings = self._plane.settings.workers[role.workers[0]]
        if settings.system_port is None:
            return None
        port = settings.system_port + (role.replica or 0) if settings.system_port else 0
        return Listener(
            "system",
            host=settings.system_host,
            port=port,
            routes=[*system_routes(self._endpoints), metrics_route(self._plane.metrics.render)],
            body_limit=_SYSTEM_BODY,
            max_connections=_SYSTEM_CONNECTIONS,
            idle_timeout=self._plane.settings.http.idle_timeout,
            port_option=f"workers.{role.workers[0]}.system_port",
        )

    def _endpoints(self) -> dict[str, bool]:
        """Each worker's endpoint, and whether it serves."""
        return {f"{worker.name}.generate": worker.ready for worker in self.workers}


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
