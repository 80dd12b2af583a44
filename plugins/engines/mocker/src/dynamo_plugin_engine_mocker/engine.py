"""`MockerEngine`: the engine contract over the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import ClassVar

from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EmbedOutput,
    EmbedRequest,
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    WorkerConfig,
)
from dynamo_core.contracts.engine import EMBED
from dynamo_core.contracts.metrics import CounterLike, GaugeLike, MetricsScope
from dynamo_core.tasks import TaskSet

from dynamo_plugin_engine_mocker.answers import Answers
from dynamo_plugin_engine_mocker.clock import Clock, MonotonicClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.embeddings import embedding
from dynamo_plugin_engine_mocker.scheduler import ActiveRequestGuard, Scheduler
from dynamo_plugin_engine_mocker.sequence import Sequence
from dynamo_plugin_engine_mocker.timing import step_time


class MockerEngine(LLMEngine):
    """Answers with random, echoed or scripted tokens at the pace of a real engine, on the CPU and without a model."""

    NAME: ClassVar[str] = "mocker"
    Config: ClassVar[type[PluginConfig]] = MockerConfig

    def __init__(self, config: PluginConfig, worker: WorkerConfig, *, clock: Clock | None = None) -> None:
        super().__init__(config, worker)
        self._settings = (
            config if isinstance(config, MockerConfig) else MockerConfig.model_validate(config.model_dump())
        )
        self._clock = clock or MonotonicClock()
        self._tasks = TaskSet()
        self._started = False
        self._refusal: str | None = "generate called before start"
        self._scheduler: Scheduler | None = None
        self._answers: Answers | None = None
        self._gauges: tuple[GaugeLike, GaugeLike] | None = None
        self._abort_counter: CounterLike | None = None
        #: Times `abort` was called.
        self.aborts = 0

    async def start(self, worker_id: int) -> EngineConfig:
        """Loads the tokenizer, prepares the answers and starts the step loop.

        Raises:
            BackendError.EngineShutdown: started before.
            BackendError.InvalidArgument: a role other than aggregated.
        """
        if self._started:
            raise BackendError.EngineShutdown("mocker backend already started")
        self._started = True
        if self.worker.disaggregation_mode is not DisaggregationMode.AGGREGATED:
            mode = self.worker.disaggregation_mode.value
            raise BackendError.InvalidArgument(f"the mocker has no disaggregation mode {mode!r}; set it to 'agg'")
        settings = self._settings
        ready = self._clock.time() + settings.startup_time
        self._answers = await asyncio.to_thread(Answers.load, settings, self.worker.model_path)
        await self._clock.sleep_until(ready)
        self._scheduler = Scheduler(
            clock=self._clock,
            step_time=step_time(settings),
            max_num_seqs=settings.max_num_seqs,
            kv_tokens=settings.num_gpu_blocks * settings.block_size,
            on_load=self._on_load,
        )
        self._tasks.spawn(self._scheduler.run(), name="mocker scheduler")
        self._refusal = None
        return EngineConfig(
            model=self.worker.model_name or "mocker-model",
            served_model_name=self.worker.served_model_name,
            context_length=settings.context_length,
            kv_cache_block_size=settings.block_size,
            total_kv_blocks=settings.num_gpu_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            capabilities=frozenset({EMBED}),
        )

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Streams the answer; each item holds everything produced since the one before.

        Raises:
            BackendError.InvalidArgument: an empty prompt, or one that leaves no room in the context.
            BackendError.EngineShutdown: not started, draining or cleaned up.
        """
        scheduler, sequence = self._prepare(request)
        create_future = asyncio.get_running_loop().create_future
        with ActiveRequestGuard(scheduler, sequence, ctx):
            while True:
                if sequence.produced == sequence.taken and not sequence.halted:
                    sequence.waiter = waiter = create_future()
                    await waiter
                if sequence.halted:
                    break
                output = sequence.take()
                if sequence.paused:
                    scheduler.resume(sequence)
                yield output
                if output.finish_reason is not None:
                    return
            if sequence.failure is not None:
                raise BackendError.EngineShutdown(sequence.failure)
            yield sequence.cancelled()

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        """One unit vector per input, without delay.

        Raises:
            BackendError.InvalidArgument: an input is empty or too long, or too many dimensions are asked for.
            BackendError.Cancelled: the request was stopped.
            BackendError.EngineShutdown: not started, draining or cleaned up.
        """
        if self._refusal is not None:
            raise BackendError.EngineShutdown(self._refusal.replace("generate", "embed"))
        if ctx.is_stopped():
            raise BackendError.Cancelled("the request was stopped")
        most = self._settings.embedding_dimensions
        dimensions = most if request.dimensions is None else request.dimensions
        if not 1 <= dimensions <= most:
            raise BackendError.InvalidArgument(f"dimensions must be from 1 to {most}, not {dimensions}")
        for token_ids in request.token_ids:
            self._check_length(len(token_ids), self._settings.context_length)
        return EmbedOutput(
            embeddings=[embedding(token_ids, dimensions) for token_ids in request.token_ids],
            prompt_tokens=sum(map(len, request.token_ids)),
        )

    async def abort(self, ctx: EngineContext) -> None:
        """Counts; the request's own stream gives its place back."""
        self.aborts += 1
        if self._abort_counter is not None:
            self._abort_counter.inc()

    async def drain(self) -> None:
        """Refuses new requests; those that run go on."""
        if self._refusal is None:
            self._refusal = "mocker backend is draining"

    async def cleanup(self) -> None:
        """Ends the step loop; streams that still run end with `EngineShutdown`."""
        self._refusal = "mocker backend was stopped"
        await self._tasks.aclose()
        if self._scheduler is not None:
            # The loop closes itself, unless it was cancelled before its first turn.
            self._scheduler.close(self._refusal)
            self._scheduler = None
        self._answers = None

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        """Registers the gauges of running and waiting requests and the counter of aborts."""
        running = metrics.gauge("dynamo_mocker_running_requests", "Requests that hold a slot of the mocker.").labels()
        waiting = metrics.gauge("dynamo_mocker_waiting_requests", "Requests that wait for a slot.").labels()
        aborts = metrics.counter("dynamo_mocker_aborted_requests", "Requests aborted by their client.").labels()
        self._gauges = running, waiting
        self._abort_counter = aborts
        if self._scheduler is not None:
            self._on_load(self._scheduler.running, self._scheduler.waiting)

    @property
    def running_requests(self) -> int:
        """Requests that hold a slot."""
        return self._scheduler.running if self._scheduler is not None else 0

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a slot."""
        return self._scheduler.waiting if self._scheduler is not None else 0

    def _prepare(self, request: PreprocessedRequest) -> tuple[Scheduler, Sequence]:
        if self._refusal is not None or self._scheduler is None or self._answers is None:
            raise BackendError.EngineShutdown(self._refusal or "mocker backend is not running")
        # The answer needs room for a token at least.
        self._check_length(len(request.token_ids), self._settings.context_length - 1)
        return self._scheduler, self._answers.sequence(request)

    def _check_length(self, tokens: int, most: int) -> None:
        if not tokens:
            raise BackendError.InvalidArgument("token_ids must not be empty")
        if tokens > most:
            raise BackendError.InvalidArgument(
                f"token_ids has {tokens} tokens, more than the {most} that fit into the model's context length of "
                f"{self._settings.context_length}"
            )

    def _on_load(self, running: int, waiting: int) -> None:
        if self._gauges is not None:
            self._gauges[0].set(running)
            self._gauges[1].set(waiting)
