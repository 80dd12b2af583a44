"""The kinds of faults of a frame and of the bytes after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

from dynamo_testing.faults.framing import Frame
from dynamo_testing.faults.lane import Lane


class Fault(ABC):
    """Something that happens to a frame. Tests may write their own."""

    __slots__ = ()

    def fits(self, frame: Frame) -> bool:
        """Return whether it can happen to this frame; others are not counted."""
        return True

    @abstractmethod
    async def carry(self, frame: Frame, lane: Lane) -> None:
        """Take the frame on its way, or do not. The next one waits until this returns."""


@dataclass(frozen=True, slots=True)
class Delay(Fault):
    """The frame and all after it are late by some seconds, in their order."""

    seconds: float

    async def carry(self, frame: Frame, lane: Lane) -> None:
        await lane.pause(self.seconds)
        await lane.send(frame.data)


@dataclass(frozen=True, slots=True)
class Cut(Fault):
    """The connection is reset (RST) at both ends. Of the frame, the first `keep` bytes still pass."""

    keep: int = 0

    async def carry(self, frame: Frame, lane: Lane) -> None:
        if self.keep:
            await lane.send(frame.data[: self.keep])
        lane.cut()


@dataclass(frozen=True, slots=True)
class HalfOpen(Fault):
    """Nothing passes in the frame's direction from it on, not even an end; the other direction works."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        lane.silence(both=False)


@dataclass(frozen=True, slots=True)
class BlackHole(Fault):
    """Nothing passes either way from this frame on, not even an end; both connections stay open."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        lane.silence(both=True)


@dataclass(frozen=True, slots=True)
class Throttle(Fault):
    """The frame's direction carries a limited number of bytes a second from it on, and reads no faster."""

    rate: float

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise ValueError("`rate` must be more than 0; for a direction that carries nothing, use HalfOpen")

    async def carry(self, frame: Frame, lane: Lane) -> None:
        lane.throttle(self.rate)
        await lane.send(frame.data)


@dataclass(frozen=True, slots=True)
class Corrupt(Fault):
    """One byte of the body is another: `flip` says which of its bits change. The length stays.

    `offset` counts from the end if it is negative. Bodies that have no such byte do not fit.
    """

    offset: int = 0
    flip: int = 0xFF

    def __post_init__(self) -> None:
        if not 0 < self.flip < 256:
            raise ValueError("`flip` must be from 1 to 255, or else nothing changes")

    def fits(self, frame: Frame) -> bool:
        return -len(frame.body) <= self.offset < len(frame.body)

    async def carry(self, frame: Frame, lane: Lane) -> None:
        body = bytearray(frame.body)
        body[self.offset] ^= self.flip
        await lane.send(frame.head + body)


@dataclass(frozen=True, slots=True)
class Flip(Fault):
    """One bit of the frame is another, of its head as well as of its body; `dice` draws which."""

    dice: Random

    async def carry(self, frame: Frame, lane: Lane) -> None:
        data = bytearray(frame.data)
        bit = self.dice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        await lane.send(bytes(data))


@dataclass(frozen=True, slots=True)
class Drop(Fault):
    """The frame is lost; the next one follows as if nothing were missing."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Duplicate(Fault):
    """The frame comes twice."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        await lane.send(frame.data)
        await lane.send(frame.data)


@dataclass(frozen=True, slots=True)
class Reorder(Fault):
    """The frame comes after the next one of its direction; if there is none, at the end."""

    async def carry(self, frame: Frame, lane: Lane) -> None:
        lane.hold_back(frame)
