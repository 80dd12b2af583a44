"""Engines that keep the contract without being made from `LLMEngine`: foreign objects, wrappers, test doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.context import EngineContext, GenerateContext
from dynamo_core.contracts.engine import EngineConfig, KvEventSource, LLMEngine, LoadSource, WorkerConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest

_REQUIRED = ("start", "generate", "cleanup")


class EngineLike(Protocol):
    """What an object must have to be used as an engine; the other methods of `LLMEngine` are used if it has them."""

    async def start(self, worker_id: int) -> EngineConfig:
        """See `LLMEngine.start`."""

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """See `LLMEngine.generate`."""

    async def cleanup(self) -> None:
        """See `LLMEngine.cleanup`."""


def as_engine(engine: EngineLike, worker: WorkerConfig) -> LLMEngine:
    """The engine itself if it is made from `LLMEngine`, else one that passes everything on to it.

    Raises:
        ConfigError: it lacks a method that an engine needs.
    """
    if isinstance(engine, LLMEngine):
        return engine
    if isinstance(engine, type):
        raise ConfigError(f"{engine.__name__} is a class, not an engine: hand over an object made from it")
    missing = [name for name in _REQUIRED if not callable(getattr(engine, name, None))]
    if missing:
        raise ConfigError(
            f"{type(engine).__name__} is no engine, it has no {' and no '.join(missing)}: "
            f"an engine needs {', '.join(_REQUIRED)}"
        )
    return _Bridge(engine, worker)


class _Bridge(LLMEngine):
    """Passes everything on. What the other object does not have does what `LLMEngine` does."""

    def __init__(self, inner: EngineLike, worker: WorkerConfig) -> None:
        super().__init__(PluginConfig(), worker)
        self._inner = inner

    async def start(self, worker_id: int) -> EngineConfig:
        return await self._inner.start(worker_id)

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        return self._inner.generate(request, ctx)

    async def cleanup(self) -> None:
        await self._inner.cleanup()

    async def abort(self, ctx: EngineContext) -> None:
        await self._optional("abort", super().abort)(ctx)

    async def drain(self) -> None:
        await self._optional("drain", super().drain)()

    async def died(self) -> str:
        why: str = await self._optional("died", super().died)()
        return why

    async def setup_metrics(self, metrics: MetricsScope) -> None:
        await self._optional("setup_metrics", super().setup_metrics)(metrics)

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        sources: Sequence[KvEventSource] = await self._optional("kv_event_sources", super().kv_event_sources)()
        return sources

    async def load_sources(self) -> Sequence[LoadSource]:
        sources: Sequence[LoadSource] = await self._optional("load_sources", super().load_sources)()
        return sources

    async def health_check_payload(self) -> dict[str, Any] | None:
        payload: dict[str, Any] | None = await self._optional("health_check_payload", super().health_check_payload)()
        return payload

    async def embed(self, request: EmbedRequest, ctx: GenerateContext) -> EmbedOutput:
        output: EmbedOutput = await self._optional("embed", super().embed)(request, ctx)
        return output

    def _optional(self, name: str, default: Any) -> Any:
        return getattr(self._inner, name, None) or default
