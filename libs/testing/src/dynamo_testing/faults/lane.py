"""One direction of a proxied connection, and what a fault can do to it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dynamo_testing.faults.framing import Frame


class Lane(ABC):
    """One direction of one connection, as a fault sees it."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Pass bytes on, no faster than the other end takes them; nothing if the lane is silent."""

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait so long, or until the connection is over."""

    @abstractmethod
    def hold_back(self, frame: Frame) -> None:
        """Send the frame after the next one."""

    @abstractmethod
    def throttle(self, rate: float) -> None:
        """Pass at most so many bytes a second from now on."""

    @abstractmethod
    def silence(self, *, both: bool) -> None:
        """Let nothing pass from now on, in this direction or in both: read and drop what comes."""

    @abstractmethod
    def cut(self) -> None:
        """Reset both ends at once."""
