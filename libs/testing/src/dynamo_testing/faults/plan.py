"""The fault plan: rules that tests add and remove while the proxy runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from dynamo_testing.faults.framing import Frame
from dynamo_testing.faults.kinds import Fault

#: Frames that a rule remembers to have met.
REMEMBERED = 100


class Direction(Enum):
    """The direction of a frame."""

    UP = "to the server"
    DOWN = "to the client"


class Passing(NamedTuple):
    """A frame on its way. Connections and the frames of each of their directions are counted from 0."""

    connection: int
    direction: Direction
    number: int
    body: bytes


class Rule:
    """One fault and where it happens; see `FaultPlan.inject`."""

    def __init__(
        self,
        fault: Fault,
        *,
        direction: Direction | None,
        at: int,
        when: Callable[[bytes], bool] | None,
        connection: int | None,
        times: int | None,
    ) -> None:
        self.fault = fault
        #: The frames that it happened to, the newest last; at most `REMEMBERED`.
        self.met: deque[Passing] = deque(maxlen=REMEMBERED)
        #: How often it happened.
        self.fired = 0
        self._direction = direction
        self._at = at
        self._when = when
        self._connection = connection
        self._times = times
        self._counts: dict[tuple[int, Direction], int] = {}
        self._news = asyncio.Event()

    async def hit(self, count: int = 1, *, timeout: float = 10.0) -> None:
        """Return when it has happened so often.

        Raises:
            TimeoutError: it has not, within `timeout` seconds.
        """
        async with asyncio.timeout(timeout):
            while self.fired < count:
                self._news.clear()
                await self._news.wait()

    def due(self, frame: Frame, passing: Passing) -> bool:
        """Count the frame; whether the fault shall happen to it."""
        if self._direction not in (None, passing.direction) or self._connection not in (None, passing.connection):
            return False
        if not self.fault.fits(frame) or (self._when is not None and not self._when(frame.body)):
            return False
        key = passing.connection, passing.direction
        count = self._counts[key] = self._counts.get(key, -1) + 1
        return count >= self._at and (self._times is None or self.fired < self._times)

    def fire(self, passing: Passing) -> None:
        """Apply the fault to this frame."""
        self.fired += 1
        self.met.append(passing)
        self._news.set()

    def forget(self, connection: int) -> None:
        """Forget this connection, which is over."""
        for direction in Direction:
            self._counts.pop((connection, direction), None)


class FaultPlan:
    """The rules of one proxy, in the order they were laid down. Without any, everything passes."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def inject(
        self,
        fault: Fault,
        *,
        direction: Direction | None = None,
        at: int = 0,
        when: Callable[[bytes], bool] | None = None,
        connection: int | None = None,
        times: int | None = 1,
    ) -> Rule:
        """Inject the fault from now on where this says.

        A rule counts the frames that go in its `direction` (None: either), over its `connection` (None: any), and
        whose body `when` holds of; from 0, anew for each direction of each connection, beginning with the first that
        comes after the rule was laid down. The fault happens to number `at`, and to those after it, `times` times in
        all (None: always). If several rules apply to a frame, the oldest does.
        """
        if at < 0:
            raise ValueError("`at` counts from 0")
        rule = Rule(fault, direction=direction, at=at, when=when, connection=connection, times=times)
        self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """Stop applying the rule. What it did to connections that are open stays done. Safe twice."""
        if rule in self._rules:
            self._rules.remove(rule)

    def clear(self) -> None:
        """Remove all rules, like `remove`."""
        self._rules.clear()

    def fault_for(self, frame: Frame, passing: Passing) -> Fault | None:
        """Return what happens to this frame. For the proxy: asked once for each."""
        # Every rule counts every frame, also one that another rule takes.
        due = [rule for rule in self._rules if rule.due(frame, passing)]
        if not due:
            return None
        due[0].fire(passing)
        return due[0].fault

    def forget(self, connection: int) -> None:
        """Forget a connection that is over; the proxy calls it."""
        for rule in self._rules:
            rule.forget(connection)
