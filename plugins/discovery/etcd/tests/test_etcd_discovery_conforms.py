"""The shipped kit, run on etcd discovery: two objects on one cluster, as in two processes."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_discovery_etcd.discovery import EtcdDiscovery
from dynamo_testing.discovery.stores import StoreKit


class TestAClusterThatHangs(StoreKit):
    THREAD = "discovery-etcd"

    @pytest.fixture
    def store(self, etcd: Any) -> Any:
        return etcd


def test_it_is_for_several_processes() -> None:
    assert EtcdDiscovery.CROSS_PROCESS
    assert EtcdDiscovery.NAME == "etcd"
