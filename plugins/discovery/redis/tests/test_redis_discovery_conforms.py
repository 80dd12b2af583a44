"""The shipped kit, run on Redis discovery: two objects on one server, as in two processes."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_discovery_redis.discovery import RedisDiscovery
from dynamo_plugin_discovery_redis.lease import RedisLease
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class RedisKit(DiscoveryKit):
    TTL = 2.0
    WAIT = 20.0
    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True

    @pytest.fixture
    async def directories(self, server: Any, make: Any) -> Directories:
        self.server = server
        one, other = make(), make()
        await one.start()
        await other.start()
        return Directories(one=one, other=other)

    async def kill_owner(self, directories: Directories) -> None:
        assert isinstance(directories.one, RedisDiscovery)
        # Its heartbeats end; nothing is removed.
        directories.one._heartbeats.stop(self.WAIT)


class TestAServerThatHangs(RedisKit):
    async def cut_store(self, directories: Directories) -> None:
        self.server.stop()

    async def restore_store(self, directories: Directories) -> None:
        self.server.resume()


class TestAServerThatIsStartedAnewAndEmpty(RedisKit):
    """More than the kit asks for: leases bring back what they put."""

    async def cut_store(self, directories: Directories) -> None:
        self.server.kill()

    async def restore_store(self, directories: Directories) -> None:
        self.server.start()


def test_a_lease_of_this_plugin_is_what_the_kit_has_checked() -> None:
    assert RedisDiscovery.CROSS_PROCESS
    assert RedisDiscovery.NAME == "redis"
    assert RedisLease.__abstractmethods__ == frozenset()
