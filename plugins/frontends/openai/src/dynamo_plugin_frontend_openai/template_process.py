"""Rendering in processes of their own, which are ended when they take too long or too much memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from dynamo_core import TaskSet
from dynamo_core.errors import InvalidArgument, Unavailable, Unknown

from dynamo_plugin_frontend_openai import template_child
from dynamo_plugin_frontend_openai.errors import TemplateFault
from dynamo_plugin_frontend_openai.template_child import MAX_MEMORY, OUT_OF_MEMORY, Job, Rendered

#: Processes at a time. More would take the processor time of the event loop.
PROCESSES = max(2, min(4, (os.cpu_count() or 1) // 2))
_GB = 1 << 30
#: Seconds until a process that was killed is gone, unless the system is in trouble.
_END = 5.0


class LimitedProcess:
    """One process, started when it is first asked. `ask` is called by one thread at a time, and blocks."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()

    def ask(self, job: bytes) -> bytes | None:
        """The answer to a job; None if the process has ended."""
        process = self._start()
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            template_child.write(process.stdin, job)
            return template_child.read(process.stdout)
        except OSError:
            return None

    def kill(self) -> None:
        """Ends it, whatever it does; from any thread."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> int:
        """Returns its exit code when it has ended, which it does soon."""
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
                    [sys.executable, "-P", str(Path(template_child.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            return self._process


class TemplateProcesses:
    """A few processes, of which a template has one at a time: one that runs away does not hold up the others.

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
        """The text of a template, and the seconds of processor time that it took.

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
                begun = True
                deadline.reschedule(clock() + self._timeout)
                rendered = await self._ask(name, source, values)
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
        """Ends all processes. Safe twice."""
        self._closed = True
        await self._tasks.join(_END)
        await asyncio.gather(*(self._end(process) for process in self._idle))
        self._idle.clear()

    async def _ask(self, name: str, source: str, values: Callable[[], dict[str, Any]]) -> Rendered:
        process = self._idle.pop() if self._idle else LimitedProcess()
        asking = self._tasks.spawn(asyncio.to_thread(self._exchange, process, source, values), name="ask-template")
        try:
            rendered = await asyncio.shield(asking)
        except BaseException:
            # Given up: what it may still answer is of no use.
            process.kill()
            self._tasks.spawn(self._end(process, asking), name="end-template")
            raise
        if rendered is None:
            code = await asyncio.to_thread(process.close)
            why = f"needed more than {MAX_MEMORY // _GB} GB of memory" if code == OUT_OF_MEMORY else "took too long"
            raise TemplateFault(f"{name} was stopped: it {why}")
        if rendered.last or self._closed:
            await self._end(process)
        else:
            self._idle.append(process)
        return rendered

    def _exchange(self, process: LimitedProcess, source: str, values: Callable[[], dict[str, Any]]) -> Rendered | None:
        """The answer of a process; None if it has ended."""
        answer = process.ask(msgspec.json.encode(Job(source, values(), self._timeout)))
        return None if answer is None else msgspec.json.decode(answer, type=Rendered)

    async def _end(self, process: LimitedProcess, asking: asyncio.Task[Rendered | None] | None = None) -> None:
        """Ends a process; before that the thread that asks it, which sees the end of the pipe."""
        process.kill()
        if asking is not None:
            await asyncio.wait([asking], timeout=_END)
        await asyncio.to_thread(process.close)


def refused(reason: object) -> InvalidArgument:
    """The error for messages that a template refuses, or cannot deal with."""
    return InvalidArgument(f"The chat template of the model refused the messages: {reason}", field="messages")
