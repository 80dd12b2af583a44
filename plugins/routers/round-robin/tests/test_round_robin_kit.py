"""The router keeps what every router promises."""

from __future__ import annotations

import pytest
from dynamo_core import PluginConfig
from dynamo_plugin_router_round_robin.router import RoundRobinRouter
from dynamo_testing.router_kit import RouterFactory, RouterKit


class TestRoundRobin(RouterKit):
    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: RoundRobinRouter(PluginConfig(), services)
