"""The bench: an engine under test, made on first use, with requests for it and time limits."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any, TypeAlias

import msgspec
from dynamo_core.contracts.duck_typed_engine import EngineLike, as_engine
from dynamo_core.contracts.engine import DisaggregationMode, EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.engine_boundary import ContractViolation, call_async, check_engine_config, defined_at
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.request import PrefillResult, PreprocessedRequest, SamplingOptions, StopConditions
from dynamo_runtime.worker.model_files import read_files
from dynamo_runtime.worker.stream_validator import vocabulary_of
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.engine.bounded_calls import told, within
from dynamo_testing.engine.failures import EmptyModelInConfig, MetricsFailed, StartFailed
from dynamo_testing.engine.streams import Reading, check_answer

#: Makes a fresh engine that has not been started: any object with the methods of an engine. Called more than once.
EngineFactory: TypeAlias = Callable[[], EngineLike | Awaitable[EngineLike]]
#: What an engine that decodes is given: the fields of a `PrefillResult`, or a function that makes it for a request.
Prefill: TypeAlias = Mapping[str, Any] | Callable[[PreprocessedRequest], PrefillResult | Awaitable[PrefillResult]]
#: What most engines that decode can make nothing of, and some need not.
NOTHING_PREFILLED: Mapping[str, Any] = {"disaggregated_params": {}}

#: What a request asks for that is to be stopped.
MANY_TOKENS = 10_000
#: As a worker labels the metrics of its engine.
_LABELS = {
    "dynamo_namespace": "dynamo",
    "dynamo_component": "backend",
    "dynamo_endpoint": "generate",
    "worker": "conformance-0",
}
#: What a prompt of text says, for engines that take the client's body.
_TEXT = "Hello!"


def adopted(engine: EngineLike) -> LLMEngine:
    """Return what a factory made, as an engine of the framework.

    Raises:
        ConfigError: it lacks a method that an engine needs.
    """
    worker = getattr(engine, "worker", None)
    return as_engine(engine, worker if isinstance(worker, WorkerConfig) else WorkerConfig())


class Skipped(Exception):
    """A check does not apply to this engine; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The requests to the engine, and their time limits. Times in seconds."""

    #: The prompt.
    token_ids: Sequence[int] = (1, 2, 3)
    prefill_result: Prefill = field(default_factory=lambda: NOTHING_PREFILLED)
    start_timeout: float = 120.0
    #: For one request, and for anything else that is asked of a running engine.
    request_timeout: float = 60.0
    #: From the moment in which a request is stopped to the end of its stream.
    cancel_timeout: float = 2.0
    cleanup_timeout: float = 30.0


class Bench:
    """One engine from its factory to its cleanup."""

    def __init__(self, factory: EngineFactory, plan: Plan) -> None:
        self._factory = factory
        self._engine: LLMEngine | None = None
        self._inner: object = None
        self._ids = count(1)
        self._equipped = False
        #: How many token ids the model has; None if the engine does not tell.
        self._vocabulary: int | None = None
        #: Whether the engine has had its cleanup.
        self.cleaned = False
        self.plan = plan
        self.config: EngineConfig | None = None
        #: What it registers its metrics with.
        self.metrics = Metrics()
        #: The ranks whose cache events are listened to; None before that was tried.
        self.cache_ranks: list[int] | None = None
        #: Cache events as they were told: the rank of the source, the event, whether in the loop's thread.
        self.heard: list[tuple[int, Any, bool]] = []

    @property
    def engine_name(self) -> str:
        """The class of the engine, once it has been made."""
        return type(self._inner).__name__ if self._engine is not None else ""

    @property
    def mode(self) -> DisaggregationMode:
        """The engine's own role; aggregated until it has been made."""
        worker = getattr(self._engine, "worker", None)
        # An engine may have a constructor of its own that keeps nothing.
        return worker.disaggregation_mode if isinstance(worker, WorkerConfig) else DisaggregationMode.AGGREGATED

    async def fresh(self) -> LLMEngine:
        """Return another engine, not started; its caller cleans it up.

        Raises:
            StartFailed: the factory failed.
            ConfigError: the engine cannot be made with these settings, or is none.
            ValueError: the factory gave an engine out twice.
        """
        try:
            made = self._factory()
            inner = await made if inspect.isawaitable(made) else made
        except ConfigError:
            raise
        except Exception as error:
            raise StartFailed(f"the factory {told(error)}") from error
        if self._inner is inner:
            raise ValueError("the engine factory must make a fresh engine every time, and gave one out twice")
        self._inner = inner
        return adopted(inner)

    async def started(self) -> LLMEngine:
        """Return the engine, started.

        Raises:
            StartFailed: it could not be made or started.
            EmptyModelInConfig: it names no model.
        """
        if self._engine is None:
            self._engine = await self.fresh()
        engine = self._engine
        if self.config is not None:
            return engine
        try:
            config = await within(call_async(engine, "start", 0), self.plan.start_timeout)
        except ContractViolation as fault:
            raise StartFailed(str(fault)) from fault
        except Exception as error:
            raise StartFailed(f"start {told(error)}") from error
        try:
            config = check_engine_config(engine, config)
        except ContractViolation as fault:
            raise StartFailed(str(fault)) from fault
        if not str(config.model or "").strip():
            raise EmptyModelInConfig(f"EngineConfig.model is {config.model!r}{defined_at(engine, 'start')}")
        self.config = config
        self._vocabulary = self._vocabulary_of()
        return engine

    async def running(self) -> tuple[LLMEngine, EngineConfig]:
        """Return the engine, started and with its metrics set up, and what it says of itself. Raise as `started` does.

        Raises:
            MetricsFailed: its metrics could not be registered.
        """
        engine = await self.started()
        if not self._equipped:
            scope = self.metrics.scope(
                dynamo_namespace="dynamo",
                dynamo_component="backend",
                dynamo_endpoint="generate",
                worker="conformance-0",
            )
            try:
                await within(call_async(engine, "setup_metrics", scope), self.plan.request_timeout)
            except Exception as error:
                raise MetricsFailed(f"setup_metrics {told(error)}") from error
            self._equipped = True
        assert self.config is not None
        return engine, self.config

    @property
    def text(self) -> bool:
        """Whether the engine answers with texts."""
        return self.config is not None and self.config.model_input == "text"

    @property
    def any_prompt(self) -> bool:
        """Whether prompts of any length can be asked with; what was prefilled once is of one prompt."""
        return self.mode is not DisaggregationMode.DECODE or callable(self.plan.prefill_result)

    def check(self, reading: Reading, mode: DisaggregationMode | None = None) -> str:
        """Return what a whole answer looked like; `mode` in place of the engine's own role.

        Raises:
            ConformanceFailure: it was none.
        """
        return check_answer(reading, mode or self.mode, vocabulary=self._vocabulary, text=self.text)

    def context(self) -> EngineContext:
        """Return a context with an id of its own."""
        return EngineContext(f"conformance-{next(self._ids)}")

    async def request(
        self, *, max_tokens: int | None = None, prompt: int | None = None, ignore_eos: bool = False
    ) -> PreprocessedRequest:
        """Return a request as the framework sends it to an engine of this role.

        `prompt` is its length, the plan's if None.
        """
        if self.mode is DisaggregationMode.PREFILL:
            # As every sender to a prefill worker does.
            max_tokens = 1
        tokens = list(self.plan.token_ids if prompt is None else islice(cycle(self.plan.token_ids), prompt))
        request = PreprocessedRequest(
            model=self.config.model if self.config is not None else "",
            token_ids=tokens,
            stop_conditions=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
            sampling_options=SamplingOptions(temperature=0.0),
        )
        if self.mode is DisaggregationMode.DECODE:
            request.prefill_result = await self._prefilled(request)
        if self.text:
            request.body = self._body(request)
        return request

    async def long_request(self) -> PreprocessedRequest:
        """Return a request whose answer outlasts what is to happen to it, if the engine can make one so long."""
        limit = MANY_TOKENS
        if self.config is not None and self.config.context_length is not None:
            limit = max(1, min(limit, self.config.context_length - len(self.plan.token_ids)))
        return await self.request(max_tokens=limit, ignore_eos=True)

    async def aclose(self) -> str:
        """Clean the engine up, if nothing has; what went wrong, in words."""
        engine = self._engine
        if engine is None or self.cleaned:
            return ""
        self.cleaned = True
        try:
            await within(call_async(engine, "cleanup"), self.plan.cleanup_timeout)
        except Exception as error:
            return f"cleanup {told(error)}"
        return ""

    def _vocabulary_of(self) -> int | None:
        worker = getattr(self._engine, "worker", None)
        if not isinstance(worker, WorkerConfig) or self.text:
            return None
        try:
            return vocabulary_of(read_files(worker))
        except ConfigError:
            # An engine that knows its model by another way than a folder here.
            return None

    async def _prefilled(self, request: PreprocessedRequest) -> PrefillResult:
        given = self.plan.prefill_result
        if not callable(given):
            return msgspec.convert(dict(given), PrefillResult)
        made = given(request)
        return await made if inspect.isawaitable(made) else made

    def _body(self, request: PreprocessedRequest) -> dict[str, Any]:
        worker = getattr(self._engine, "worker", None)
        body: dict[str, Any] = {"model": request.model}
        if not isinstance(worker, WorkerConfig) or "chat" in worker.endpoint_types:
            body["messages"] = [{"role": "user", "content": _TEXT}]
        else:
            body["prompt"] = _TEXT
        if request.stop_conditions.max_tokens is not None:
            body["max_tokens"] = request.stop_conditions.max_tokens
        return body
