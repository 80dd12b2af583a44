"""One connection through the proxy: two lanes, whose ends are passed on."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

from dynamo_testing.faults.framing import Frame, Framing, FramingError
from dynamo_testing.faults.lane import Lane
from dynamo_testing.faults.plan import Direction, FaultPlan, Passing

log = logging.getLogger(__name__)

#: Bytes read at once.
CHUNK = 64 * 1024

#: Seconds between two pieces of a throttled direction.
TICK = 0.02

#: Called with every frame before anything happens to it.
Tap = Callable[[Passing], None]


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST; what was not sent is lost."""
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Link:
    """A client and the server that it reached. `run` carries until both directions are over."""

    def __init__(
        self,
        number: int,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        framing: Framing,
        plan: FaultPlan,
        tap: Tap | None,
    ) -> None:
        self.number = number
        self.over = asyncio.Event()
        self._writers = client[1], server[1]
        self._framing = framing
        self._plan = plan
        self._tap = tap
        self.up = _Lane(self, Direction.UP, client[0], server[1])
        self.down = _Lane(self, Direction.DOWN, server[0], client[1])

    async def run(self) -> None:
        """Carry both directions; close both connections on every path."""
        try:
            async with asyncio.TaskGroup() as group:
                for lane, back in ((self.up, self.down), (self.down, self.up)):
                    group.create_task(self._carry(lane, back), name=f"fault-proxy-{self.number}-{lane.direction.name}")
            for writer in self._writers:
                writer.close()
        except BaseException:
            self.cut()
            raise
        finally:
            self._plan.forget(self.number)
            for writer in self._writers:
                with suppress(OSError):
                    await writer.wait_closed()

    async def _carry(self, lane: _Lane, back: _Lane) -> None:
        try:
            await lane.run(self._framing, self._plan, self._tap)
        except _SourceLost:
            self._ended(lane)
        except _SinkLost:
            # That the receiver is gone is news in the other direction.
            self._ended(back)
            await lane.forget()
        except FramingError as error:
            log.warning("connection %d, %s: %s", self.number, lane.direction.value, error)
            self.cut()

    def _ended(self, lane: _Lane) -> None:
        """Record that the connection at the beginning of this lane broke."""
        if not lane.silent:
            self.cut()

    def cut(self) -> None:
        """Reset both ends. Safe twice."""
        self.over.set()
        for writer in self._writers:
            reset(writer)


class _SourceLost(Exception):
    """Nothing more can be read."""


class _SinkLost(Exception):
    """Nothing more can be written."""


class _Lane(Lane):
    def __init__(
        self, link: Link, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.direction = direction
        self.silent = False
        self._link = link
        self._reader = reader
        self._writer = writer
        self._rate: float | None = None
        self._late: Frame | None = None

    async def run(self, framing: Framing, plan: FaultPlan, tap: Tap | None) -> None:
        """Carry until the end, and tell the end."""
        splitter, number = framing.splitter(), 0
        while data := await self._read():
            if self._stopped():
                continue
            for frame in splitter.feed(data):
                passing = Passing(self._link.number, self.direction, number, frame.body)
                number += 1
                if tap is not None:
                    tap(passing)
                fault = plan.fault_for(frame, passing)
                late, self._late = self._late, None
                if fault is None:
                    await self.send(frame.data)
                else:
                    await fault.carry(frame, self)
                if late is not None:
                    await self.send(late.data)
                if self._stopped():
                    break
        if self._late is not None:
            await self.send(self._late.data)
        await self.send(splitter.rest())
        if not self._stopped():
            with suppress(OSError):
                self._writer.write_eof()

    def _stopped(self) -> bool:
        """Return whether nothing passes any more."""
        return self.silent or self._link.over.is_set()

    async def forget(self) -> None:
        """Read on, and drop it, until the source ends."""
        with suppress(_SourceLost):
            while await self._read():
                pass

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK)
        except OSError as error:
            raise _SourceLost from error

    async def send(self, data: bytes) -> None:
        if self._rate is None:
            await self._write(data)
            return
        size = max(1, int(self._rate * TICK))
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            await self.pause(len(piece) / self._rate)
            await self._write(piece)

    async def _write(self, data: bytes) -> None:
        if not data or self._stopped():
            return
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise _SinkLost from error

    async def pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._link.over.wait()

    def hold_back(self, frame: Frame) -> None:
        self._late = frame

    def throttle(self, rate: float) -> None:
        self._rate = rate

    def silence(self, *, both: bool) -> None:
        for lane in (self._link.up, self._link.down) if both else (self,):
            lane.silent = True

    def cut(self) -> None:
        self._link.cut()
