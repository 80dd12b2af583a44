"""The workers' half of a process: engines with their endpoints, and a system listener if no frontend is there."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from dynamo_core.contracts.engine import AUTO_PARSER, DisaggregationMode, LLMEngine, WorkerConfig
from dynamo_core.contracts.engine_boundary import make_engine
from dynamo_core.resources import ClosingStack
from dynamo_core.tasks import TaskSet
from dynamo_http.health import metrics_route, system_routes
from dynamo_http.listener import Listener

from dynamo_runtime.assembly.automatic_parsers import find_candidates
from dynamo_runtime.assembly.extensions import Extensions
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.assembly.reload import Plan, Step
from dynamo_runtime.settings import WorkerSettings
from dynamo_runtime.worker.canary import HealthCheck
from dynamo_runtime.worker.parser_choice import Candidates
from dynamo_runtime.worker.worker import Worker, WorkerLimits

log = logging.getLogger(__name__)

#: Labels that all metrics of a worker have.
COMMON_LABELS = frozenset({"dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker"})
#: A system listener answers a scrape now and then; it takes no bodies.
_SYSTEM_CONNECTIONS = 100
_SYSTEM_BODY = 64 * 1024


class WorkerProcess:
    """Made from a plane and a role; `open` and `start` after the plane's, `stop` before it is closed."""

    def __init__(self, plane: ProcessServices, role: Role, *, stopping: Callable[[], None] | None = None) -> None:
        """Take as `stopping` the callback for a worker that begins to stop, for whatever reason."""
        self._plane = plane
        self._stopping = stopping
        self._interrupted = False
        self._tasks = TaskSet()
        self._hosted = role.hosted
        #: The engines that the config picks, by the names of their workers.
        self._engines: defaultdict[str, list[LLMEngine]] = defaultdict(list)
        self._candidates: Candidates | None = None
        self.workers = [
            self._make_worker(name, plane.settings.workers[name], replica)
            for name in role.workers
            for replica in self._replicas(role, plane.settings.workers[name])
        ]
        # A process with a frontend has them there.
        self._extensions = Extensions(plane, () if role.frontend else plane.resolved.extensions)
        self._system = None if role.whole else self._make_system(role)

    async def open(self, stack: ClosingStack) -> None:
        """Open the system listener, if there is one; `stack` closes it.

        Raises:
            ConfigError: its address cannot be bound.
        """
        if self._system is not None:
            await stack.enter(self._system).start()
            log.info("health and metrics of this process are at %s", self._system.url)

    async def start_extensions(self, stack: ClosingStack) -> None:
        """Start what runs beside the workers; `stack` closes it."""
        await stack.enter(self._extensions).start()

    def failures(self) -> Mapping[str, str]:
        """See `dynamo_http.health.WorkerHealthSource`."""
        return self._extensions.failures

    async def start(self) -> None:
        """Start the workers one after the other; none after `interrupt`.

        Raises:
            ConfigError: a model folder cannot be used.
            DynamoError: an engine did not start.
        """
        url = self._system.url if self._system is not None else None
        for worker in self.workers:
            if self._interrupted:
                return
            await worker.start(system_url=url)

    def interrupt(self) -> None:
        """Begin nothing further while the workers start; an engine that is starting may finish and is stopped."""
        self._interrupted = True
        for worker in self.workers:
            worker.interrupt()

    @property
    def starting(self) -> bool:
        """See `dynamo_http.health.WorkerHealthSource`."""
        return not self._interrupted and any(worker.starting for worker in self.workers)

    def endpoints(self) -> dict[str, bool]:
        """Return each worker's endpoint, and whether it serves."""
        return {worker.endpoint: worker.ready for worker in self.workers}

    def states(self) -> dict[str, str]:
        """Return each registered worker's endpoint, and the state that operators have set."""
        return {worker.endpoint: worker.instance.state_name for worker in self.workers if worker.instance is not None}

    def readiness(self) -> tuple[bool, str]:
        """Return ready once all is connected and every worker is registered, while their engines answer."""
        reasons = [worker.unready for worker in self.workers if not worker.ready]
        if not reasons:
            return True, "ready"
        return False, self._plane.waits_for or "; ".join(reasons)

    @property
    def doing(self) -> str:
        """The current steps of the engines; see `Worker.doing`."""
        return "; ".join(filter(None, (worker.doing for worker in self.workers)))

    async def lost(self) -> None:
        """Return when a worker can serve no more, for good: its engine is dead, or no frontend will find it."""
        if not self.workers:
            await asyncio.Event().wait()
        waiting = [self._tasks.spawn(worker.lost(), name="watch-lease") for worker in self.workers]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """See `dynamo_runtime.assembly.reload.Reloadable`."""
        for name, engines in self._engines.items():
            yield from plan.reconfigured(f"workers.{name}.engine", engines)
        yield from self._extensions.reload_steps(plan)

    async def stop(self, grace: bool, *, hurried: bool = False) -> None:
        """Stop all workers at once; being cancelled takes them the patience, not the steps."""
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

    @staticmethod
    def _replicas(role: Role, settings: WorkerSettings) -> range:
        return range(settings.replicas) if role.replica is None else range(role.replica, role.replica + 1)

    def _make_worker(self, name: str, settings: WorkerSettings, replica: int) -> Worker:
        plane = self._plane
        if self._hosted is not None:
            engine, config = self._hosted.engine, self._hosted.config
        else:
            picked = plane.resolved.workers[name]
            config = worker_config(plane.settings.namespace, name, settings, replica)
            engine = make_engine(picked.cls, picked.config, config)
            self._engines[name].append(engine)
        scope = plane.metrics.scope(
            **config.metrics_labels,
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
                drain_timeout=settings.request_drain,
            ),
            announce=plane.announce,
            health_check=health_check(settings, config),
            stopping=self._stopping,
            parsers=self._parsers_for(config),
        )

    def _parsers_for(self, config: WorkerConfig) -> Candidates:
        """Return what `auto` may choose from, loaded where a worker needs it."""
        if AUTO_PARSER not in (config.tool_call_parser, config.reasoning_parser):
            return Candidates()
        if self._candidates is None:
            self._candidates = find_candidates(self._plane.settings, self._plane.loader)
        return self._candidates

    def _make_system(self, role: Role) -> Listener | None:
        if not role.workers:
            return None
        http, settings = self._plane.settings.http, self._plane.settings.workers[role.workers[0]]
        if settings.system_port is None:
            return None
        port = settings.system_port + (role.replica or 0) if settings.system_port else 0
        return Listener(
            "system",
            host=settings.system_host,
            port=port,
            routes=[*system_routes(self), metrics_route(self._plane.metrics.render)],
            body_limit=_SYSTEM_BODY,
            max_connections=_SYSTEM_CONNECTIONS,
            idle_timeout=http.idle_timeout,
            port_option=f"workers.{role.workers[0]}.system_port",
            overload_status=http.overload_status,
        )


