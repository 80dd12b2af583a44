"""A stand-in for the API server, discoveries on it, and watches that add up what they are told."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_plugin_discovery_kubernetes.config import KubernetesConfig
from dynamo_plugin_discovery_kubernetes.discovery import KubernetesDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.discovery.harness import see

__all__ = ["api", "make", "see", "serve"]


def _load(name: str) -> Any:
    """Return a module that lies beside this file: tests are imported without packages."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """Start API servers that live as long as the test."""
    started: list[Any] = []

    async def serve(**how: Any) -> Any:
        started.append(_load("kubernetes_stand_in").ApiServer(**how))
        await started[-1].start()
        return started[-1]

    yield serve
    for server in started:
        await server.aclose()


@pytest.fixture
async def api(serve: Any) -> Any:
    """Return an API server of its own for each test."""
    return await serve()


@pytest.fixture
async def make(api: Any) -> AsyncIterator[Callable[..., KubernetesDiscovery]]:
    """Make discovery objects, as different pods would have them."""
    made: list[KubernetesDiscovery] = []

    def make(**settings: object) -> KubernetesDiscovery:
        defaults = {"url": api.url, "token": "all", "ttl": 4.5, "heartbeat": 0.3, "poll": 0.1, "timeout": 1.5}
        config = KubernetesConfig.model_validate(defaults | {"start_timeout": 0.5} | settings)
        made.append(KubernetesDiscovery(config, Metrics()))
        return made[-1]

    yield make
    await asyncio.gather(*(discovery.aclose() for discovery in made))
