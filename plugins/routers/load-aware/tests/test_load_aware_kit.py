"""The three routers keep what every router promises."""

from __future__ import annotations

import pytest
from dynamo_plugin_router_load_aware.routers import (
    LeastLoadedRouter,
    LoadAwareConfig,
    PowerOfTwoRouter,
    RandomRouter,
)
from dynamo_testing.router_kit import RouterFactory, RouterKit


class TestRandom(RouterKit):
    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: RandomRouter(LoadAwareConfig(), services)


class TestPowerOfTwo(RouterKit):
    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: PowerOfTwoRouter(LoadAwareConfig(), services)


class TestLeastLoaded(RouterKit):
    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: LeastLoadedRouter(LoadAwareConfig(), services)
