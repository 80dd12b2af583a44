"""The shipped kit, run on Redis discovery: two objects on one server, as in two processes."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_testing.discovery.stores import StoreKit
from dynamo_testing.discovery_kit import Directories


class RedisKit(StoreKit):
    THREAD = "discovery-heartbeat"
    THREAD_OF_CLIENT = "_heartbeats"

    @pytest.fixture
    def store(self, server: Any) -> Any:
        return server


class TestAServerThatHangs(RedisKit):
    """As the kit has it."""


@pytest.mark.full
class TestAServerThatIsStartedAnewAndEmpty(RedisKit):
    """More than the kit asks for: leases bring back what they put."""

    async def cut_store(self, directories: Directories) -> None:
        self.server.kill()

    async def restore_store(self, directories: Directories) -> None:
        self.server.start()
