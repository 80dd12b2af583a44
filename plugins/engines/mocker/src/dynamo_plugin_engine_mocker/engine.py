"""`MockerEngine`: the engine contract over the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import msgspec
from dynamo_core import (
    EMBED,
    PROGRESS,
    RERANK,
    SCORE,
    ActiveLoad,
    BackendError,
    CounterLike,
    DisaggregationMode,
    EmbedOutput,
    EmbedRequest,
    EngineConfig,
    EngineContext,
    GenerateContext,
    KvEventSource,
    LLMEngine,
    LLMEngineOutput,
    LoadSource,
    MetricsScope,
    PluginConfig,
    PrefillResult,
    PreprocessedRequest,
    RoutingHints,
    ScoreOutput,
    ScoreRequest,
    StopConditions,
    TaskSet,
    WorkerConfig,
)

from dynamo_plugin_engine_mocker.block_table import PrefixHashes
from dynamo_plugin_engine_mocker.bootstrap_rooms import BootstrapRooms
from dynamo_plugin_engine_mocker.clock import Clock, MonotonicClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.handoff import Handoff, cached_tokens, check_handoff
from dynamo_plugin_engine_mocker.rank import Rank
from dynamo_plugin_engine_mocker.scheduler import ActiveRequestGuard
from dynamo_plugin_engine_mocker.sequence import Sequence
from dynamo_plugin_engine_mocker.sequence_factory import SequenceFactory
from dynamo_plugin_engine_mocker.tokens.embeddings import embedding
from dynamo_plugin_engine_mocker.tokens.scores import scores


class MockerEngine(LLMEngine):
    """Answers with random, echoed or scripted tokens at the pace of a real engine, on the CPU and without a model.

    It plays every role. As a prefill worker it computes the prompt, makes the first token and hands over; as a decode
    worker it takes a prompt as computed, and makes the whole answer, the first token too.
    """

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
        self._ranks: list[Rank] = []
        self._sequences: SequenceFactory | None = None
        self._role = worker.disaggregation_mode
        self._rooms: BootstrapRooms | None = None
        self._abort_counter: CounterLike | None = None
        #: Times `abort` was called.
        self.aborts = 0

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the tokenizer, prepare the answers and start the step loop.

        Raises:
            BackendError.EngineShutdown: started before.
            BackendError.InvalidArgument: another prefill worker of this process has its bootstrap address.
        """
        if self._started:
            raise BackendError.EngineShutdown("mocker backend already started")
        self._started = True
        settings = self._settings
        prefill = self._role is DisaggregationMode.PREFILL
        host, port = settings.bootstrap_host, settings.bootstrap_port
        if prefill and host is not None and port is not None:
            port += self.worker.replica
            self._rooms = BootstrapRooms(host, port)
        ready = self._clock.time() + settings.startup_time
        self._sequences = await asyncio.to_thread(
            SequenceFactory.load, settings, self.worker.model_path, 1 if prefill else None
        )
        await self._clock.sleep_until(ready)
        self._ranks = [
            Rank(number, settings, worker_id=worker_id, clock=self._clock, tasks=self._tasks)
            for number in range(settings.data_parallel_size)
        ]
        for rank in self._ranks:
            self._tasks.spawn(rank.scheduler.run(), name=f"mocker scheduler {rank.number}")
        self._refusal = None
        return EngineConfig(
            model=self.worker.model_name or "mocker-model",
            served_model_name=self.worker.served_model_name,
            context_length=settings.context_length,
            kv_cache_block_size=settings.block_size,
            total_kv_blocks=settings.num_gpu_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            data_parallel_size=settings.data_parallel_size,
            bootstrap_host=host if self._rooms is not None else None,
            bootstrap_port=port if self._rooms is not None else None,
            capabilities=frozenset({PROGRESS}) if prefill else frozenset({EMBED, PROGRESS, RERANK, SCORE}),
        )

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Stream the answer; each item holds everything produced since the one before, or a chunk of it.

        Raises:
            BackendError.InvalidArgument: an empty prompt, one that leaves no room in the context or cannot fit into
                the KV cache, a token id that is no 32-bit number, a rank that is not there; for a decode worker also no
                prefill result, or that of another prompt.
            BackendError.Disconnected, BackendError.ConnectionTimeout: the prefill worker that this decode worker was
                to meet did not compute the prompt.
            BackendError.EngineShutdown: not started, draining or cleaned up.
        """
        rank, sequence, hashes = self._prepare(request, ctx)
        if sequence.prefilled and not await self._wait_for_prefill(request, ctx):
            yield sequence.cancelled()
            return
        scheduler = rank.scheduler
        create_future = asyncio.get_running_loop().create_future
        with self._serving_bootstrap(request, sequence), ActiveRequestGuard(scheduler, sequence, hashes, ctx):
            while True:
                while sequence.incomplete:
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

    def progress(self) -> int:
        """Return the steps of all ranks."""
        return sum(rank.scheduler.steps for rank in self._ranks)

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        """Return one unit vector per input, without delay.

        Raises:
            BackendError.InvalidArgument: an input is empty or too long, or too many dimensions are asked for.
            BackendError.Cancelled: the request was stopped.
            BackendError.EngineShutdown: not started, draining or cleaned up.
        """
        self._check_running("embed", ctx)
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

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        """Return the share of its query's words that each document has, without delay.

        Raises:
            BackendError.InvalidArgument: a pair does not fit into the context.
            BackendError.Cancelled: the request was stopped.
            BackendError.EngineShutdown: not started, draining or cleaned up.
        """
        tokenizer = self._check_running("score", ctx).tokenizer
        return await asyncio.to_thread(scores, request, tokenizer, self._settings.context_length)

    async def abort(self, ctx: EngineContext) -> None:
        """Count the abort; the request's own stream releases its slot."""
        self.aborts += 1
        if self._abort_counter is not None:
            self._abort_counter.inc()

    async def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        if self._refusal is None:
            self._refusal = "mocker backend is draining"

    async def cleanup(self) -> None:
        """End the step loop; streams that still run end with `EngineShutdown`."""
        self._refusal = "mocker backend was stopped"
        await self._tasks.aclose()
        for rank in self._ranks:
            # A loop closes itself, unless it was cancelled before its first turn.
            rank.scheduler.close(self._refusal)
        self._ranks = []
        self._sequences = None
        if self._rooms is not None:
            self._rooms.close()

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        """Register gauges and counters of every rank, and the counter of aborts."""
        self._abort_counter = metrics.counter(
            "dynamo_mocker_aborted_requests", "Requests that their caller cancelled."
        ).labels()
        for rank in self._ranks:
            rank.setup_metrics(metrics)

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return one per rank.

        None without prefix caching, where no block can be found again, and none of a decode worker. The cache of a
        decode worker saves no work: prompts are computed elsewhere.
        """
        if not self._settings.enable_prefix_caching or self._role is DisaggregationMode.DECODE:
            return []
        return [rank.kv_event_source() for rank in self._ranks]

    async def load_sources(self) -> list[LoadSource]:
        """Return one per rank."""
        return [rank.load_source() for rank in self._ranks]

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the default, but for a decode worker one with the prefill result that it needs."""
        if self._role is not DisaggregationMode.DECODE:
            return None
        probe = PreprocessedRequest(token_ids=[1], stop_conditions=StopConditions(max_tokens=1))
        probe.prefill_result = PrefillResult(disaggregated_params=Handoff.of(probe, "probe", 0).params())
        payload: dict[str, Any] = msgspec.to_builtins(probe)
        return payload

    @property
    def running_requests(self) -> int:
        """Requests that hold a slot, on all ranks."""
        return sum(rank.scheduler.running for rank in self._ranks)

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for a slot, on all ranks."""
        return sum(rank.scheduler.waiting for rank in self._ranks)

    @property
    def loads(self) -> list[ActiveLoad]:
        """The load of each rank."""
        return [rank.load for rank in self._ranks]

    def _check_running(self, call: str, ctx: GenerateContext) -> SequenceFactory:
        if self._refusal is not None or self._sequences is None:
            raise BackendError.EngineShutdown(
                (self._refusal or "mocker backend is not running").replace("generate", call)
            )
        if ctx.is_stopped():
            raise BackendError.Cancelled("the request was stopped")
        return self._sequences

    def _prepare(
        self, request: PreprocessedRequest, ctx: GenerateContext
    ) -> tuple[Rank, Sequence, PrefixHashes | None]:
        if self._refusal is not None or self._sequences is None:
            raise BackendError.EngineShutdown(self._refusal or "mocker backend is not running")
        settings = self._settings
        prompt = request.token_ids
        # The answer needs room for a token at least.
        self._check_length(len(prompt), settings.context_length - 1)
        blocks = -(-len(prompt) // settings.block_size)
        if blocks > settings.num_gpu_blocks:
            raise BackendError.InvalidArgument(
                f"token_ids needs {blocks} KV blocks of {settings.block_size} tokens, more than the "
                f"{settings.num_gpu_blocks} there are"
            )
        rank = self._select_rank(request)
        sequence = self._sequences.sequence(request)
        if self._role is DisaggregationMode.PREFILL:
            sequence.handoff = Handoff.of(request, ctx.attempt_id, rank.number).params()
        elif self._role is DisaggregationMode.DECODE:
            if request.prefill_result is not None:
                check_handoff(request)
            elif request.bootstrap_info is None:
                raise BackendError.InvalidArgument(
                    "prefill_result is missing: this is a decode worker, which needs that of a prefill worker"
                )
            sequence.prefilled = True
            sequence.cached_tokens = cached_tokens(request)
        return rank, sequence, self._hashes(request, sequence)

    def _serving_bootstrap(self, request: PreprocessedRequest, sequence: Sequence) -> AbstractContextManager[None]:
        """Wrap the prefill of a prompt: notify the decode worker that waits for it."""
        if self._rooms is None or request.bootstrap_info is None:
            return nullcontext()
        return self._rooms.hosting(request.bootstrap_info.bootstrap_room, sequence)

    @staticmethod
    async def _wait_for_prefill(request: PreprocessedRequest, ctx: GenerateContext) -> bool:
        """Wait for the prefill of the prompt, if that is under way in this process; False if stopped before."""
        where = request.bootstrap_info
        if request.prefill_result is not None or where is None:
            return True
        rooms = BootstrapRooms.find(where.bootstrap_host, where.bootstrap_port)
        return rooms is None or await rooms.wait_for_prefill(where.bootstrap_room, ctx)

    def _select_rank(self, request: PreprocessedRequest) -> Rank:
        wanted = request.routing.dp_rank if request.routing is not None else None
        if wanted is None:
            return min(self._ranks, key=lambda rank: rank.requests)
        if not 0 <= wanted < len(self._ranks):
            raise BackendError.InvalidArgument(
                f"routing.dp_rank is {wanted}, but the ranks are 0 to {len(self._ranks) - 1}"
            )
        return self._ranks[wanted]

    def _hashes(self, request: PreprocessedRequest, sequence: Sequence) -> PrefixHashes | None:
        settings = self._settings
        if not settings.enable_prefix_caching:
            return None
        hints = request.routing or RoutingHints()
        try:
            return PrefixHashes(
                request.token_ids, sequence.tokens, settings.block_size, hints.lora_name, hints.cache_salt
            )
        except OverflowError:
            raise BackendError.InvalidArgument("token_ids holds a number that is no token id of 32 bits") from None

    def _check_length(self, tokens: int, most: int) -> None:
        if not tokens:
            raise BackendError.InvalidArgument("token_ids must not be empty")
        if tokens > most:
            raise BackendError.InvalidArgument(
                f"token_ids has {tokens} tokens, more than the {most} that fit into the model's context length of "
                f"{self._settings.context_length}"
            )
