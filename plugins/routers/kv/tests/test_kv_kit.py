"""The router keeps what every router promises: with events, without, and with a queue."""

from __future__ import annotations

from typing import cast

import pytest
from dynamo_core import Router
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_testing.router_kit import RouterFactory, RouterKit


class TestByEvents(RouterKit):
    CAN_PIN = True

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: KvRouter(KvConfig(), services)


class TestByGuess(RouterKit):
    CAN_PIN = True

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: KvRouter(KvConfig(kv_events=False), services)


class TestWithAQueue(RouterKit):
    CAN_PIN = True

    def held(self, router: Router) -> int:
        return len(cast(KvRouter, router)._queue)

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        return lambda services: KvRouter(KvConfig(queue_threshold=1.0), services)
