"""`Worker`: one engine from start to cleanup, registered while it can serve.

States: INIT → RUNNING → STOPPED, or INIT → START_FAILED → STOPPED. Cleanup is owed in RUNNING and START_FAILED, is
called exactly once, and never in INIT.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.contracts.endpoints import EMBED, GENERATE, MODEL_FILE
from dynamo_core.contracts.engine import EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.events import EventPlane
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.transport import Served, Transport
from dynamo_core.errors import BackendError, DynamoError, as_backend_error
from dynamo_core.protocol.records import CARDS, INSTANCES, Instance
from dynamo_core.text.folder import load_folder
from dynamo_core.worker.adapter import EngineAdapter
from dynamo_core.worker.card import make_card, make_instance
from dynamo_core.worker.gate import CapacityGate
from dynamo_core.worker.metrics import WorkerMetrics
from dynamo_core.worker.model_files import ModelFiles
from dynamo_core.worker.publishers import EnginePublishers

log = logging.getLogger(__name__)

Announce = Callable[..., None]


class WorkerState(enum.Enum):
    """Where a worker is in its life."""

    INIT = "init"
    RUNNING = "running"
    START_FAILED = "start_failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of one worker; times in seconds."""

    engine_requests: int | None = None
    queued_requests: int = 16
    #: How long it serves on after it has left discovery, for callers that have not noticed yet.
    grace_period: float = 5.0
    #: How long running requests may take to finish after that.
    drain_timeout: float = 30.0


