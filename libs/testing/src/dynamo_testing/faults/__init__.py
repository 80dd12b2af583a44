"""A faulty wire: a TCP proxy that injects faults at chosen frames.

A test starts a `FaultProxy` in front of any server, and says in its `FaultPlan` what shall happen, and where::

    async with FaultProxy(host, port) as proxy:
        lost = proxy.plan.inject(Drop(), direction=Direction.DOWN, at=7)
        …  # a client talks to proxy.host, proxy.port
        await lost.hit()

Needs neither pytest nor anything else beside the standard library.
"""

from dynamo_testing.faults.framing import Frame, Framing, FramingError, LengthPrefixed, Raw, Splitter
from dynamo_testing.faults.kinds import (
    BlackHole,
    Corrupt,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Flip,
    HalfOpen,
    Reorder,
    Throttle,
)
from dynamo_testing.faults.lane import Lane
from dynamo_testing.faults.plan import Direction, FaultPlan, Passing, Rule
from dynamo_testing.faults.proxy import FaultProxy

__all__ = [
    "BlackHole",
    "Corrupt",
    "Cut",
    "Delay",
    "Direction",
    "Drop",
    "Duplicate",
    "Fault",
    "FaultPlan",
    "FaultProxy",
    "Flip",
    "Frame",
    "Framing",
    "FramingError",
    "HalfOpen",
    "Lane",
    "LengthPrefixed",
    "Passing",
    "Raw",
    "Reorder",
    "Rule",
    "Splitter",
    "Throttle",
]
