"""The shipped kit, run on etcd discovery: two objects on one cluster, as in two processes."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_testing.discovery.stores import StoreKit


class TestAClusterThatHangs(StoreKit):
    THREAD = "discovery-etcd"

    @pytest.fixture
    def store(self, etcd: Any) -> Any:
        return etcd
