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


class TestNatsOverItsServer(BrokeredTransportKit):
    QUICK_LOOP: ClassVar[str] = "asyncio"


@pytest.mark.full
class TestNats(DirectKit):
    """Without the wire between that the class below has."""


class TestNatsOverAWire(WireKit):
    QUICK_LOOP: ClassVar[str] = "uvloop"


class TestNatsThatHangs(BrokeredHangChecks):
    QUICK_LOOP: ClassVar[str] = "uvloop"


class TestNatsDamaged(BrokeredDamageChecks):
    QUICK_LOOP: ClassVar[str] = "asyncio"


class TestNatsEvents(BrokeredEventsKit):
    SERVER: ClassVar[tuple[str, ...]] = ("max_payload: 131072",)
    EVENT_LIMIT: ClassVar[int | None] = 131072
