"""The supervisor: one process per part of the config, started again when it dies, ended in order, never orphaned."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_core.backoff import pauses
from dynamo_core.tasks import TaskSet

from dynamo_runtime.assembly.process_roles import FRONTEND, WORKERS
from dynamo_runtime.processes import reaper
from dynamo_runtime.processes.control import CUT, HURRY, VARIABLE, Answerer, ChildLine
from dynamo_runtime.processes.signals import OVERDUE
from dynamo_runtime.settings import Settings

log = logging.getLogger(__name__)

#: Seconds before a process that died is started again; doubled each time up to the second, and jittered.
FIRST_PAUSE = 0.5
LAST_PAUSE = 30.0
#: A process that served, and ran this many seconds, was well: its next death is a first one again.
HEALTHY_AFTER = 30.0
#: Seconds that a process which is still starting may take to end after Ctrl-C; it gives up a little earlier itself.
START_ENDS = 4.6
#: Seconds that a process may take to end after a second signal.
CUT_ENDS = 5.0
#: Seconds beyond its own deadline after which a process is killed: its watchdog has shown by then what it was at.
BEYOND = 6.0
#: The exit code of a wrong set-up: starting again would not help.
MISCONFIGURED = 2


@dataclass(frozen=True, slots=True)
class Part:
    """One process to run: the value of ``--only`` and the replica; None if there is one only.

    `port` is the one that a frontend shares with others, whatever the config says.
    """

    only: str
    replica: int | None = None
    port: int | None = None

    @property
    def name(self) -> str:
        """A word for logs."""
        return self.only if self.replica is None else f"{self.only}-{self.replica}"

    def arguments(self) -> list[str]:
        """Return what its command line has beside the supervisor's own."""
        arguments = ["--only", self.only]
        if self.replica is not None:
            arguments += ["--replica", str(self.replica)]
        if self.port is not None:
            arguments += ["--http-port", str(self.port)]
        return arguments


def parts_of(settings: Settings, workers: Collection[str], port: int | None) -> list[Part]:
    """Return the processes of these workers, and the frontends: workers first, so that a frontend finds some.

    `port` is the one that several frontends share, None for one frontend.
    """
    parts = [Part(WORKERS + name, replica) for name in workers for replica in range(settings.workers[name].replicas)]
    if port is None:
        return [*parts, Part(FRONTEND)]
    return [*parts, *(Part(FRONTEND, replica, port) for replica in range(settings.frontend.processes))]


@dataclass(slots=True, eq=False)
class _Child:
    """A running process and the parent's end of its line."""

    part: Part
    process: asyncio.subprocess.Process
    line: ChildLine
    patience: Callable[[Part], float]

    @property
    def name(self) -> str:
        """The name of its part."""
        return self.part.name

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def ask(self, body: Any, timeout: float) -> Any:
        """Return what it answers; see `ChildLine.ask`."""
        return await self.line.ask(body, timeout)

    def restart(self) -> None:
        """Have it end in order, and so start again."""
        self.end()

    def end(self, *, hurried: bool = False, within: float | None = None) -> None:
        """Ask it to end in order, and kill it if it has not `within` seconds; by itself those of its patience."""
        if hurried:
            self.line.say(HURRY)
        elif self.process.returncode is None:
            self.process.terminate()
        self.kill_after(self.patience(self.part) + BEYOND if within is None else within)

    def kill_after(self, seconds: float) -> None:
        """Kill it if it has not ended after so many seconds, whatever it does."""
        asyncio.get_running_loop().call_later(seconds, self.kill)

    def kill(self) -> None:
        """Kill it if it has not ended."""
        if self.process.returncode is None:
            log.error("%s did not end in time and is killed", self)
            self.process.kill()


