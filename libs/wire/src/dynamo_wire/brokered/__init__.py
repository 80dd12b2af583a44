"""Calls and events over a message broker: everything but the connection with it.

A plugin brings a `Broker`, which sends messages to addresses and receives those of its own, and gets a transport. The
transport relies on no delivery guarantee of the broker: a *link* of one caller and one worker numbers its messages in
each direction, and ends when one of them is missing. `BrokeredTransport` puts the parts together.
"""

from __future__ import annotations

from dynamo_wire.brokered.addresses import Addresses
from dynamo_wire.brokered.broker import CLOSE_GRACE, Broker, Listening, OutboundMessage, Session
from dynamo_wire.brokered.settings import BrokeredConfig
from dynamo_wire.brokered.transport import BrokeredTransport

__all__ = [
    "CLOSE_GRACE",
    "Addresses",
    "Broker",
    "BrokeredConfig",
    "BrokeredTransport",
    "Listening",
    "OutboundMessage",
    "Session",
]