class Worker:
    """Runs any engine: starts it, serves its endpoints, registers it, and takes it down in order."""

    def __init__(
        self,
        engine: LLMEngine,
        config: WorkerConfig,
        *,
        transport: Transport,
        discovery: Discovery,
        metrics: MetricsScope,
        limits: WorkerLimits,
        announce: Announce,
        events: EventPlane | None = None,
    ) -> None:
        """`events` is where the engine's cache and load are told; None: the plane that comes with the transport."""
        self._engine = engine
        self._config = config
        self._transport = transport
        self._discovery = discovery
        self._metrics = metrics
        self._limits = limits
        self._announce = announce
        self._events = events or transport.events()
        self._publishers = EnginePublishers()
        self._lease: Lease | None = None
        self._served: list[Served] = []
        self._adapter: EngineAdapter | None = None
        self._instance: Instance | None = None
        self._lifecycle = asyncio.Lock()
        self.state = WorkerState.INIT

    @property
    def instance(self) -> Instance | None:
        """The record in discovery, once the worker is registered."""
        return self._instance

    @property
    def name(self) -> str:
        """``namespace.component``, as the worker is addressed."""
        return f"{self._config.namespace}.{self._config.component}"

    @property
    def ready(self) -> bool:
        """Whether it is registered and takes requests."""
        return self.state is WorkerState.RUNNING and self._instance is not None

    async def lost(self) -> None:
        """Returns when discovery has given up on this worker: its lease could not be kept."""
        if self._lease is not None:
            await self._lease.lost.wait()

    async def start(self, *, system_url: str | None = None) -> None:
        """Starts the engine, then serves, then registers. `system_url` is where its health and metrics are.

        Raises:
            ConfigError: the model folder cannot be used.
            BackendError: the engine could not start; cleanup has been called.
        """
        async with self._lifecycle:
            await self._start(system_url)

    async def _start(self, system_url: str | None) -> None:
        if self.state is not WorkerState.INIT:
            raise RuntimeError("a worker is started once")
        folder = self._config.model_path
        files = ModelFiles(await asyncio.to_thread(load_folder, folder) if folder is not None else {})
        self._lease = await self._discovery.lease()
        try:
            engine_config = await self._start_engine(self._lease)
            await self._serve(self._lease, engine_config, files, system_url)
        except BaseException:
            await self._stop(grace=False)
            raise

    async def stop(self, *, grace: bool = True, hurried: bool = False) -> None:
        """Unregisters, waits the grace period, lets requests finish, drains, cleans up. Safe twice.

        `hurried` skips the grace period. Without `grace` it does not wait for running requests
        either. Nor does it once it is cancelled;
        every later step is still taken. While the worker starts, this waits until it has.
        """
        async with self._lifecycle:
            await self._stop(grace=grace, hurried=hurried)

    async def _stop(self, *, grace: bool, hurried: bool = False) -> None:
        if self.state is WorkerState.STOPPED:
            return
        running = self.state is WorkerState.RUNNING
        owed = self.state is not WorkerState.INIT
        self.state = WorkerState.STOPPED
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [("leave discovery", self._unregister)]
        if running:
            self._say("dynamo_engine_draining")
        if grace:
            if not hurried:
                steps.append(("wait for late callers", self._wait_for_late_callers))
            steps.append(("finish its requests", self._finish_requests))
        steps.append(("close its endpoints", self._close_endpoints))
        if running:
            steps.append(("drain its engine", self._drain_engine))
        if owed:
            steps.append(("clean up its engine", self._engine.cleanup))
        steps.append(("close its publishers", self._publishers.aclose))
        if self._lease is not None:
            steps.append(("end its lease", self._lease.aclose))
        await self._take(steps)
        if owed:
            self._say("dynamo_engine_stopped")

    async def _take(self, steps: list[tuple[str, Callable[[], Awaitable[None]]]]) -> None:
        """Takes every step, whatever becomes of each; being cancelled cuts one short and is passed on at the end."""
        cut = False
        for what, step in steps:
            if cut and step in (self._wait_for_late_callers, self._finish_requests):
                continue
            try:
                await step()
            except asyncio.CancelledError:
                cut = True
                if step == self._close_endpoints:
                    # What was left open by being cut short; the requests have had their time.
                    await self._close_endpoints()
            except Exception:
                log.exception("worker %s could not %s", self._config.worker, what)
        if cut:
            raise asyncio.CancelledError

    def _say(self, hook: str) -> None:
        worker_id = self._lease.id if self._lease is not None else 0
        self._announce(hook, worker=self._config, worker_id=worker_id)

    async def _start_engine(self, lease: Lease) -> EngineConfig:
        worker_id = lease.id
        begun = time.perf_counter()
        self.state = WorkerState.START_FAILED
        try:
            engine_config = await self._engine.start(worker_id)
            if not engine_config.model:
                raise BackendError.InvalidArgument("EngineConfig.model is empty")
            await self._engine.setup_metrics(self._metrics)
            await self._publishers.start(self._engine, self._events, lease)
        except DynamoError:
            raise
        except Exception as error:
            # The author of an engine needs the place; the operator needs to know which worker it is.
            log.exception("engine %s of worker %s failed to start", self._engine.NAME, self._config.worker)
            raise as_backend_error(error) from error
        self.state = WorkerState.RUNNING
        self._worker_metrics = WorkerMetrics(self._metrics)
        self._worker_metrics.loaded(time.perf_counter() - begun)
        self._announce("dynamo_engine_started", worker=self._config, engine_config=engine_config, worker_id=worker_id)
        return engine_config

    async def _serve(
        self, lease: Lease, engine_config: EngineConfig, files: ModelFiles, system_url: str | None
    ) -> None:
        gate = CapacityGate(self._metrics, limit=self._limits.engine_requests, queue=self._limits.queued_requests)
        self._adapter = adapter = EngineAdapter(
            self._engine, engine_config, gate, self._worker_metrics, worker=self._config.worker
        )
        card = make_card(lease.id, self._config, engine_config, files.listing())
        address: dict[str, str] = {}
        for endpoint, handler in (
            (GENERATE, adapter.generate),
            (EMBED, adapter.embed),
            (MODEL_FILE, files.serve),
        ):
            served = await self._transport.serve(lease.id, endpoint, handler)
            self._served.append(served)
            address |= served.address
        instance = make_instance(lease.id, self._config, address, system_url)
        # The card is there slightly before the instance, so that nobody sees an instance without a model.
        await lease.put(CARDS + card.path, msgspec.json.encode(card))
        await lease.put(INSTANCES + instance.path, msgspec.json.encode(instance))
        self._instance = instance
        log.info("serving %s as instance %x of worker %s", card.name, lease.id, self._config.worker)

    async def _unregister(self) -> None:
        if self._lease is not None and self._instance is not None:
            await self._lease.remove(INSTANCES + self._instance.path)
            await self._lease.remove(CARDS + self._instance.path)

    async def _wait_for_late_callers(self) -> None:
        if self._instance is not None and self._discovery.CROSS_PROCESS:
            await asyncio.sleep(self._limits.grace_period)

    async def _finish_requests(self) -> None:
        timeout = self._limits.drain_timeout
        if not all(await asyncio.gather(*(served.drain(timeout) for served in self._served))):
            log.warning("worker %s ends requests that did not finish in time", self._config.worker)

    async def _close_endpoints(self) -> None:
        for served in self._served:
            await served.aclose()
        if self._adapter is not None:
            await self._adapter.aclose()

    async def _drain_engine(self) -> None:
        async with asyncio.timeout(self._limits.drain_timeout):
            await self._engine.drain()
