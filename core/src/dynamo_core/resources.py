"""Resources with a start and a close, and a stack that closes its parts in the reverse order."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

log = logging.getLogger(__name__)


class AsyncResource(ABC):
    """A resource that must be released. ``async with`` closes it at the end."""

    __slots__ = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Give back all that it holds. Safe twice, and without `start`."""


ResourceT = TypeVar("ResourceT", bound=AsyncResource)


class ClosingStack(AsyncResource):
    """The parts of `owner`, a name for the log. The part that was entered last is closed first.

    Being cancelled cuts short the step that runs, never the steps: every later one is still taken, and the cancelling
    is passed on at the end. A step that fails is logged, and keeps no other step from being taken.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._stack = AsyncExitStack()
        #: Whether the closing was cancelled: what it would still wait for is not worth waiting for.
        self.cut = False
        #: The stage that the closing has reached, in a few words; empty before. For any thread.
        self.stage = ""

    def enter(self, resource: ResourceT) -> ResourceT:
        """Take a part in before it is started, so that one whose start fails is closed too."""
        self.push(f"close its {type(resource).__name__}", resource.aclose)
        return resource

    def push(self, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step of closing in; `what` it does is for the log."""

        async def take(*_: object) -> None:
            try:
                await step()
            except asyncio.CancelledError:
                self.cut = True
                raise
            except TimeoutError:
                log.warning("%s could not %s in time", self._owner, what)
            except Exception:
                log.exception("%s could not %s", self._owner, what)

        self._stack.push_async_exit(take)

    def part(self, stage: str) -> ClosingStack:
        """Return a stack within this one. When its turn comes, the log says that closing is at this stage."""
        part = self.enter(ClosingStack(self._owner))

        async def say() -> None:
            self.stage = stage
            log.info(stage)

        self.push("say what it does", say)
        return part

    async def aclose(self) -> None:
        """Take every step. Safe twice."""
        await self._stack.aclose()
