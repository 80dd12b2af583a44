"""A worker on real planes of one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.engine import LLMEngine, WorkerConfig
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.worker.worker import Worker, WorkerLimits
from dynamo_telemetry.metrics import Metrics


class Ground:
    """Transport, discovery and metrics, and what hooks were called."""

    def __init__(self) -> None:
        self.metrics = Metrics(cache_seconds=0)
        self.transport = InprocTransport(PluginConfig(), self.metrics)
        self.discovery = MemoryDiscovery(PluginConfig(), self.metrics)
        self.hooks: list[str] = []

    def worker(self, engine: type[LLMEngine], *, limits: WorkerLimits | None = None, **more: Any) -> Worker:
        config = WorkerConfig(model_name="m", worker="w")
        return Worker(
            engine(PluginConfig(), config),
            config,
            transport=self.transport,
            discovery=self.discovery,
            metrics=self.metrics.scope(worker="w-0"),
            limits=limits or WorkerLimits(grace_period=0, drain_timeout=1),
            announce=lambda hook, **_: self.hooks.append(hook),
            **more,
        )

    async def aclose(self) -> None:
        await self.discovery.aclose()
        await self.transport.aclose()


@pytest.fixture(scope="session")
def make_ground() -> Callable[[], Ground]:
    """Make one for tests that have a loop of their own."""
    return Ground


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    ground = Ground()
    yield ground
    await ground.aclose()


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put the clock of the running loop forward."""

    def advance(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + seconds)

    return advance
