"""Liveness of the worker at the other end of a link: when callers ping or probe it, and when they give it up.

A *ping* goes over the link, and the worker's event loop answers it. A *probe* goes to a thread of the worker's process
that needs neither its event loop nor its engine; see `dynamo_wire.blocked_loop_probe`. An event loop that an engine
blocks answers no ping. Its process is alive as long as the thread reports that the loop is busy.
"""

from __future__ import annotations

import enum
from typing import Final

#: Seconds that a worker may be silent of which no thread answers probes.
WITHOUT_PROBES: Final = 60.0
#: Seconds that a worker may be silent whose record does not say how long its lease lives.
WITHOUT_TTL: Final = 10.0
#: Seconds that a worker may be silent beyond the life of its lease.
BEYOND_LEASE: Final = 1.0

#: Pings and probes that a worker gets at least before it is given up, however long the heartbeat.
ASKED: Final = 3
#: The part of a heartbeat after which a ping without an answer is followed by a probe.
PROBE_AFTER: Final = 0.25

#: Seconds by which a timer of the event loop may fire early.
RESOLUTION: Final = 0.001


def silence_limit(silence: float | None, lease_ttl: float | None, *, probes: bool) -> float:
    """Return seconds that a worker may be silent.

    `silence` is the configured number, None for the life of the worker's lease: `lease_ttl` seconds, None if its record
    does not say. `probes` says whether a thread of the worker answers probes.
    """
    if silence is not None:
        return silence
    if not probes:
        return WITHOUT_PROBES
    return WITHOUT_TTL if lease_ttl is None else lease_ttl + BEYOND_LEASE


class Action(enum.Enum):
    """The next action of the link."""

    NOTHING = enum.auto()
    PING = enum.auto()
    PROBE = enum.auto()
    GIVE_UP = enum.auto()


class Liveness:
    """Tracks one link. It reads no clock: times are those of the caller's event loop, in seconds.

    `check` is called at `due`, or later; it says what to do, and sets the next `due`. Silence counts from the last sign
    of life: anything that arrived over the link, or the answer of the thread that the event loop is busy. That the loop
    answers the thread is none: if the link's pings still stay without an answer, the link is half open. Time in which
    this process itself did not run is not counted.
    """

    __slots__ = ("_last", "_pinged", "busy", "due", "heartbeat", "silence")

    def __init__(self, heartbeat: float, silence: float, now: float) -> None:
        self.silence = silence
        #: Seconds of silence before a ping, and between two pings.
        self.heartbeat = heartbeat
        #: When to call `check` again.
        self.due = now + self._step
        #: Whether the thread said that the event loop is busy, and nothing has come over the link since.
        self.busy = False
        self._last = now
        self._pinged = False

    @property
    def _step(self) -> float:
        return min(self.heartbeat, self.silence / ASKED)

    def begin(self, now: float) -> None:
        """Start again from now on, such as after a change of `heartbeat` or `silence`."""
        self._last, self._pinged = now, False
        self.due = now + self._step

    def heard(self, now: float) -> None:
        """Note that something arrived over the link. Every read calls this, so it only notes the time."""
        self._last = now
        self.busy = False

    def report_busy(self, now: float) -> bool:
        """Record that the thread found the event loop busy. Return whether that is new."""
        self._last = max(self._last, now)
        self._pinged = False
        news, self.busy = not self.busy, True
        return news

    def silent(self, now: float) -> float:
        """Return seconds without a sign of life."""
        return now - self._last

    def check(self, now: float, *, used: bool) -> Action:
        """Return what to do; a link that is not `used` needs nothing."""
        step = self._step
        late = max(0.0, now - self.due)
        if not used or late > step:
            # A late check means that this process slept; what came meanwhile is still in the socket.
            self._last, self._pinged = now, False
        else:
            self._last = min(now, self._last + late)
        if not used:
            self.busy = False
        if now - self._last < step - RESOLUTION:
            self._pinged = False
            self.due = self._last + step
            return Action.NOTHING
        end = self._last + self.silence
        if now >= end - RESOLUTION:
            return Action.GIVE_UP
        probes, self._pinged = self._pinged, not self._pinged
        self.due = min(end, now + step * ((1 - PROBE_AFTER) if probes else PROBE_AFTER))
        return Action.PROBE if probes else Action.PING
