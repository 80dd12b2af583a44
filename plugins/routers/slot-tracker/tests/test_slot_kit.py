"""The router keeps what every router promises: with a real service on the loopback, and without one."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from typing import cast

import pytest
from dynamo_core import Router
from dynamo_plugin_router_slot_tracker.router import SlotTrackerConfig, SlotTrackerRouter
from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings
from dynamo_testing.router_kit import RouterFactory, RouterKit


def _unknown(router: Router) -> int:
    """Return requests that the service is still to be told of."""
    reservations = cast(SlotTrackerRouter, router)._reservations
    return len(reservations.unknown) + reservations._changed.qsize() + reservations.pending


class TestWithAService(RouterKit):
    service: Service

    @pytest.fixture
    async def make_router(self) -> AsyncIterator[RouterFactory]:
        self.service = Service(ServiceSettings(host="127.0.0.1", port=0))
        await self.service.start()
        config = SlotTrackerConfig(url=self.service.listener.url, timeout=5)
        yield lambda services: SlotTrackerRouter(config, services)
        await self.service.aclose()

    def held(self, router: Router) -> int:
        counted = (load.active_prefill_tokens + load.active_decode_blocks for load in self.service.registry.loads())
        return _unknown(router) + sum(counted)


class TestWhileTheServiceIsAway(RouterKit):
    @pytest.fixture
    def make_router(self) -> Iterator[RouterFactory]:
        with socket.socket() as taken:
            # Bound and not listening: nobody else can take the port, and nobody answers.
            taken.bind(("127.0.0.1", 0))
            config = SlotTrackerConfig(url=f"http://127.0.0.1:{taken.getsockname()[1]}", pause=60)
            yield lambda services: SlotTrackerRouter(config, services)

    def held(self, router: Router) -> int:
        return _unknown(router)
