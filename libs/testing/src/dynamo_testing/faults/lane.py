"""What a fault can do with the direction it happens in."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dynamo_testing.faults.framing import Frame


class Lane(ABC):
    """One direction of one connection, as a fault sees it."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Passes bytes on, no faster than the other end takes them; nothing if the lane is silent."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Waits so long, or until the connection is over."""

    @abstractmethod
    def hold_back(self, frame: Frame) -> None:
        """The frame goes after the next one."""

    @abstractmethod
    def throttle(self, rate: float) -> None:
        """From now on at most so many bytes a second."""

    @abstractmethod
    def silence(self, *, both: bool) -> None:
        """From now on nothing passes: in this direction, or in both. What comes is read and forgotten."""

    @abstractmethod
    def cut(self) -> None:
        """Resets both ends at once."""