def health_check(settings: WorkerSettings, config: WorkerConfig) -> HealthCheck | None:
    """Return how the worker is probed, if it is. What a program says of the payload wins over the settings."""
    check = settings.health_check
    if not check.enabled:
        return None
    payload = check.payload if config.health_check_payload is None else config.health_check_payload
    return HealthCheck(wait=check.wait, timeout=check.timeout, payload=payload, unregister=check.unregister)


def worker_config(namespace: str, name: str, settings: WorkerSettings, replica: int) -> WorkerConfig:
    """Return what the engine of one replica is told."""
    mode = DisaggregationMode(settings.disaggregation_mode)
    # Prefill workers stand apart, so that no request for `backend` is sent to one.
    component = settings.component or ("prefill" if mode is DisaggregationMode.PREFILL else "backend")
    return WorkerConfig(
        model_name=settings.model.name,
        served_model_name=settings.model.name,
        model_path=settings.model.path,
        namespace=namespace,
        component=component,
        endpoint=settings.endpoint,
        worker=name,
        endpoint_types=tuple(settings.endpoint_types),
        disaggregation_mode=mode,
        migration_limit=settings.model.migration_limit,
        replica=replica,
        custom_jinja_template=settings.model.custom_jinja_template,
        tool_call_parser=settings.model.tool_call_parser,
        reasoning_parser=settings.model.reasoning_parser,
        enable_local_indexer=settings.enable_local_indexer,
        enable_kv_routing=settings.enable_kv_routing,
    )
