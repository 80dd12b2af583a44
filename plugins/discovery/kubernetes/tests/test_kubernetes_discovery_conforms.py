"""The shipped kit, run on Kubernetes discovery: two objects on one stand-in server, as in two pods."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_discovery_kubernetes.discovery import KubernetesDiscovery
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class KubernetesKit(DiscoveryKit):
    TTL = 2.0
    WAIT = 15.0
    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True

    @pytest.fixture
    async def directories(self, api: Any, make: Any) -> Directories:
        self.api = api
        one, other = make(), make()
        await one.start()
        await other.start()
        return Directories(one=one, other=other)

    async def kill_owner(self, directories: Directories) -> None:
        assert isinstance(directories.one, KubernetesDiscovery)
        # Its heartbeats end; nothing is removed.
        directories.one._thread.stop(self.WAIT)


class TestAServerThatGoesAway(KubernetesKit):
    async def cut_store(self, directories: Directories) -> None:
        await self.api.stop()

    async def restore_store(self, directories: Directories) -> None:
        await self.api.start()


class TestAServerThatHangs(KubernetesKit):
    async def cut_store(self, directories: Directories) -> None:
        self.api.hang()

    async def restore_store(self, directories: Directories) -> None:
        await self.api.resume()


def test_it_is_for_several_processes() -> None:
    assert KubernetesDiscovery.CROSS_PROCESS
    assert KubernetesDiscovery.NAME == "kubernetes"
