"""The kits for transports and event planes, against a real server."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dynamo_testing.brokered_kit import (
    BrokeredDamageChecks,
    BrokeredEventsKit,
    BrokeredHangChecks,
    BrokeredTransportKit,
    DirectKit,
    WireKit,
)


class TestRedisOverItsServer(BrokeredTransportKit):
    QUICK_LOOP: ClassVar[str] = "asyncio"


@pytest.mark.full
class TestRedis(DirectKit):
    """Without the wire between that the class below has."""


class TestRedisOverAWire(WireKit):
    QUICK_LOOP: ClassVar[str] = "uvloop"


class TestRedisThatHangs(BrokeredHangChecks):
    QUICK_LOOP: ClassVar[str] = "uvloop"


class TestRedisDamaged(BrokeredDamageChecks):
    QUICK_LOOP: ClassVar[str] = "asyncio"


class TestRedisEvents(BrokeredEventsKit):
    EVENT_LIMIT: ClassVar[int | None] = 1024 * 1024
