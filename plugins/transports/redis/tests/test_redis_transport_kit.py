"""The kits for transports and event planes, against a real server."""

from __future__ import annotations

from typing import ClassVar

from dynamo_testing.brokered_kit import (
    BrokeredDamageChecks,
    BrokeredEventsKit,
    BrokeredHangChecks,
    BrokeredTransportKit,
    DirectKit,
    WireKit,
)


class TestRedisOverItsServer(BrokeredTransportKit):
    pass


class TestRedis(DirectKit):
    pass


class TestRedisOverAWire(WireKit):
    pass


class TestRedisThatHangs(BrokeredHangChecks):
    pass


class TestRedisDamaged(BrokeredDamageChecks):
    pass


class TestRedisEvents(BrokeredEventsKit):
    EVENT_LIMIT: ClassVar[int | None] = 1024 * 1024
