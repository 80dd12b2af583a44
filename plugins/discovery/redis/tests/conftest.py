"""A real redis-server that tests may stop, kill and start anew, and discoveries on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.discovery import RedisDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.servers.redis_server import RedisServer, make_server, redis_binary, server

__all__ = ["make", "make_server", "redis_binary", "server"]

MakeDiscovery = Callable[..., RedisDiscovery]


@pytest.fixture
async def make(server: RedisServer) -> AsyncIterator[MakeDiscovery]:
    """Make discovery objects on one server, as different processes would have them."""
    made: list[RedisDiscovery] = []

    def make(**settings: object) -> RedisDiscovery:
        defaults = {"url": server.url, "ttl": 4.0, "heartbeat": 0.3, "poll": 0.05}
        # Time enough for an answer on a busy machine.
        defaults |= {"timeout": 2.0, "start_timeout": 5.0}
        config = RedisConfig.model_validate(defaults | settings)
        made.append(RedisDiscovery(config, Metrics()))
        return made[-1]

    yield make
    await asyncio.gather(*(discovery.aclose() for discovery in made))
