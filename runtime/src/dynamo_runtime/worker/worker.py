"""`Worker`: one engine from start to cleanup, registered while it can serve.

States: INIT → RUNNING → STOPPED, or INIT → START_FAILED → STOPPED. Cleanup is owed in RUNNING and START_FAILED, is
called exactly once, and never in INIT. A worker that is told to end before its engine starts goes from INIT to STOPPED;
one that is told so while its engine starts lets it finish, unless the start is cancelled, and then stops without
serving.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.contracts.engine import PROGRESS, EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.engine_boundary import call_async, check_engine_config, engine_name
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.transports.call import (
    EMBED,
    GENERATE,
    KV_HISTORY,
    MODEL_FILE,
    SCORE,
    WORKER_STATE,
    Handler,
    ServedContext,
)
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.contracts.transports.transport import Served, Transport
from dynamo_core.errors import BackendError, ConfigError, DynamoError, ResponseTimeout, as_backend_error
from dynamo_core.protocol.annotated import Annotated
from dynamo_core.protocol.cards import check_card, check_model_name
from dynamo_core.protocol.decoding import Unreadable
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.records import Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import AsyncResource, ClosingStack
from dynamo_core.tasks import TaskSet
from dynamo_telemetry.metrics import Metrics

from dynamo_runtime.worker.adapter import EngineAdapter
from dynamo_runtime.worker.blocked_loop_watch import BlockingWatch
from dynamo_runtime.worker.caller_progress_reports import ProgressReporter
from dynamo_runtime.worker.canary import Canary, HealthCheck, ItemCounter, probe
from dynamo_runtime.worker.capacity_gate import CapacityGate
from dynamo_runtime.worker.card import make_card, make_instance, public_name
from dynamo_runtime.worker.metrics import WorkerMetrics
from dynamo_runtime.worker.model_files import ModelFiles, read_files
from dynamo_runtime.worker.parser_choice import Candidates, ParserChoice, choose_parsers, log_choice
from dynamo_runtime.worker.probe_request import probe_request
from dynamo_runtime.worker.publishers import EnginePublishers
from dynamo_runtime.worker.registration import Registration
from dynamo_runtime.worker.stream_validator import vocabulary_of

log = logging.getLogger(__name__)

Announce = Callable[..., None]

#: What an engine may be asked in: `EngineConfig.model_input`.
_MODEL_INPUTS = ("tokens", "text")

_NO_CANDIDATES = Candidates()

#: Seconds that an engine's `drain` has at least, also if the requests have used up the time.
MIN_DRAIN = 1.0


class WorkerState(enum.Enum):
    """The state of a worker's life."""

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
    #: How long running requests may take to finish after that, and the engine to drain.
    drain_timeout: float = 25.0


