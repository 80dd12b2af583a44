"""The memory store keeps its contract, and its bounds."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dynamo_core import ResponseStoreServices
from dynamo_plugin_frontend_responses.memory_store import MemoryStore, MemoryStoreConfig
from dynamo_telemetry import Metrics
from dynamo_testing import ResponseStoreFactory, ResponseStoreKit


class TestContract(ResponseStoreKit):
    """Every promise of a response store."""

    BOUND: ClassVar[int | None] = 1024 * 1024

    @pytest.fixture
    def make_store(self) -> ResponseStoreFactory:
        return lambda services: MemoryStore(MemoryStoreConfig(max_mb=1), services)


async def test_no_more_records_are_kept_than_may_be() -> None:
    async with MemoryStore(MemoryStoreConfig(max_records=3), ResponseStoreServices(Metrics())) as store:
        for number in range(4):
            await store.put("me", {str(number): b""}, 60)

        assert await store.get("me", ["0", "1", "2", "3"]) == [None, b"", b"", b""]
