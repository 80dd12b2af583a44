"""Calls to an engine with a deadline that always holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeVar, cast

from dynamo_core.contracts.engine_boundary import ContractViolation
from dynamo_core.errors import DynamoError
from dynamo_core.tasks import TaskSet

T = TypeVar("T")

#: Seconds for a call that was cut short to end. One that does not, because it catches the cancelling, is left behind.
LAST_WORDS = 1.0


class Overdue(Exception):
    """A call exceeded its deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not return within {seconds:g} s")


class Escaped(Exception):
    """An engine raised an exception that would have ended its caller too."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The end of a call: with `result`, if there is no `error`."""

    result: T | None = None
    error: Exception | None = None


async def within(work: Coroutine[Any, Any, T], seconds: float, *, late: Callable[[], None] = lambda: None) -> T:
    """Return the result of `work`, which is cancelled after `seconds`; before that, `late` is called.

    Raises:
        Overdue: it took longer; also if it did end, but late, because it blocked the event loop.
        Escaped: it raised `CancelledError` by itself, or `SystemExit`.
        Exception: whatever else it raised.
    """
    loop = asyncio.get_running_loop()
    begun = loop.time()
    task = TaskSet().spawn(outcome(work), name="conformance call")
    try:
        await asyncio.wait({task}, timeout=seconds)
        overdue = not task.done() or loop.time() - begun > seconds
        if not task.done():
            late()
    finally:
        await end(task)
    if overdue:
        raise Overdue(seconds)
    ended = task.result()
    if ended.error is not None:
        raise ended.error
    return cast(T, ended.result)


async def outcome(work: Coroutine[Any, Any, T]) -> Outcome[T]:
    """Await `work` and raise nothing of what it raises, unless this itself is cancelled."""
    try:
        return Outcome(await work)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return Outcome(error=Escaped("raised CancelledError though nothing was cancelled"))
    except SystemExit as error:
        return Outcome(error=Escaped(f"raised SystemExit({error.code!r})"))
    except Exception as error:
        return Outcome(error=error)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task that still runs, and return when it has ended or refuses to."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=LAST_WORDS)


def told(error: BaseException) -> str:
    """Return what was raised, in one line: its kind, its message, and where."""
    kind = error.kind if isinstance(error, DynamoError) else type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, Overdue | Escaped):
        return text
    if isinstance(error, ContractViolation):
        return f"cannot be used: {text}"
    return f"raised {kind}{f': {text}' if text else ''}{_place(error)}"


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({PurePath(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
