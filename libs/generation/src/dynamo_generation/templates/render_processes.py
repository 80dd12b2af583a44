"""Rendering in child processes, which are killed when they take too long or too much memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import msgspec
from dynamo_core import TaskSet
from dynamo_core.errors import InvalidArgument, Unavailable, Unknown

from dynamo_generation.templates import child as template_child
from dynamo_generation.templates.child import MAX_MEMORY, OUT_OF_MEMORY, Job, Rendered, SchemaJob
from dynamo_generation.templates.errors import TemplateFault

#: Processes at a time. More would take the processor time of the event loop.
PROCESSES = max(2, min(4, (os.cpu_count() or 1) // 2))
_GB = 1 << 30
#: Seconds in which a process starts even on a busy machine.
STARTS: Final = 10.0
#: Seconds until a process that was killed is gone, unless the system is in trouble.
_END = 5.0

_T = TypeVar("_T")


class LimitedProcess:
    """One child process, which does one job at a time. `modules` are needed by its jobs beside jinja2.

    Whatever is given up ends the process, in one of the `tasks`.
    """

    def __init__(self, tasks: TaskSet, *modules: str) -> None:
        self._tasks = tasks
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._killed = False
        self._lock = threading.Lock()

    async def start(self) -> None:
        """Return when it can be asked, or has ended: at once, unless it is new. Safe to repeat.

        How long a new one takes depends on the machine, and not on what it is asked: give it a deadline of `STARTS`.
        """
        if not self._ready:
            await self._in_thread(self._wait_for_start)

    async def ask(self, job: Callable[[], Job | SchemaJob], answer: type[_T]) -> _T | None:
        """Return the answer to a job, which is made in a thread; None if the process has ended.

        It must have been started.
        """
        return await self._in_thread(lambda: self._exchange(job(), answer))

    async def end(self, working: asyncio.Task[Any] | None = None) -> int:
        """End it, whatever it does, and then the thread that asks it. Return its exit code."""
        self.kill()
        if working is not None:
            # The thread sees the end of the pipe.
            await asyncio.wait([working], timeout=_END)
        return await asyncio.to_thread(self.close)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        working = self._tasks.spawn(asyncio.to_thread(work), name="ask-process")
        try:
            return await asyncio.shield(working)
        except BaseException:
            # Given up: what it may still answer is of no use.
            self.kill()
            self._tasks.spawn(self.end(working), name="end-process")
            raise

    def _wait_for_start(self) -> None:
        process = self._start()
        if process is not None and process.stdout is not None:
            self._ready = template_child.read(process.stdout) is not None

    def _exchange(self, job: Job | SchemaJob, answer: type[_T]) -> _T | None:
        process = self._process
        if not self._ready or process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            template_child.write(process.stdin, msgspec.json.encode(job))
            message = template_child.read(process.stdout)
        except OSError:
            return None
        return None if message is None else msgspec.json.decode(message, type=answer)

    def kill(self) -> None:
        """End it, whatever it does; from any thread."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> int:
        """Return its exit code when it has ended, which it does soon."""
        process = self._process
        if process is None:
            return 0
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        try:
            return process.wait(_END)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _start(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._process is None and not self._killed:
                self._process = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
                    # Without the folder of the script in the path: its modules must not stand for others.
                    [sys.executable, "-P", str(Path(template_child.__file__)), *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            return self._process


class TemplateProcesses:
    """A few processes, one per template at a time: a runaway template does not hold up the others.

    `timeout` is in seconds, once for waiting and once for rendering.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._idle: list[LimitedProcess] = []
        self._room = asyncio.Semaphore(PROCESSES)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks = TaskSet()
        self._closed = False

    async def render(self, name: str, source: str, values: Callable[[], dict[str, Any]]) -> tuple[str, float]:
        """Return the text of a template, and the seconds of processor time that it took.

        `name` is how messages call the template. `values` is called in a thread.

        Raises:
            InvalidArgument: the template refuses the values.
            TemplateFault: it took too long, or too much memory.
            Unknown: it is broken.
            Unavailable: too many conversations wait to be rendered.
        """
        begun, clock = False, asyncio.get_running_loop().time
        turn = self._turns.setdefault(source, asyncio.Lock())
        try:
            async with asyncio.timeout(self._timeout) as deadline, turn, self._room:
                process = self._idle.pop() if self._idle else LimitedProcess(self._tasks)
                deadline.reschedule(clock() + STARTS)
                await process.start()
                begun = True
                deadline.reschedule(clock() + self._timeout)
                rendered = await self._ask(process, name, source, values)
        except TimeoutError:
            if not begun:
                raise Unavailable("Too many long conversations wait for their chat template to be rendered") from None
            raise TemplateFault(
                f"{name} was stopped: it took more than {self._timeout:g} s (frontend.template_timeout)"
            ) from None
        if rendered.fault is not None:
            raise Unknown(f"the model's chat template is broken: {rendered.fault}")
        if rendered.text is None:
            raise refused(rendered.refusal)
        return rendered.text, rendered.seconds

    async def aclose(self) -> None:
        """End all processes. Safe twice."""
        self._closed = True
        await self._tasks.join(_END)
        await asyncio.gather(*(process.end() for process in self._idle))
        self._idle.clear()

    async def _ask(
        self, process: LimitedProcess, name: str, source: str, values: Callable[[], dict[str, Any]]
    ) -> Rendered:
        rendered = await process.ask(lambda: Job(source, values(), self._timeout), Rendered)
        if rendered is None:
            code = await asyncio.to_thread(process.close)
            why = f"needed more than {MAX_MEMORY // _GB} GB of memory" if code == OUT_OF_MEMORY else "took too long"
            raise TemplateFault(f"{name} was stopped: it {why}")
        if rendered.last or self._closed:
            await process.end()
        else:
            self._idle.append(process)
        return rendered


def refused(reason: object) -> InvalidArgument:
    """Return the error for messages that a template refuses, or cannot deal with."""
    return InvalidArgument(f"The chat template of the model refused the messages: {reason}", field="messages")
