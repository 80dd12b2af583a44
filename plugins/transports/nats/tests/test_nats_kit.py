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


class TestNatsOverItsServer(BrokeredTransportKit):
    pass


class TestNats(DirectKit):
    pass


class TestNatsOverAWire(WireKit):
    pass


class TestNatsThatHangs(BrokeredHangChecks):
    pass


class TestNatsDamaged(BrokeredDamageChecks):
    pass


class TestNatsEvents(BrokeredEventsKit):
    SERVER: ClassVar[tuple[str, ...]] = ("max_payload: 131072",)
    EVENT_LIMIT: ClassVar[int | None] = 131072
