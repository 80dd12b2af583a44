"""The Redis store keeps its contract over a real server, and what it promises of that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from dynamo_core import ResponseStore, ResponseStoreServices
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_response_store_redis.store import RedisStore, RedisStoreConfig
from dynamo_telemetry import Metrics
from dynamo_testing import ResponseStoreFactory, ResponseStoreKit
from dynamo_testing.servers.redis_server import MakeServer, RedisServer
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError


def make(server: RedisServer, namespace: str = "tests", **settings: object) -> RedisStore:
    config = RedisStoreConfig.model_validate({"url": server.url, "timeout": 5.0, **settings})
    return RedisStore(config, ResponseStoreServices(Metrics(), namespace))


class TestContract(ResponseStoreKit):
    """Every promise of a response store."""

    @pytest.fixture
    def make_store(self, server: RedisServer) -> ResponseStoreFactory:
        self.server = server
        config = RedisStoreConfig(url=server.url, timeout=5.0)
        return lambda services: RedisStore(config, services)

    async def take_away(self, store: ResponseStore) -> None:
        await asyncio.to_thread(self.server.kill)

    async def bring_back(self, store: ResponseStore) -> None:
        await asyncio.to_thread(self.server.start)


async def test_a_server_that_hangs_is_given_up_in_time(server: RedisServer) -> None:
    async with make(server, timeout=0.2) as store:
        await store.start()
        server.freeze()
        try:
            with pytest.raises(CannotConnect):
                await store.put("me", {"a": b"1"}, 60)
        finally:
            server.resume()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert await store.put("me", {"a": b"1"}, 60)
                    break
                except CannotConnect:
                    await asyncio.sleep(0.05)


async def test_a_frontend_starts_without_the_server_and_finds_it_later(make_server: MakeServer) -> None:
    server = make_server()
    server.kill()
    async with make(server) as store:
        await store.start()
        with pytest.raises(CannotConnect, match=r"cannot be reached|does not serve"):
            await store.get("me", ["a"])

        await asyncio.to_thread(server.start)

        assert await store.put("me", {"a": b"1"}, 60)


async def test_a_wrong_login_is_an_error_of_the_config(make_server: MakeServer) -> None:
    server = make_server("--requirepass", "right")
    store = make(server, password="wrong")

    with pytest.raises(ConfigError, match=r"frontend\.response_store\.password: .*refuses the login") as caught:
        await store.start()
    await store.aclose()
    assert "wrong" not in str(caught.value)


async def test_a_prefix_of_the_config_is_shared_by_namespaces(server: RedisServer) -> None:
    async with make(server, "one", prefix="ours") as one, make(server, "two", prefix="ours") as two:
        await one.start()
        await two.start()
        await one.put("me", {"a": b"1"}, 60)

        assert await two.get("me", ["a"]) == [b"1"]


async def test_a_put_with_a_lost_answer_is_repeated_successfully(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make(server) as store:
        await store.start()
        read = Connection.read_response
        lost: list[object] = []

        async def lose_one(self: Connection, *args: Any, **options: Any) -> Any:
            answer = await read(self, *args, **options)
            if not lost:
                lost.append(answer)
                raise RedisConnectionError("the answer is lost")
            return answer

        monkeypatch.setattr(Connection, "read_response", lose_one)

        assert await store.put("me", {"a": b"1"}, 60, {"a": None})
        assert lost == [1]
        assert not await store.put("me", {"a": b"1"}, 60, {"a": None})