class Worker(AsyncResource):
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
        health_check: HealthCheck | None = None,
        stopping: Callable[[], None] | None = None,
        parsers: Candidates = _NO_CANDIDATES,
    ) -> None:
        """`events` is where the engine's cache and load are told; None: the plane that comes with the transport.

        Without `health_check` the engine is not probed. `stopping` is called when stopping begins, for whatever reason.
        `parsers` are those that may be chosen for the model.
        """
        self._engine = engine
        self._config = config
        self._transport = transport
        self._discovery = discovery
        self._metrics = metrics
        self._limits = limits
        self._announce = announce
        self._events = events or transport.events()
        self._health_check = health_check
        self._stopping = stopping
        self._candidates = parsers
        self._publishers = EnginePublishers()
        self._worker_metrics = WorkerMetrics(metrics)
        self._lease: Lease | None = None
        self._served: list[Served] = []
        self._adapters: list[EngineAdapter] = []
        #: How many token ids the model has, if its files say so.
        self._vocabulary: int | None = None
        #: Signs of life of the engine.
        self._beats = ItemCounter()
        self._canary: Canary | None = None
        self._progress: ProgressReporter | None = None
        #: Calls of ``generate`` that run, where a canary may find that the engine is frozen.
        self._running: set[ServedContext] = set()
        self._registration: Registration | None = None
        #: The canary's last verdict that was carried out.
        self._sound = True
        self._lifecycle = asyncio.Lock()
        self._begun = False
        self._ending = False
        self._engine_dead = False
        self._drain_ends: float | None = None
        self._stack = ClosingStack(f"worker {config.worker}")
        #: Whether stopping waits for requests, and whether it skips waiting for late callers.
        self._patient = True
        self._hurried = False
        #: The method of the engine that runs now, of those that may take long.
        self._method = ""
        self.state = WorkerState.INIT

    @property
    def instance(self) -> Instance | None:
        """The record in discovery, once the worker is registered."""
        return None if self._registration is None else self._registration.instance

    @property
    def name(self) -> str:
        """``namespace.component``, as the worker is addressed."""
        return f"{self._config.namespace}.{self._config.component}"

    @property
    def endpoint(self) -> str:
        """``namespace.component.endpoint``."""
        return f"{self.name}.{self._config.endpoint}"

    @property
    def ready(self) -> bool:
        """Whether it is registered and takes requests, and its engine answers as far as is known."""
        serves = self.state is WorkerState.RUNNING and self.instance is not None
        return serves and (self._canary is None or self._canary.answers)

    @property
    def starting(self) -> bool:
        """Whether it is on its way to being registered, or will be."""
        return self.instance is None and not self._ending and self.state is not WorkerState.STOPPED

    @property
    def unready(self) -> str:
        """Why it is not `ready`, in a few words; empty if it is."""
        if self.ready:
            return ""
        name = self._config.worker
        if self.starting:
            return f"worker {name} is starting"
        if self._ending or self.state is WorkerState.STOPPED:
            return f"worker {name} is stopping"
        return f"the engine of worker {name} does not answer"

    @property
    def doing(self) -> str:
        """The current step of its engine, for the log: start, drain or cleanup. Empty otherwise. For any thread."""
        method = self._method
        return f"the engine of worker {self._config.worker} is in {method}()" if method else ""

    async def lost(self) -> None:
        """Return when no request can be served here any more: the engine has died, or discovery has given up on it."""
        if self._lease is None:
            return
        async with TaskSet() as watching:
            lease = watching.spawn(self._lease.lost.wait(), name="watch-lease")
            engine = watching.spawn(self._engine.died(), name="watch-engine")
            await asyncio.wait({lease, engine}, return_when=asyncio.FIRST_COMPLETED)
            if engine.done() and not engine.cancelled():
                self._engine_dead = True
                why = engine.exception() or engine.result()
                log.error("the engine of worker %s has died: %s", self._config.worker, why)
            else:
                log.error("discovery has given up on worker %s", self._config.worker)

    async def start(self, *, system_url: str | None = None) -> None:
        """Start the engine, then serve, then register. `system_url` is where its health and metrics are.

        If it is told to end before it is registered, by `interrupt` or `stop`, it has stopped when this returns.

        Raises:
            ConfigError: the model folder cannot be used.
            BackendError: the engine could not start; cleanup has been called.
            DynamoError: the worker could not be registered; cleanup has been called.
        """
        if self._begun:
            raise RuntimeError("a worker is started once")
        self._begun = True
        async with self._lifecycle:
            try:
                await self._start(system_url)
            except BaseException:
                await self._stop(grace=False)
                raise
            if self._is_ending() and self.instance is None:
                await self._stop(grace=False)

    def interrupt(self) -> None:
        """Say that the process is to end: an engine that is starting may finish, nothing further begins.

        Once the worker serves this changes nothing; `stop` is what ends it.
        """
        self._ending = True

    def _is_ending(self) -> bool:
        # Asked again after each wait: what type checkers remember of an attribute is out of date by then.
        return self._ending

    async def _start(self, system_url: str | None) -> None:
        if self._is_ending():
            return
        files = await asyncio.to_thread(read_files, self._config)
        self._vocabulary = vocabulary_of(files)
        self._lease = await self._discovery.lease()
        self._stack.push("end its lease", self._lease.aclose)
        self._stack.push("close its publishers", self._publishers.aclose)
        if self._is_ending():
            return
        engine_config = await self._start_engine(self._lease)
        if not self._is_ending():
            await self._serve(self._lease, engine_config, files, system_url)

    async def stop(self, *, grace: bool = True, hurried: bool = False) -> None:
        """Unregister, wait the grace period, let requests finish, drain, clean up. Safe twice.

        `hurried` skips the grace period. Without `grace` it does not wait for running requests either. Nor does it once
        it is cancelled; every later step is still taken. While the worker starts, this waits until its engine has
        started, and the worker does not serve.
        """
        self._ending = True
        async with self._lifecycle:
            await self._stop(grace=grace, hurried=hurried)

    async def aclose(self) -> None:
        """Stop at once: running requests are cut."""
        await self.stop(grace=False)

    async def _stop(self, *, grace: bool, hurried: bool = False) -> None:
        if self.state is WorkerState.STOPPED:
            return
        running = self.state is WorkerState.RUNNING
        owed = self.state is not WorkerState.INIT
        self.state = WorkerState.STOPPED
        if self._stopping is not None:
            self._stopping()
        if running:
            self._say("dynamo_engine_draining")
        # Late callers of a dead engine are refused either way, and nothing runs that could finish.
        self._patient = grace and not self._engine_dead
        self._hurried = hurried
        await self._stack.aclose()
        if owed:
            self._say("dynamo_engine_stopped")

    @contextmanager
    def _in(self, method: str) -> Iterator[None]:
        self._method = method
        try:
            yield
        finally:
            self._method = ""

    def _say(self, hook: str) -> None:
        worker_id = self._lease.id if self._lease is not None else 0
        self._announce(hook, worker=self._config, worker_id=worker_id)

    async def _start_engine(self, lease: Lease) -> EngineConfig:
        worker_id = lease.id
        begun = time.perf_counter()
        self.state = WorkerState.START_FAILED
        self._stack.push("clean up its engine", self._clean_up)
        try:
            with self._in("start"):
                made = await call_async(self._engine, "start", worker_id)
            self._worker_metrics.loaded(time.perf_counter() - begun)
            engine_config = _checked(self._engine, self._config, made)
            await call_async(self._engine, "setup_metrics", self._metrics)
            await self._publishers.start(
                self._engine,
                self._events,
                lease,
                kv_events=self._config.enable_kv_routing,
                kv_history=self._config.enable_local_indexer,
                total_blocks=engine_config.total_kv_blocks,
            )
        except DynamoError:
            raise
        except Exception as error:
            # The author of an engine needs the place; the operator needs to know which worker it is.
            log.exception("engine %s of worker %s failed to start", engine_name(self._engine), self._config.worker)
            raise as_backend_error(error) from error
        self.state = WorkerState.RUNNING
        self._stack.push("drain its engine", self._drain_engine)
        self._announce("dynamo_engine_started", worker=self._config, engine_config=engine_config, worker_id=worker_id)
        return engine_config

    async def _serve(
        self, lease: Lease, engine_config: EngineConfig, files: dict[str, bytes], system_url: str | None
    ) -> None:
        # While it starts, an engine may block: no request waits for it.
        blocking = BlockingWatch(self._engine, self._config.worker)
        blocking.start()
        if PROGRESS in engine_config.capabilities:
            self._progress = self._stack.enter(ProgressReporter(self._engine, self._beats))
            self._progress.start()
        self._stack.push("close its endpoints", self._close_endpoints)
        self._stack.push("finish its requests", self._finish_requests)
        self._stack.push("wait for late callers", self._wait_for_late_callers)
        self._stack.push("end its health checks", self._end_health_checks)
        self._stack.push("leave discovery", self._unregister)
        self._stack.enter(blocking)
        gate = CapacityGate(self._metrics, limit=self._limits.engine_requests, queue=self._limits.queued_requests)
        notice = self._limits.grace_period if self._discovery.CROSS_PROCESS else 0.0
        registration = self._registration = Registration(lease, gate, notice=notice)
        adapter = self._adapter(lease, engine_config, gate, self._worker_metrics)
        model_files = ModelFiles(files)
        parsers = await self._choose_parsers(engine_config, files)
        card = make_card(lease.id, self._config, engine_config, model_files.listing(), parsers)
        try:
            check_card(card)
        except Unreadable as error:
            raise BackendError.InvalidArgument(f"EngineConfig cannot be told to frontends: {error}") from None
        request = await self._probe_request(card, files)
        generate: Handler = adapter.generate
        if request is not None:
            generate = self._watched(lease, engine_config, adapter)
        address: dict[str, str] = {}
        for endpoint, handler in (
            (GENERATE, generate),
            (EMBED, adapter.embed),
            (SCORE, adapter.score),
            (MODEL_FILE, model_files.serve),
            (KV_HISTORY, self._publishers.history.serve),
            (WORKER_STATE, registration.serve),
        ):
            served = await self._transport.serve(lease.id, endpoint, handler)
            self._served.append(served)
            address |= served.address
        instance = make_instance(lease.id, self._config, address, system_url, lease.ttl)
        await registration.enter(card, instance)
        log.info(
            "serving %s on %s as instance %016x of worker %s", card.name, self.endpoint, lease.id, self._config.worker
        )
        if request is not None and self._health_check is not None:
            self._canary = self._make_canary(instance, request, self._health_check)
            self._canary.start()

    async def _choose_parsers(self, engine_config: EngineConfig, files: dict[str, bytes]) -> ParserChoice:
        config, parsed = self._config, engine_config.model_input == "tokens"
        choice = await asyncio.to_thread(choose_parsers, config, files, self._candidates, parsed=parsed)
        log_choice(config.worker, choice)
        return choice

    def _adapter(
        self, lease: Lease, engine_config: EngineConfig, gate: CapacityGate, metrics: WorkerMetrics
    ) -> EngineAdapter:
        adapter = EngineAdapter(
            self._engine,
            engine_config,
            gate,
            metrics,
            config=self._config,
            worker_id=lease.id,
            progress=self._progress,
            vocabulary=self._vocabulary,
        )
        self._adapters.append(adapter)
        return adapter

    # Health checks.

    async def _probe_request(self, card: ModelCard, files: dict[str, bytes]) -> PreprocessedRequest | None:
        check = self._health_check
        if check is None:
            return None
        offered: object = None
        if check.payload is None:
            try:
                offered = await call_async(self._engine, "health_check_payload")
            except Exception as error:
                raise as_backend_error(error) from error
        return await probe_request(check.payload, offered, card=card, files=files)

    def _watched(self, lease: Lease, engine_config: EngineConfig, adapter: EngineAdapter) -> Handler:
        """Return the handler of ``generate`` for a worker with a canary: answers are counted, probes are kept apart.

        A probe asks whether the engine answers, not whether there is room: it takes no place from requests, is refused
        none, and shows in no metric. There is one at a time, so that a stuck engine does not collect them.
        """
        private = Metrics()
        probes = self._adapter(lease, engine_config, CapacityGate(private, limit=1, queue=0), WorkerMetrics(private))

        async def generate(request: PreprocessedRequest, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
            if request.is_probe:
                return await probes.generate(request, ctx)
            items = await adapter.generate(request, ctx)
            self._running.add(ctx)
            ctx.defer(lambda: self._running.discard(ctx))
            return self._beats.watch(items)

        return generate

    def _make_canary(self, instance: Instance, request: PreprocessedRequest, check: HealthCheck) -> Canary:
        async def send_probe() -> None:
            await probe(self._transport, instance, GENERATE, request, check.timeout)

        return Canary(send_probe, self._beats, check, self._judged)

    async def _judged(self, answers: bool, why: str) -> None:
        """Apply the canary's verdict: a worker with a silent engine gets no requests, its calls go elsewhere."""
        if self._registration is None or self._health_check is None:
            return
        if not answers and self._health_check.unregister:
            # None of them has had output since long before the probe. The callers try other workers.
            frozen = Annotated[Any].from_error(ResponseTimeout(f"the engine does not answer its health check: {why}"))
            for ctx in self._running:
                ctx.announce(frozen)
        if self.state is not WorkerState.RUNNING or self._sound == answers:
            return
        if self._health_check.unregister:
            await self._registration.set_listed(answers)
        self._sound = answers
        if answers:
            log.info("the engine of worker %s answers again", self._config.worker)
        else:
            log.error("the engine of worker %s does not answer: %s", self._config.worker, why)

    # Stopping, step by step.

    async def _unregister(self) -> None:
        if self._registration is not None:
            await self._registration.leave()

    async def _end_health_checks(self) -> None:
        if self._canary is not None:
            await self._canary.aclose()

    async def _wait_for_late_callers(self) -> None:
        if not self._patient or self._hurried or self._stack.cut:
            return
        # None is left once the worker has been out of service for so long.
        notice = self._registration.notice_left if self._registration is not None and self.instance is not None else 0.0
        if notice:
            log.info(
                "worker %s takes requests of late callers for %g s more (grace_period)", self._config.worker, notice
            )
            await asyncio.sleep(notice)

    async def _finish_requests(self) -> None:
        if not self._patient or self._stack.cut:
            return
        timeout = self._limits.drain_timeout
        self._drain_ends = time.monotonic() + timeout
        if not all(await asyncio.gather(*(served.drain(timeout) for served in self._served))):
            log.warning("worker %s ends requests that did not finish in time", self._config.worker)

    async def _close_endpoints(self) -> None:
        parts: list[AsyncResource] = [*self._served, *self._adapters]
        try:
            for part in parts:
                await part.aclose()
        except asyncio.CancelledError:
            # What was left open by being cut short; the requests have had their time.
            for part in parts:
                await part.aclose()
            raise

    async def _drain_engine(self) -> None:
        left = self._limits.drain_timeout
        if self._drain_ends is not None:
            left = min(left, max(self._drain_ends - time.monotonic(), MIN_DRAIN))
        begun = time.perf_counter()
        try:
            with self._in("drain"):
                async with asyncio.timeout(left):
                    await call_async(self._engine, "drain")
        finally:
            self._worker_metrics.drained(time.perf_counter() - begun)

    async def _clean_up(self) -> None:
        begun = time.perf_counter()
        try:
            with self._in("cleanup"):
                await call_async(self._engine, "cleanup")
        finally:
            seconds = time.perf_counter() - begun
            self._worker_metrics.cleaned_up(seconds)
            log.info("the engine of worker %s was cleaned up in %.3f s", self._config.worker, seconds)
            # Collectors of the engine may hold on to what is gone.
            self._metrics.unbridge()


def _checked(engine: LLMEngine, config: WorkerConfig, made: object) -> EngineConfig:
    """Return what `start` returned; refuses what no request could be served with."""
    engine_config = check_engine_config(engine, made)
    if not engine_config.model:
        raise BackendError.InvalidArgument("EngineConfig.model is empty")
    try:
        check_model_name(public_name(config, engine_config))
    except ValueError as error:
        raise ConfigError(f"workers.{config.worker}.model.name: {error}; give the model another name") from None
    if engine_config.model_input not in _MODEL_INPUTS:
        raise BackendError.InvalidArgument(
            f"EngineConfig.model_input is {engine_config.model_input!r}; it must be one of {', '.join(_MODEL_INPUTS)}"
        )
    return engine_config
