"""The shipped kit, run on Kubernetes discovery: two objects on one stand-in server, as in two pods."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_testing.discovery.stores import StoreKit
from dynamo_testing.discovery_kit import Directories


class KubernetesKit(StoreKit):
    WAIT = 15.0
    THREAD = "discovery-kubernetes"

    @pytest.fixture
    def store(self, api: Any) -> Any:
        return api


@pytest.mark.full
class TestAServerThatGoesAway(KubernetesKit):
    async def cut_store(self, directories: Directories) -> None:
        await self.server.stop()

    async def restore_store(self, directories: Directories) -> None:
        await self.server.start()


class TestAServerThatHangs(KubernetesKit):
    async def cut_store(self, directories: Directories) -> None:
        self.server.hang()

    async def restore_store(self, directories: Directories) -> None:
        await self.server.resume()
