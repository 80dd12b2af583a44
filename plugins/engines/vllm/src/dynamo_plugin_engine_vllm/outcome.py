"""What came of something that a task waited for, where whoever wants to know may be gone by then."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def outcome(awaited: Awaitable[T]) -> tuple[T | None, Exception | None]:
    """The result, or the error in its place: one that nobody looks at is no failure of the task."""
    try:
        return await awaited, None
    except Exception as error:
        return None, error
