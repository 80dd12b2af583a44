"""The vLLM stream of one request, which can be stopped in every phase."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from dynamo_core import GenerateContext, TaskSet

T = TypeVar("T")


class OutputStream:
    """An iterator of vLLM's outputs. Once stopped it ends soon, by itself; closing it frees the request in vLLM.

    The first output may take long (a queue, a prompt, a transfer), and a stop must not wait for it: it is read by a
    task of its own, which is cancelled. With `hold` it is not cancelled but left to `tasks`, which waits for the first
    output and frees the request then.
    """

    def __init__(
        self,
        stream: AsyncGenerator[Any, None],
        *,
        abort: Callable[[], Coroutine[Any, Any, None]],
        tasks: TaskSet,
        hold: bool,
    ) -> None:
        self._stream = stream
        self._abort = abort
        self._tasks = tasks
        self._hold = hold
        self._begun = False
        self._handed_over = False
        self._stopped = False
        self._woken: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def stopped_by(self, ctx: GenerateContext) -> Iterator[None]:
        """End the reading within when the context is stopped."""
        forget = ctx.on_stop(self._stop)
        try:
            yield
        finally:
            forget()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Any:
        if self._begun:
            return await anext(self._stream)
        self._begun = True
        return await self._read_first()

    async def aclose(self) -> None:
        """Free the request, unless it has ended, or is left to the tasks. Safe twice."""
        if self._handed_over:
            return
        await self._stream.aclose()

    async def _read_first(self) -> Any:
        self._woken = woken = asyncio.get_running_loop().create_future()
        first = self._tasks.spawn(result_or_error(anext(self._stream)), name="first output of vLLM")
        first.add_done_callback(lambda _: self._wake())
        try:
            if self._stopped:
                # Before it had begun. The stream must begin, or it would not end anything either.
                await asyncio.sleep(0)
            else:
                await woken
        finally:
            self._woken = None
            if not first.done():
                await self._abandon(first)
        if not first.done() or first.cancelled():
            raise StopAsyncIteration
        output, error = first.result()
        if error is not None:
            raise error
        return output

    async def _abandon(self, first: asyncio.Task[Any]) -> None:
        """Let go of a request that has no output yet."""
        if self._hold:
            self._handed_over = True
            self._tasks.spawn(_free_later(first, self._stream), name="free a request after its first output")
            return
        first.cancel()
        await asyncio.wait({first})

    def _stop(self) -> None:
        self._stopped = True
        if self._woken is not None:
            self._wake()
        elif self._begun:
            # The reader waits for the next output: vLLM sends it a last one.
            self._tasks.spawn(self._abort(), name="abort a request of vLLM")

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


async def _free_later(first: asyncio.Task[Any], stream: AsyncGenerator[Any, None]) -> None:
    try:
        await asyncio.wait({first})
    finally:
        if not first.done():
            first.cancel()
            await asyncio.wait({first})
        await stream.aclose()


async def result_or_error(awaited: Awaitable[T]) -> tuple[T | None, Exception | None]:
    """Return the result, or the error in its place. A task whose result is never read then logs no unhandled error."""
    try:
        return await awaited, None
    except Exception as error:
        return None, error
