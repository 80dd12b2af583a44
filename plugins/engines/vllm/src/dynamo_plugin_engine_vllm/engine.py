"""`VllmEngine`: the engine contract over vLLM's `AsyncLLM`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from dynamo_core import (
    EMBED,
    GUIDED,
    MULTI_CHOICE,
    PROGRESS,
    RERANK,
    SCORE,
    BackendError,
    DisaggregationMode,
    DynamoError,
    EmbedOutput,
    EmbedRequest,
    EngineConfig,
    GenerateContext,
    KvEvent,
    KvEventSource,
    LLMEngine,
    LLMEngineOutput,
    LoadSource,
    MetricsScope,
    PluginConfig,
    PreprocessedRequest,
    ScoreOutput,
    ScoreRequest,
    TaskSet,
    WorkerConfig,
    invalid_argument,
)
from dynamo_core.errors import ConfigError

from dynamo_plugin_engine_vllm import arguments, handoff, library
from dynamo_plugin_engine_vllm.child_processes import ChildProcesses
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.events import EventTranslator
from dynamo_plugin_engine_vllm.library import Library
from dynamo_plugin_engine_vllm.load import Rank, least_loaded, ranks_of, stat_logger
from dynamo_plugin_engine_vllm.output_stream import OutputStream, result_or_error
from dynamo_plugin_engine_vllm.outputs import OutputConverter
from dynamo_plugin_engine_vllm.sampling import sampling_args, takes_structural_tags
from dynamo_plugin_engine_vllm.scoring import Scorer
from dynamo_plugin_engine_vllm.side_channel import side_channel
from dynamo_plugin_engine_vllm.subscription import EventSequencer, follow

#: Seconds between two looks at whether vLLM's processes live, while no request would notice.
WATCH_INTERVAL = 0.5
#: Seconds beyond `shutdown_timeout` that the shutdown may take in all.
_SHUTDOWN_MARGIN = 10.0
#: Seconds for streams that still run at the end to be told so.
_LAST_OUTPUTS = 2.0

log = logging.getLogger(__name__)


class VllmEngine(LLMEngine):
    """Answers with vLLM, in every role."""

    NAME: ClassVar[str] = "vllm"
    Config: ClassVar[type[PluginConfig]] = VllmConfig

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        """Raise ConfigError if vLLM is not installed, or no model is named."""
        super().__init__(config, worker)
        library.check_installed()
        if worker.model_path is None:
            name = worker.worker or "NAME"
            raise ConfigError(f"workers.{name}.model.path is missing: engine vllm needs the folder of a model")
        self._settings = config if isinstance(config, VllmConfig) else VllmConfig.model_validate(config.model_dump())
        self._role = worker.disaggregation_mode
        self._tasks = TaskSet()
        self._started = False
        self._refusal: str | None = "generate called before start"
        self._death: asyncio.Event = asyncio.Event()
        self._children: ChildProcesses | None = None
        self._building: asyncio.Task[tuple[Any, Exception | None]] | None = None
        self._library: Library | None = None
        self._scorer: Scorer | None = None
        self._engine: Any = None
        self._ranks: dict[int, Rank] = {}
        self._first_rank = 0
        self._context_length = 0
        self._block_size = 0
        self._defaults: dict[str, Any] = {}
        self._guided_backend = "auto"
        self._endpoints: arguments.Endpoints | None = None
        self._traced = False
        self._numbers = itertools.count()
        #: What runs, by vLLM's names of the requests.
        self._streams: dict[str, OutputStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, worker_id: int) -> EngineConfig:
        """Import vLLM, start its processes and load the model.

        Raises:
            BackendError.EngineShutdown: started before; or vLLM cannot be imported, or did not start.
            BackendError.InvalidArgument: `args` has a name that this vLLM does not know.
        """
        if self._started:
            raise BackendError.EngineShutdown("vllm engine already started")
        self._started = True
        self._library = library_ = await asyncio.to_thread(library.load)
        self._children = children = await asyncio.to_thread(ChildProcesses)
        make, environment = self._engine_factory(library_, children)
        # Kept, for a start that is cut short leaves a thread that goes on.
        building = result_or_error(asyncio.to_thread(children.build, make, environment))
        self._building = self._tasks.spawn(building, name="start vLLM")
        engine, error = await asyncio.shield(self._building)
        if isinstance(error, DynamoError):
            raise error
        if error is not None:
            raise BackendError.EngineShutdown(f"vLLM did not start: {error}", cause=error) from error
        self._engine = engine
        tasks = await engine.get_supported_tasks()
        if "generate" not in tasks and self._role is DisaggregationMode.AGGREGATED:
            self._scorer = await asyncio.to_thread(Scorer.load, engine, tasks, self.worker.custom_jinja_template)
        config = self._engine_config(engine.vllm_config, worker_id, frozenset(tasks))
        self._tasks.spawn(self._watch_processes(), name="watch vLLM")
        self._refusal = None
        return config

    def _engine_factory(self, library_: Library, children: ChildProcesses) -> tuple[Callable[[], Any], dict[str, str]]:
        """Return a function that makes the engine, and the environment of its processes."""
        settings, worker = self._settings, self.worker
        known = library_.AsyncEngineArgs.__dataclass_fields__
        given = arguments.engine_arguments(settings, worker, on_cpu=library_.on_cpu, known=known)
        endpoints = arguments.Endpoints.in_folder(children.folder)
        events = arguments.events_arguments(settings, worker, endpoints)
        transfer = arguments.transfer_arguments(settings, worker, on_cpu=library_.on_cpu)
        environment: dict[str, str] = {}
        if transfer is not None:
            environment = side_channel(
                settings.nixl_host, settings.nixl_port, replica=worker.replica, ranks=settings.data_parallel_size
            )
        self._endpoints = endpoints if events is not None else None
        # It outlives the engine in vLLM's own registries; the engine itself must not.
        logger = stat_logger(library_.StatLoggerBase, partial(_record, self._ranks))

        def make() -> Any:
            if events is not None:
                given["kv_events_config"] = library_.KVEventsConfig(**events)
            if transfer is not None:
                given["kv_transfer_config"] = library_.KVTransferConfig(**transfer)
            engine_args = library_.AsyncEngineArgs(**arguments.with_config_objects(given, known))
            return library_.AsyncLLM.from_engine_args(engine_args, stat_loggers=[logger])

        return make, environment

    def _engine_config(self, config: Any, worker_id: int, tasks: frozenset[str]) -> EngineConfig:
        """Read the properties that vLLM determined for the model and the machine."""
        cache, scheduler, parallel = config.cache_config, config.scheduler_config, config.parallel_config
        numbers = ranks_of(parallel)
        # vLLM adds up the blocks of all ranks.
        blocks = (cache.num_gpu_blocks or 0) // len(numbers)
        self._first_rank = numbers.start
        self._ranks.update({number: Rank(number, worker_id, blocks) for number in numbers})
        self._context_length = config.model_config.max_model_len
        self._block_size = cache.block_size
        self._defaults = dict(config.model_config.get_diff_sampling_param())
        self._guided_backend = getattr(config.structured_outputs_config, "backend", "auto")
        self._traced = config.observability_config.otlp_traces_endpoint is not None
        capabilities = {PROGRESS}
        if "embed" in tasks and self._role is DisaggregationMode.AGGREGATED:
            capabilities.add(EMBED)
        if self._scorer is not None:
            capabilities |= {SCORE, RERANK}
        generates = "generate" in tasks
        if generates and takes_structural_tags(config.structured_outputs_config):
            capabilities.add(GUIDED)
        if generates and self._role is DisaggregationMode.AGGREGATED:
            capabilities.add(MULTI_CHOICE)
        if not generates:
            self._endpoints = None
        return EngineConfig(
            model=self.worker.model_name or str(self.worker.model_path),
            served_model_name=self.worker.served_model_name,
            context_length=self._context_length,
            kv_cache_block_size=self._block_size if generates else None,
            total_kv_blocks=blocks or None,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            data_parallel_size=len(numbers),
            data_parallel_start_rank=numbers.start,
            capabilities=frozenset(capabilities),
        )

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Stream the answer; each item holds everything that vLLM has given since the one before.

        Raises:
            BackendError.InvalidArgument: a prompt or an option that vLLM, or this engine, does not take.
            BackendError.EngineShutdown: not started, draining, cleaned up, or vLLM's processes have died.
            BackendError.Disconnected: the KV cache did not come from the prefill worker.
        """
        engine = self._require_engine("generate")
        rank = self._select_rank(request)
        params, converter = self._sampling_params(request)
        if ctx.is_stopped() and self._role is not DisaggregationMode.DECODE:
            # A decode worker fetches the cache all the same, so that the prefill worker can let go of it.
            yield converter.cancelled()
            return
        key = f"{ctx.attempt_id}-{next(self._numbers)}"
        with self._translate_errors(), rank.request(len(request.token_ids)) as request_load:
            outputs = OutputStream(
                engine.generate(self._prompt(request), params, key, **self._generate_options(request, rank, ctx)),
                abort=partial(engine.abort, key),
                tasks=self._tasks,
                # Until it has come, vLLM may still be receiving the KV cache: an abort now can end its processes.
                hold=self._role is DisaggregationMode.DECODE,
            )
            self._streams[key] = outputs
            self._idle.clear()
            try:
                with outputs.stopped_by(ctx):
                    async for output in outputs:
                        request_load.prefilled()
                        for item in converter.items(output):
                            if ctx.is_stopped():
                                break
                            if item.finish_reason is not None:
                                self._finish(item, output)
                            yield item
                        if ctx.is_stopped():
                            break
                        if output.finished:
                            return
                if not ctx.is_stopped():
                    raise BackendError.EngineShutdown(self._refusal or "vLLM ended a stream too soon")
                yield converter.cancelled()
            finally:
                del self._streams[key]
                if not self._streams:
                    self._idle.set()
                await outputs.aclose()

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        """Return one vector per input.

        Raises:
            BackendError.InvalidArgument: an input is empty or too long, or vLLM does not take `dimensions`.
            BackendError.Cancelled: the request was stopped.
            BackendError.EngineShutdown: as for `generate`.
        """
        self._check_running("embed", ctx)
        library_ = self._require_library()
        with _as_invalid_argument():
            params = library_.PoolingParams(task="embed", dimensions=request.dimensions)
        if not all(request.token_ids):
            raise invalid_argument("token_ids must not be empty")
        inputs = [(library_.tokens_input(token_ids), params) for token_ids in request.token_ids]
        outputs = await self._pool("embed", inputs, ctx)
        return EmbedOutput(
            embeddings=[output.outputs.data.tolist() for output in outputs],
            prompt_tokens=sum(map(len, request.token_ids)),
        )

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        """Return one score per document: that of a cross-encoder, or the likeness of embeddings.

        Raises:
            BackendError.InvalidArgument: a text is too long, or a limit is one that vLLM does not take.
            BackendError.Cancelled: the request was stopped.
            BackendError.EngineShutdown: as for `generate`.
        """
        self._check_running("score", ctx)
        scorer = self._scorer
        if scorer is None:
            return await super().score(request, ctx)
        with _as_invalid_argument():
            context = await scorer.render(request)
        inputs = [(each["prompts"], each["params"]) for each in context.engine_inputs]
        outputs = await self._pool("score", inputs, ctx)
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return ScoreOutput(scores=await asyncio.to_thread(scorer.scores, context, outputs), prompt_tokens=tokens)

    async def _pool(self, call: str, inputs: Sequence[tuple[Any, Any]], ctx: GenerateContext) -> list[Any]:
        """Return vLLM's output for each prompt with its parameters, all of them at once."""

        async def pooled(prompt: Any, params: Any) -> Any:
            key = f"{ctx.attempt_id}-{next(self._numbers)}"
            with self._translate_errors():
                async for output in self._require_engine(call).encode(prompt, params, key):
                    if output.finished:
                        return output
            raise BackendError.StreamIncomplete("vLLM ended a request without a result")

        jobs = [self._tasks.spawn(result_or_error(pooled(*each)), name=f"{call} for {ctx.id}") for each in inputs]

        def stop() -> None:
            for job in jobs:
                job.cancel()

        forget = ctx.on_stop(stop)
        try:
            made = await asyncio.gather(*jobs)
        except asyncio.CancelledError:
            if ctx.is_stopped():
                raise BackendError.Cancelled("the request was stopped") from None
            raise
        finally:
            forget()
            stop()
        for _, error in made:
            if error is not None:
                raise error
        return [output for output, _ in made]

    async def died(self) -> str:
        """Return when vLLM's processes have died."""
        await self._death.wait()
        return self._refusal or "vLLM's processes have died"

    async def drain(self) -> None:
        """Refuse new requests; those that run go on."""
        if self._refusal is None:
            self._refusal = "the vLLM engine is draining"

    async def cleanup(self) -> None:
        """End vLLM and all its processes; streams that still run end with `EngineShutdown`."""
        if not self._death.is_set():
            self._refusal = "the vLLM engine was stopped"
        children, self._children = self._children, None
        building, self._building = self._building, None
        engine, self._engine = self._engine, None
        if engine is None and building is not None:
            engine = await self._cancel_start(building, children)
        if engine is not None:
            await self._end_streams(engine)
        await self._tasks.aclose()
        if engine is not None:
            await self._shut_down(engine)
            # vLLM complains of an engine that is left to the end of the interpreter.
            del engine
        self._ranks.clear()
        if children is not None:
            left = await asyncio.to_thread(children.kill)
            if left:
                log.warning("%d processes of vLLM did not end by themselves and were killed", left)
            await asyncio.to_thread(children.close)

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        """Register gauges and counters of every rank, and show those of vLLM itself."""
        for rank in self._ranks.values():
            rank.setup_metrics(metrics)
        if self._library is not None and metrics.registry is not self._library.registry:
            metrics.bridge(self._library.registry, prefixes=["vllm:"])

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return one per rank. None without prefix caching, for a decode worker, and if routing by cache is off."""
        if self._engine is None or self._endpoints is None:
            return []
        published = self._engine.get_kv_event_sources()
        sources = []
        for number in self._ranks:
            where = published.get(number)
            if where is None:
                log.warning("vLLM does not say where rank %d publishes its KV events", number)
                continue
            subscribe = partial(self._subscribe, number, where.endpoint, where.replay_endpoint)
            sources.append(KvEventSource(number, subscribe))
        return sources

    def progress(self) -> int:
        """Return the steps of all ranks, from vLLM's statistics."""
        return sum(rank.steps for rank in self._ranks.values())

    async def load_sources(self) -> list[LoadSource]:
        """Return one per rank."""
        return [rank.source() for rank in self._ranks.values()]

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the default, but for a decode worker one that it computes itself."""
        if self._role is not DisaggregationMode.DECODE:
            return None
        return {
            "token_ids": [1],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            "prefill_result": {"disaggregated_params": handoff.outgoing(None)},
        }

    # From a request to the arguments of vLLM.

    def _sampling_params(self, request: PreprocessedRequest) -> tuple[Any, OutputConverter]:
        """Return vLLM's sampling parameters, and the converter of its outputs."""
        library_ = self._require_library()
        args = sampling_args(
            request,
            defaults=self._defaults,
            context_length=self._context_length,
            role=self._role,
            guided_backend=self._guided_backend,
        )
        transfer, cached = None, None
        if self._role is DisaggregationMode.PREFILL:
            transfer = handoff.PREFILL_PARAMS
        elif self._role is DisaggregationMode.DECODE:
            transfer, cached = handoff.incoming(request), handoff.cached_tokens(request)
        with _as_invalid_argument():
            guide = library_.StructuredOutputsParams(**args.guided) if args.guided is not None else None
            params = library_.SamplingParams(
                **args.params,
                structured_outputs=guide,
                # Text is the frontend's work.
                detokenize=False,
                output_kind=library_.delta,
                extra_args={handoff.KEY: transfer} if transfer is not None else None,
            )
            if args.bad_words_token_ids:
                # vLLM makes them of words; we have no words.
                params._bad_words_token_ids = args.bad_words_token_ids
        return params, OutputConverter(request, cached)

    def _prompt(self, request: PreprocessedRequest) -> Any:
        salt = request.routing.cache_salt if request.routing is not None else None
        return self._require_library().tokens_input(request.token_ids, cache_salt=salt)

    def _generate_options(self, request: PreprocessedRequest, rank: Rank, ctx: GenerateContext) -> dict[str, Any]:
        """Return the arguments of `AsyncLLM.generate` beside the prompt and the parameters."""
        options: dict[str, Any] = {}
        if len(self._ranks) > 1:
            options["data_parallel_rank"] = rank.number - self._first_rank
        if request.routing is not None and request.routing.priority:
            # To vLLM a low number is urgent, to our clients a high one.
            options["priority"] = -request.routing.priority
        if self._traced:
            options["trace_headers"] = dict(ctx.metadata)
        return options

    def _select_rank(self, request: PreprocessedRequest) -> Rank:
        wanted = request.routing.dp_rank if request.routing is not None else None
        if wanted is None:
            return least_loaded([*self._ranks.values()])
        rank = self._ranks.get(wanted)
        if rank is None:
            known = ", ".join(map(str, self._ranks))
            raise invalid_argument(f"routing.dp_rank is {wanted}, but the ranks here are {known}")
        return rank

    def _finish(self, item: LLMEngineOutput, output: Any) -> None:
        if item.finish_reason == "cancelled":
            # The request was not stopped: the engine ends.
            raise BackendError.EngineShutdown(self._refusal or "vLLM gave the request up")
        if self._role is DisaggregationMode.PREFILL:
            item.disaggregated_params = handoff.outgoing(output.kv_transfer_params)

    # Errors and the end.

    def _require_engine(self, call: str) -> Any:
        if self._refusal is not None or self._engine is None:
            refusal = self._refusal or "the vLLM engine does not run"
            raise BackendError.EngineShutdown(refusal.replace("generate", call))
        return self._engine

    def _check_running(self, call: str, ctx: GenerateContext) -> None:
        self._require_engine(call)
        if ctx.is_stopped():
            raise BackendError.Cancelled("the request was stopped")

    def _require_library(self) -> Library:
        if self._library is None:
            raise BackendError.EngineShutdown("the vLLM engine does not run")
        return self._library

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Wrap calls of vLLM: translate its errors to ours."""
        try:
            yield
        except (DynamoError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            known = self._require_library()
            if isinstance(error, known.EngineDeadError):
                self._mark_dead()
                raise BackendError.EngineShutdown(self._refusal or "vLLM's processes have died", cause=error) from error
            if isinstance(error, known.ClientError):
                raise BackendError.InvalidArgument(str(error), cause=error) from error
            raise

    def _mark_dead(self) -> None:
        if not self._death.is_set():
            self._refusal = "vLLM's processes have died"
            self._death.set()

    async def _watch_processes(self) -> None:
        """Poll whether vLLM's processes live: vLLM sends no notification."""
        while self._engine is not None and not self._engine.errored:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(WATCH_INTERVAL)
        if self._engine is not None:
            self._mark_dead()

    @staticmethod
    async def _cancel_start(
        building: asyncio.Task[tuple[Any, Exception | None]], children: ChildProcesses | None
    ) -> Any:
        """Cancel a start under way; return the engine if it came up all the same."""
        if children is not None and not building.done():
            # Without its processes the thread that waits for them gives up.
            await asyncio.to_thread(children.kill)
        try:
            async with asyncio.timeout(_SHUTDOWN_MARGIN):
                return (await asyncio.shield(building))[0]
        except TimeoutError:
            return None

    async def _end_streams(self, engine: Any) -> None:
        """End all running streams: each gets a last output, and fails with the refusal."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LAST_OUTPUTS):
                await engine.abort([*self._streams])
                await self._idle.wait()

    async def _shut_down(self, engine: Any) -> None:
        handler = getattr(engine, "output_handler", None)
        if handler is not None:
            # It would report the end of the processes as a failure.
            handler.cancel()
        try:
            async with asyncio.timeout(self._settings.shutdown_timeout + _SHUTDOWN_MARGIN):
                await asyncio.to_thread(engine.shutdown, self._settings.shutdown_timeout)
        except TimeoutError:
            log.warning("vLLM did not shut down in time")
        except Exception:
            log.exception("vLLM could not be shut down in order")

    def _subscribe(self, number: int, endpoint: str, replay: str, emit: Callable[[KvEvent], None]) -> None:
        sequencer = EventSequencer(number, EventTranslator(self._block_size), emit)
        following = follow(self._require_library().zmq, endpoint, replay, sequencer)
        self._tasks.spawn(following, name=f"KV events of rank {number}")


@contextlib.contextmanager
def _as_invalid_argument() -> Iterator[None]:
    """Wrap the making of vLLM's parameters: an error there is the request's fault."""
    try:
        yield
    except DynamoError:
        raise
    except Exception as error:
        # vLLM's own errors, those of its checks of types, and of libraries that it asks.
        raise BackendError.InvalidArgument(str(error), cause=error) from error


def _record(ranks: dict[int, Rank], number: int, stats: Any) -> None:
    rank = ranks.get(number)
    if rank is not None:
        rank.record(stats)
