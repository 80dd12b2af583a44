"""The supervisor: one process per part of the config, started again when it dies, ended in order, never orphaned."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from dynamo_core.runtime.control import CUT, HURRY, VARIABLE
from dynamo_core.runtime.roles import FRONTEND, WORKERS
from dynamo_core.runtime.signals import OVERDUE
from dynamo_core.settings import Settings
from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)

#: Seconds before a process that died is started again; doubled each time up to the second, and jittered.
FIRST_PAUSE = 0.5
LAST_PAUSE = 30.0
#: A process that ran this many seconds had started well: its next death is a first one again.
HEALTHY_AFTER = 30.0
#: A process that ran this many seconds had a set-up that works: if it is found wrong later, it may be mended.
SOUND_AFTER = 5.0
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
        """What its command line has beside the supervisor's own."""
        arguments = ["--only", self.only]
        if self.replica is not None:
            arguments += ["--replica", str(self.replica)]
        if self.port is not None:
            arguments += ["--http-port", str(self.port)]
        return arguments


def parts_of(settings: Settings, workers: Collection[str], port: int | None) -> list[Part]:
    """The processes of these workers, and the frontends: workers first, so that a frontend finds some.

    `port` is the one that several frontends share, None for one frontend.
    """
    parts = [Part(WORKERS + name, replica) for name in workers for replica in range(settings.workers[name].replicas)]
    if port is None:
        return [*parts, Part(FRONTEND)]
    return [*parts, *(Part(FRONTEND, replica, port) for replica in range(settings.frontend.processes))]


@dataclass(slots=True)
class _Child:
    """A running process and the parent's end of its pipe."""

    process: asyncio.subprocess.Process
    pipe: int
    begun: float = field(default_factory=time.monotonic)

    def say(self, word: bytes) -> None:
        """Writes to the pipe; a child that is gone does not mind."""
        try:
            os.write(self.pipe, word)
        except OSError:
            log.debug("process %d does not listen any more", self.process.pid)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if the process is still there."""
        if self.process.returncode is None:
            self.process.send_signal(number)


class Supervisor:
    """Runs a part per process until it is asked to stop. `command` is what starts one, without its part."""

    def __init__(
        self, parts: Sequence[Part], command: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._parts = list(parts)
        self._command = list(command)
        self._clock = clock
        self._children: dict[Part, _Child] = {}
        self._tasks = TaskSet()
        self._stopping = asyncio.Event()
        #: Whether a process had to be killed, or ended badly, while everything was stopped.
        self.unclean = False
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """The running processes by the names of their parts."""
        return {part.name: child.process.pid for part, child in self._children.items()}

    async def start(self) -> None:
        """Starts every part, and goes on to keep each running."""
        for part in self._parts:
            self._tasks.spawn(self._keep(part), name=f"keep-{part.name}")

    async def failed(self) -> int:
        """Returns the exit code when a part cannot run at all."""
        return await asyncio.shield(self._exit)

    async def stop(self, *, hurried: bool, deadline: float) -> None:
        """Ends the frontends, which finish their streams, and then the workers. What outlives `deadline` is killed."""
        self._stopping.set()
        end = asyncio.get_running_loop().time() + deadline
        try:
            for only in (True, False):
                group = [child for part, child in self._children.items() if (part.only == FRONTEND) is only]
                for child in group:
                    child.say(HURRY) if hurried else child.send(signal.SIGTERM)
                await self._ended(group, end)
        except asyncio.CancelledError:
            # The second signal: everybody cuts what runs, and has a moment to do so.
            for child in self._children.values():
                child.say(CUT)
            await self._ended(list(self._children.values()), asyncio.get_running_loop().time() + 5.0)
            raise
        finally:
            await self._kill()

    async def _ended(self, children: list[_Child], end: float) -> None:
        waiting = [self._tasks.spawn(child.process.wait(), name="wait-child") for child in children]
        if waiting:
            await asyncio.wait(waiting, timeout=max(0.0, end - asyncio.get_running_loop().time()))

    async def _kill(self) -> None:
        for part, child in list(self._children.items()):
            if child.process.returncode is None:
                log.error("%s (pid %d) did not end in time and is killed", part.name, child.process.pid)
                child.send(signal.SIGKILL)
                await child.process.wait()
        await self._tasks.aclose()

    async def _keep(self, part: Part) -> None:
        pause, has_run = FIRST_PAUSE, False
        while not self._stopping.is_set():
            begun = self._clock()
            cause, code = await self._live(part)
            if self._stopping.is_set():
                return
            lived = self._clock() - begun
            has_run = has_run or lived > SOUND_AFTER
            if code == MISCONFIGURED and not has_run:
                log.error("%s cannot run with this config", part.name)
                self._give_up(MISCONFIGURED)
                return
            if lived > HEALTHY_AFTER:
                pause = FIRST_PAUSE
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311 - spreads restarts, guards nothing
            log.warning("%s ended with %s; starting it again in %.1f s", part.name, cause, wait)
            await asyncio.sleep(wait)
            pause = min(pause * 2, LAST_PAUSE)

    async def _live(self, part: Part) -> tuple[str, int | None]:
        """One life of a part: why it ended, and its exit code if it had one."""
        try:
            child = await self._spawn(part)
        except OSError as error:
            return f"no process: {error.strerror}", None
        try:
            code = await child.process.wait()
        finally:
            self._children.pop(part, None)
            os.close(child.pipe)
        self.unclean = self.unclean or (self._stopping.is_set() and code != 0)
        return f"{_cause(code)} (pid {child.process.pid})", code

    async def _spawn(self, part: Part) -> _Child:
        theirs, ours = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *part.arguments(),
                env=os.environ | {VARIABLE: str(theirs)},
                pass_fds=[theirs],
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        child = self._children[part] = _Child(process, ours, self._clock())
        log.info("%s runs as pid %d", part.name, process.pid)
        return child

    def _give_up(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)


def _cause(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}" + (" (did not stop in time, or stood still)" if code == OVERDUE else "")


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a child: this interpreter, ``dynamo serve``, and the arguments of this process."""
    return [sys.executable, "-m", "dynamo_core.cli.main", "serve", *arguments]