class Supervisor:
    """A supervisor of one process per part, until it is asked to stop. `command` starts one, without its part.

    `patience` gives the seconds that a part has to end once it is asked to.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        command: Sequence[str],
        patience: Callable[[Part], float],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = list(parts)
        self._command = list(command)
        self._patience = patience
        self._mark = secrets.token_hex(8)
        self._reaper: asyncio.subprocess.Process | None = None
        self._clock = clock
        self._children: dict[Part, _Child] = {}
        self._tasks = TaskSet()
        self._stopping = asyncio.Event()
        #: Whether a process had to be killed, or ended badly, while everything was stopped.
        self.unclean = False
        #: What answers questions of the children.
        self.answerer: Answerer | None = None
        self._exit: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def names(self) -> list[str]:
        """Return those of all parts."""
        return [part.name for part in self._parts]

    def running(self) -> list[_Child]:
        """Return the processes that there are now."""
        return [child for child in self._children.values() if child.process.returncode is None]

    async def start(self) -> None:
        """Start every part, and go on to keep each running. None of them outlives this process by much."""
        self._reaper = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", reaper.__file__, self._mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for part in self._parts:
            self._tasks.spawn(self._keep(part), name=f"keep-{part.name}")

    async def failed(self) -> str:
        """Return when a part cannot run with this config at all: which, and why."""
        return await asyncio.shield(self._exit)

    async def stop(self, *, hurried: bool) -> None:
        """End the frontends, which finish their streams, and then the workers. What outlives its patience is killed.

        No other part depends on one that is still starting: it is told at once, and has a few seconds if `hurried`.
        """
        self._stopping.set()
        serving = [child for child in self._children.values() if child.line.has_served()]
        starting = [child for child in self._children.values() if child not in serving]
        for child in starting:
            child.end(hurried=hurried, within=START_ENDS if hurried else None)
            log.info("waiting for %s, which is still starting", child)
        try:
            for only in (True, False):
                group = [child for child in serving if (child.part.only == FRONTEND) is only]
                for child in group:
                    child.end(hurried=hurried)
                await self._ended(group)
            await self._ended(starting)
        except asyncio.CancelledError:
            # The second signal: everybody cuts what runs, and has a moment to do so.
            for child in self._children.values():
                child.line.say(CUT)
                child.kill_after(CUT_ENDS)
            await self._ended(self._children.values())
            raise
        finally:
            for child in self.running():
                child.kill()
            await self._ended(self._children.values())
            await self._tasks.aclose()
            if self._reaper is not None:
                # Closes its end of the pipe. It has nothing to do but for a process that was just being started.
                await self._reaper.communicate(b"")

    async def _ended(self, children: Iterable[_Child]) -> None:
        """Return when they have ended, which each does in time or is killed."""
        waiting = [self._tasks.spawn(child.process.wait(), name="wait-child") for child in children]
        if waiting:
            await asyncio.wait(waiting)

    async def _keep(self, part: Part) -> None:
        waits, has_run = pauses(FIRST_PAUSE, LAST_PAUSE), False
        while not self._stopping.is_set():
            begun = self._clock()
            cause, code, served, reason = await self._live(part)
            if self._stopping.is_set():
                return
            # By what it said and not by the clock: on a slow machine a config is found wrong late.
            has_run = has_run or served
            if code == MISCONFIGURED and not has_run:
                log.error("%s cannot run with this config", part.name)
                if not self._exit.done():
                    self._exit.set_result(f"{part.name} cannot run with this config: {reason or 'it said no more'}")
                return
            if served and self._clock() - begun > HEALTHY_AFTER:
                waits = pauses(FIRST_PAUSE, LAST_PAUSE)
            wait = next(waits)
            log.warning("%s ended with %s; starting it again in %.1f s", part.name, cause, wait)
            await asyncio.sleep(wait)

    async def _live(self, part: Part) -> tuple[str, int | None, bool, str]:
        """Run one life of a part: return why it ended, its exit code if any, whether it served, and its reports."""
        try:
            child = await self._spawn(part)
        except OSError as error:
            return f"no process: {error.strerror}", None, False, ""
        async with child.line:
            try:
                code = await child.process.wait()
            finally:
                self._children.pop(part, None)
            self.unclean = self.unclean or (self._stopping.is_set() and code != 0)
            return f"{_cause(code)} (pid {child.process.pid})", code, child.line.has_served(), child.line.reason()

    async def _spawn(self, part: Part) -> _Child:
        theirs, ours = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *part.arguments(),
                env=os.environ | {VARIABLE: str(theirs.fileno()), reaper.MARK: self._mark},
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = self._children[part] = _Child(part, process, ChildLine(ours, self.answerer), self._patience)
        log.info("%s runs as pid %d", part.name, process.pid)
        return child


def _cause(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}" + (" (did not stop in time, or stood still)" if code == OVERDUE else "")


def serve_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a child: this interpreter, ``dynamo serve``, and the arguments of this process."""
    return [sys.executable, "-m", "dynamo_runtime.cli.child", "serve", *arguments]
