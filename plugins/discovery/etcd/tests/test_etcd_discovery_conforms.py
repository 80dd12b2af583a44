"""The shipped kit, run on etcd discovery: two objects on one cluster, as in two processes."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_discovery_etcd.discovery import EtcdDiscovery
from dynamo_testing.discovery_kit import Directories, DiscoveryKit


class EtcdKit(DiscoveryKit):
    TTL = 2.0
    WAIT = 20.0
    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True

    @pytest.fixture
    async def directories(self, etcd: Any, make: Any) -> Directories:
        self.etcd = etcd
        one, other = make(), make()
        await one.start()
        await other.start()
        return Directories(one=one, other=other)

    async def kill_owner(self, directories: Directories) -> None:
        assert isinstance(directories.one, EtcdDiscovery)
        # Its heartbeats end; nothing is removed.
        directories.one._thread.stop(self.WAIT)


class TestAClusterThatHangs(EtcdKit):
    async def cut_store(self, directories: Directories) -> None:
        self.etcd.stop()

    async def restore_store(self, directories: Directories) -> None:
        self.etcd.resume()


def test_it_is_for_several_processes() -> None:
    assert EtcdDiscovery.CROSS_PROCESS
    assert EtcdDiscovery.NAME == "etcd"
