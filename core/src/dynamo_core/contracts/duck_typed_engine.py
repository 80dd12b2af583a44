"""Engines that keep the contract without being subclasses of `LLMEngine`: foreign objects, wrappers, test doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.engine import EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.contracts.requests.context import GenerateContext
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.output import LLMEngineOutput
from dynamo_core.protocol.request import PreprocessedRequest

_REQUIRED = ("start", "generate", "cleanup")


class EngineLike(Protocol):
    """The methods that an object needs to be used as an engine. Other methods of `LLMEngine` are optional."""

    async def start(self, worker_id: int) -> EngineConfig:
        """See `LLMEngine.start`."""

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        """See `LLMEngine.generate`."""

    async def cleanup(self) -> None:
        """See `LLMEngine.cleanup`."""


def as_engine(engine: EngineLike, worker: WorkerConfig) -> LLMEngine:
    """Return the engine itself if it is an `LLMEngine`, else one that delegates to it.

    Raises:
        ConfigError: the object lacks a method that an engine needs.
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


def unwrap(engine: LLMEngine) -> object:
    """Return the object that the engine's author wrote: the engine itself, or the one that it delegates to."""
    return engine.inner if isinstance(engine, _Bridge) else engine


def _optional(default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of the other object that is called as `default` is, or else `default`."""

    def call(self: _Bridge, *arguments: Any) -> Any:
        method = getattr(self.inner, default.__name__, None)
        return method(*arguments) if method else default(self, *arguments)

    return call


class _Bridge(LLMEngine):
    """Delegates every call and awaits nothing itself: the caller checks the results.

    A method that the object lacks does what `LLMEngine` does.
    """

    def __init__(self, engine: EngineLike, worker: WorkerConfig) -> None:
        super().__init__(PluginConfig(), worker)
        self.inner: Any = engine

    def start(self, worker_id: int) -> Any:
        return self.inner.start(worker_id)

    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        items: AsyncIterator[LLMEngineOutput] = self.inner.generate(request, ctx)
        return items

    def cleanup(self) -> Any:
        return self.inner.cleanup()

    abort = _optional(LLMEngine.abort)
    drain = _optional(LLMEngine.drain)
    died = _optional(LLMEngine.died)
    setup_metrics = _optional(LLMEngine.setup_metrics)
    kv_event_sources = _optional(LLMEngine.kv_event_sources)
    load_sources = _optional(LLMEngine.load_sources)
    health_check_payload = _optional(LLMEngine.health_check_payload)
    progress = _optional(LLMEngine.progress)
    embed = _optional(LLMEngine.embed)
    score = _optional(LLMEngine.score)
