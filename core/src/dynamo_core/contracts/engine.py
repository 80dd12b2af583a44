"""The engine contract: what a third party implements to serve a model.

The life cycle: the constructor (cheap, no heavy imports), `start` once, `generate` concurrently for every request,
`drain` once when the worker is to stop, `cleanup` exactly once. `cleanup` must be safe twice, after a `start` that
failed or was cancelled, and without any `start`.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.requests.context import EngineContext, GenerateContext
from dynamo_core.errors import BackendError, NotSupported
from dynamo_core.protocol.events import ActiveLoad, KvEvent
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest


class DisaggregationMode(enum.StrEnum):
    """The role of a worker: whole inference, or one half of it."""

    AGGREGATED = "agg"
    PREFILL = "prefill"
    DECODE = "decode"

    @classmethod
    def _missing_(cls, value: object) -> DisaggregationMode | None:
        if isinstance(value, str):
            text = value.strip().lower()
            if text == "aggregated":
                return cls.AGGREGATED
            return next((mode for mode in cls if mode.value == text), None)
        return None

    @classmethod
    def parse(cls, text: str) -> DisaggregationMode:
        """Parse a mode as users write it: in any case, with blanks around it, ``aggregated`` for ``agg``.

        Raises:
            BackendError.InvalidArgument: there is no such mode.
        """
        try:
            return cls(text)
        except ValueError:
            known = ", ".join(mode.value for mode in cls)
            raise BackendError.InvalidArgument(
                f"unknown disaggregation mode '{text}' (expected one of: {known})"
            ) from None


#: What `WorkerConfig.tool_call_parser` and `reasoning_parser` say in place of a name.
AUTO_PARSER = "auto"
NO_PARSER = "none"

#: The engine implements `LLMEngine.embed`.
EMBED = "embed"
#: The engine implements `LLMEngine.score`.
SCORE = "score"
#: The engine implements `LLMEngine.score` for requests with one query, at least.
RERANK = "rerank"
#: The engine obeys `sampling_options.guided_decoding`, with `structural_tag` in the form that xgrammar defines.
GUIDED = "guided"
#: The engine itself generates several choices for one request (`sampling_options.n`).
MULTI_CHOICE = "multi_choice"
#: The engine implements `LLMEngine.progress`. A request that waits long for its first token is then not mistaken for
#: one whose engine is frozen.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """Options of `dynamo_runtime.run` around an engine. None or empty leaves them to file and environment.

    A worker that the command `dynamo` starts ignores them: it has its settings already.
    """

    #: Names of plugins; they win over file and environment.
    discovery_backend: str | None = None
    request_plane: str | None = None
    event_plane: str | None = None
    #: The config file and one of its profiles; None means `DYN_CONFIG` and `DYN_PROFILE`.
    config_file: str | None = None
    profile: str | None = None
    #: Settings as `--set` takes them, ``key=value``.
    overrides: tuple[str, ...] = ()
    #: Command-line flags by name, as in ``{"--engine-request-limit": 8}``.
    flags: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class WorkerConfig:
    """Describes to an engine the worker it runs in."""

    #: The model's public name, whatever the engine calls it.
    model_name: str = ""
    #: A folder in the Hugging Face layout; None means the byte tokenizer and no files.
    model_path: str | None = None
    #: Another public name, where the engine knows the model by `model_name`.
    served_model_name: str | None = None
    #: The address of the worker.
    namespace: str = "dynamo"
    component: str = "backend"
    endpoint: str = "generate"
    #: The name of the worker in the config file.
    worker: str = ""
    #: The requests that the model serves: `chat`, `completions`, `embeddings`, `score`, `rerank`.
    endpoint_types: tuple[str, ...] = ("chat", "completions")
    #: The role of the worker; `PREFILL` and `DECODE` are the halves.
    disaggregation_mode: DisaggregationMode = DisaggregationMode.AGGREGATED
    #: How often a request may move to another worker.
    migration_limit: int = 0
    #: Counts the replicas of one worker from 0.
    replica: int = 0
    #: A file with a chat template; frontends get it in place of the one in the model's folder.
    custom_jinja_template: str | None = None
    #: Plugins that frontends read the model's answers with; for the card only. `auto`: the files of the model's folder
    #: decide. None and `none`: no parser.
    tool_call_parser: str | None = AUTO_PARSER
    reasoning_parser: str | None = AUTO_PARSER
    #: Published on the card, for routers that ask workers for the contents of their caches; never true of a decode
    #: worker.
    enable_local_indexer: bool = True
    #: Whether the worker calls `kv_event_sources`, so that routers can go by its cache.
    enable_kv_routing: bool = True
    #: More labels for all metrics of the worker. Only `run` takes them.
    metrics_labels: Mapping[str, str] = field(default_factory=dict)
    #: The request of a health probe, in place of that of the settings and of the engine.
    health_check_payload: Mapping[str, Any] | str | None = None
    #: The process around the engine, as `RuntimeOptions`. Only `run` reads it.
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)


@dataclass(slots=True, kw_only=True)
class EngineConfig:
    """The properties of a started engine. Capacities are per data-parallel rank; None means not known."""

    #: The model that the engine has loaded; required, and not empty.
    model: str
    #: The public name, if the worker config has none; without it that is `model`.
    served_model_name: str | None = None
    #: `tokens`, or `text` for engines that take the client's body and answer with text.
    model_input: str = "tokens"
    #: Prompt and answer together, in tokens.
    context_length: int | None = None
    #: Tokens in a KV block, and the number of blocks. Without a block size no router goes by the cache.
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    #: Requests at once, and tokens in one step.
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    #: The number of data-parallel ranks, and the number of the first.
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    #: Where prefill and decode engines meet; both or none. For engines that use the framework's handshake, not for
    #: those that move the cache on their own.
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    #: Any of `EMBED`, `GUIDED`, `MULTI_CHOICE`, `PROGRESS`, `RERANK`, `SCORE`.
    capabilities: frozenset[str] = frozenset()
    #: Further data for other processes, on the model card.
    runtime_data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """Publishes the changes of the KV cache of one data-parallel rank.

    `subscribe` is called once with a callback. The engine calls that back in the event loop's thread with every event
    of the rank, in order. The callback never waits and never fails. `KvEvent.event_id` counts up by one from 0.
    """

    dp_rank: int
    subscribe: Callable[[Callable[[KvEvent], None]], None]


@dataclass(frozen=True, slots=True)
class LoadSource:
    """Publishes the load of one data-parallel rank.

    `subscribe` is called once with a callback. The engine calls that back in the event loop's thread whenever the load
    changes, however often: the framework limits what is sent. The callback never waits and never fails.
    """

    dp_rank: int
    subscribe: Callable[[Callable[[ActiveLoad], None]], None]


class LLMEngine(Plugin, ABC):
    """An inference engine. Implement `start`, `generate` and `cleanup`; the rest has defaults."""

    def __init__(self, config: PluginConfig, worker: WorkerConfig) -> None:
        self.config = config
        self.worker = worker

    @abstractmethod
    async def start(self, worker_id: int) -> EngineConfig:
        """Make the engine ready; `generate` may be called as soon as this returns.

        `worker_id` is opaque, stable for the process and unique among all workers: it is the instance id in discovery.
        Called once, before registration. Heavy imports belong here. The worker may cancel it when the process is to
        end; `cleanup` follows.

        Raises:
            BackendError: any variant; the process exits with an error and `cleanup` is called.
        """

    @abstractmethod
    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """Answer one request; write it as an async generator.

        Exactly one item, the last, carries a `finish_reason`; raising a `BackendError` ends the stream too, and keeps
        its type up to the client. Look at ``ctx.is_stopped()`` between yields, before the first one too, and end with
        ``LLMEngineOutput.cancelled()`` within two seconds. Release what the request holds in a ``finally``: it runs
        however the stream ends. Called once per request, for many at the same time. Nothing may block the event loop:
        computing belongs in a thread or another process.
        """

    @abstractmethod
    async def cleanup(self) -> None:
        """Release everything. Safe twice, after a `start` that failed or was cancelled, and without one.

        The worker calls it exactly once.
        """

    async def abort(self, ctx: EngineContext) -> None:
        """Abort a request; called at most once for each, only when its caller gave up explicitly.

        Do nothing by default.
        """

    async def drain(self) -> None:
        """Finish what runs; called once before `cleanup`, after the last new request. Do nothing by default.

        A failure is logged.
        """

    async def died(self) -> str:
        """Return the reason once the engine has died by itself.

        The worker then leaves discovery, cleans up and ends with exit code 1. Awaited once from the end of `start` on,
        and cancelled when the worker stops. For engines that run in other processes, for example. By default it never
        returns.
        """
        await asyncio.Event().wait()
        return ""

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        """Register the engine's own metrics; called once after `start`. Do nothing by default.

        The worker's labels are on all of them. `metrics.bridge` shows the registry of a library.
        """

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        """Return one source per rank whose cache routers may know; called once after `setup_metrics`.

        None by default. Not called if `WorkerConfig.enable_kv_routing` is off.
        """
        return ()

    async def load_sources(self) -> Sequence[LoadSource]:
        """Return one source per rank that reports its load; called once after `setup_metrics`. None by default."""
        return ()

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the request to probe the engine with, as a map of `PreprocessedRequest` fields.

        None for the default.
        """
        return None

    def progress(self) -> int:
        """Return a counter that grows with the engine's work, such as the steps of its scheduler.

        Called once a second in the event loop, if the capability `PROGRESS` is declared. While the number grows, a
        request without output counts as one that the engine works on. Must return at once.
        """
        raise NotSupported(f"engine {self.NAME!r} does not report progress")

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        """Embed token ids, or the client's body with `model_input: text`.

        Only called if the capability `EMBED` is declared.
        """
        raise NotSupported(f"engine {self.NAME!r} does not make embeddings")

    async def score(self, request: ScoreRequest, ctx: GenerateContext) -> ScoreOutput:
        """Rate how well each document answers its query.

        Only called if the capability `SCORE` is declared, or `RERANK`, and then with a single query. One score per
        document, the higher the more relevant; frontends sort. `request.pairs` has each query with its document. They
        are texts for every engine, because only the engine knows how its model takes a pair.
        """
        raise NotSupported(f"engine {self.NAME!r} does not score texts")


def invalid_argument(message: str) -> BackendError:
    """Return the error to raise when an engine rejects its input; the client gets a 400 with the message."""
    return BackendError.InvalidArgument(message)
