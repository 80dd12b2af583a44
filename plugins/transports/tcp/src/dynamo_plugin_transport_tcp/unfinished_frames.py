"""A bound on the bytes of unfinished frames, over all connections of a process.

The callers of a host may hold as much as they leave free. Beyond that only the connection goes on whose frame the host
has begun first; its others are not read meanwhile. While one waits, a connection whose frame does not grow is cut.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

#: Bytes of an unfinished frame from which on it counts.
LARGE = 64 * 1024
#: Seconds between two looks at how far frames have grown, and the bytes that they are to grow by.
INTERVAL = 0.25
GROWTH = 256 * 1024
#: Looks in a row at which a frame may not have grown: the event loop may have been blocked before one.
LOOKS = 2


class Reader(Protocol):
    """A connection that reads frames."""

    @property
    def host(self) -> str:
        """The address of the other end."""

    def hold_reading(self) -> None:
        """Read nothing until `go_on_reading`."""

    def go_on_reading(self) -> None:
        """Read again."""

    def cut_reading(self) -> None:
        """End: the frame does not grow while others wait."""


class UnfinishedFrames:
    """Knows how many bytes each connection holds of an unfinished frame, and has some of them wait."""

    def __init__(self, most: int) -> None:
        self._free = most
        #: By host, in the order in which the frames were begun.
        self._held: dict[str, dict[Reader, int]] = {}
        self._waiting: dict[Reader, None] = {}
        #: How much each connection held at the last look, and at how many looks its frame had not grown.
        self._seen: dict[Reader, tuple[int, int]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def update(self, reader: Reader, held: int) -> None:
        """Note that a connection holds so many bytes of an unfinished frame now."""
        before = self._held.get(reader.host, {}).get(reader, 0)
        if before and (held <= LARGE or held < before):
            # That frame is finished.
            self.remove(reader)
            before = 0
        if held <= LARGE:
            return
        self._held.setdefault(reader.host, {})[reader] = held
        self._free -= held - before
        if not self._may_read(reader):
            self._waiting[reader] = None
            reader.hold_reading()
            if self._timer is None:
                self._seen = {}
                self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._look)

    def remove(self, reader: Reader) -> None:
        """Note that a connection holds nothing any more. Safe twice."""
        held = self._held.get(reader.host, {})
        if reader not in held:
            return
        self._free += held.pop(reader)
        if not held:
            del self._held[reader.host]
        self._waiting.pop(reader, None)
        for other in [one for one in self._waiting if self._may_read(one)]:
            del self._waiting[other]
            self._seen.pop(other, None)
            other.go_on_reading()
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _may_read(self, reader: Reader) -> bool:
        held = self._held[reader.host]
        return reader is next(iter(held)) or sum(held.values()) <= self._free

    def _look(self) -> None:
        seen, self._seen = self._seen, {}
        stalled = []
        for held in self._held.values():
            for reader, size in held.items():
                last, looks = seen.get(reader, (size, -1))
                looks = 0 if size - last >= GROWTH or size < last else looks + 1
                self._seen[reader] = size, looks
                if looks >= LOOKS and reader not in self._waiting:
                    stalled.append(reader)
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._look)
        for reader in stalled:
            reader.cut_reading()
