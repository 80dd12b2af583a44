"""The stall timeout: a worker that sends nothing for so many seconds loses the call, whatever phase the call is in."""

from __future__ import annotations

import math
from typing import Protocol

from dynamo_core.dispatch.execution.alarms import Alarms
from dynamo_core.errors import DynamoError, ResponseTimeout

#: A stream is looked at so often in its timeout, and at least once in so many seconds. A worker that stalls is given up
#: within the timeout and one such pause.
LOOKS = 4
LONGEST_PAUSE = 1.0


class Watched(Protocol):
    """What a timer has to know of a stream."""

    #: The worker that serves the current attempt.
    instance_id: int | None

    @property
    def arrived(self) -> int:
        """How many items and events have arrived so far, whether the reader has taken them or not."""

    @property
    def source_paused(self) -> bool:
        """Whether the worker was asked to send no more for now."""

    def lose(self, error: DynamoError) -> None:
        """The current attempt has failed."""


class StallTimeout:
    """The stall timeout of all streams of a pipeline; `seconds` is how long a worker may send nothing."""

    __slots__ = ("_seconds", "alarms", "looks")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        pause = min(seconds / LOOKS, LONGEST_PAUSE)
        #: Looks in a row that find nothing new before a worker is given up.
        self.looks = math.ceil(seconds / pause)
        self.alarms = Alarms(pause)

    def timer(self, stream: Watched) -> StallTimer:
        """A timer for a stream, not started yet."""
        return StallTimer(self, stream)

    def error(self, instance_id: int | None) -> DynamoError:
        """Why a worker is given up."""
        return ResponseTimeout(f"worker {instance_id or 0:016x} has sent nothing for {self._seconds:g} s")


class StallTimer:
    """Watches the current attempt of one stream, from its acceptance on.

    Counts looks that found nothing new, instead of comparing times: a frontend that was suspended itself blames no
    worker. Silence of a paused source is the reader's doing.
    """

    __slots__ = ("_alarm", "_arrived", "_quiet", "_stream", "_timeout")

    def __init__(self, timeout: StallTimeout, stream: Watched) -> None:
        self._timeout = timeout
        self._stream = stream
        self._alarm = 0
        self._arrived = -1
        self._quiet = 0

    def start(self) -> None:
        """Watches the attempt that was just accepted."""
        self.cancel()
        self._arrived, self._quiet = self._stream.arrived, 0
        self._alarm = self._timeout.alarms.set(self._look)

    def cancel(self) -> None:
        """Watches no more, until `start`. Safe twice."""
        alarm, self._alarm = self._alarm, 0
        if alarm:
            self._timeout.alarms.cancel(alarm)

    def _look(self) -> None:
        stream, timeout = self._stream, self._timeout
        self._alarm = 0
        arrived = stream.arrived
        if arrived != self._arrived or stream.source_paused:
            self._arrived, self._quiet = arrived, 0
        else:
            self._quiet += 1
            if self._quiet >= timeout.looks:
                stream.lose(timeout.error(stream.instance_id))
                return
        self._alarm = timeout.alarms.set(self._look)
