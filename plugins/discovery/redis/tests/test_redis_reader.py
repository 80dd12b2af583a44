"""One look at the store: only what has changed, unless the store may be another one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
import redis
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.reader import Reader
from dynamo_plugin_discovery_redis.store import Store


@pytest.fixture
def config(server: Any) -> RedisConfig:
    return RedisConfig(url=server.url)


@pytest.fixture
async def reader(config: RedisConfig) -> AsyncIterator[Reader]:
    reader = Reader(config)
    yield reader
    await reader.aclose()


async def test_a_read_returns_the_changes_since_the_last(config: RedisConfig, reader: Reader) -> None:
    with closing(Store(config)) as store:
        store.register(1, 60, {"a": b"1", "b": b"2"})
        store.register(2, 30, {})
        first = await reader.read()
        store.put(2, "c", b"3")
        second = await reader.read()
        third = await reader.read()

    assert first.there == second.there == third.there == {1, 2}
    assert {lease: set(held.records) for lease, held in first.changed.items()} == {1: {"a", "b"}, 2: set()}
    assert {lease: (held.ttl, set(held.records)) for lease, held in second.changed.items()} == {2: (30, {"c"})}
    assert third.changed == {}


async def test_a_store_that_was_emptied_is_read_whole_however_many_changes_it_has_had(
    server: Any, config: RedisConfig, reader: Reader
) -> None:
    with closing(Store(config)) as store, redis.Redis(port=server.port) as client:
        store.register(1, 60, {"a": b"old"})
        before = await reader.read()
        client.flushall()
        store.register(1, 60, {"a": b"new"})
        for _ in range(20):
            store.put(0, "value", b"")
        after = await reader.read()

    assert after.epoch != before.epoch
    assert after.changed[1].records["a"][1] == b"new"


async def test_after_a_new_connection_everything_is_read(server: Any, config: RedisConfig, reader: Reader) -> None:
    with closing(Store(config)) as store, redis.Redis(port=server.port) as client:
        store.register(1, 60, {"a": b"1"})
        first = await reader.read()
        assert (await reader.read()).changed == {}
        # As a server does that starts anew with what it had saved some time ago: same epoch, other revisions.
        client.client_kill_filter(_type="normal", skipme=True)
        # The library connects again without a word once it has seen the end of the connection.
        connection = reader._client.connection_pool._available_connections[0]
        async with asyncio.timeout(5):
            while not await connection.can_read():  # noqa: ASYNC110 - nothing else tells it
                await asyncio.sleep(0.01)
        after = await reader.read()

    assert after.epoch == first.epoch
    assert after.anew
    assert set(after.changed) == {1}
