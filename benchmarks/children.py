"""Servers as child processes: started, waited for until ready, and ended whatever happens."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks.http1 import BadResponse, Endpoint, fetch
from benchmarks.meters import children_of, read_proc

READY_DEADLINE: Final = 30.0
TERM_DEADLINE: Final = 10.0

_POLL: Final = 0.05
_ROOT: Final = Path(__file__).resolve().parents[1]


class ChildFailed(Exception):
    """A server ended or did not get ready; the text holds the end of its output."""


class Children:
    """Starts child processes that end, at the latest, with the `async with` block that owns them."""

    def __init__(self, folder: Path, cpu: int | None) -> None:
        """Record that output goes to files in `folder`; every child runs on `cpu` only, if given."""
        self._folder = folder
        self._cpu = cpu
        self._stack = AsyncExitStack()
        self._logs: dict[str, Path] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def last_words(self) -> str:
        """Return the end of what each child has printed, for those that printed anything."""
        tails = ((name, _tail(log)) for name, log in self._logs.items())
        return "\n".join(f"{name} printed:{tail}" for name, tail in tails if tail)

    async def start(
        self,
        name: str,
        command: Sequence[str],
        ready: Callable[[], Awaitable[bool]],
        *,
        deadline: float = READY_DEADLINE,
    ) -> int:
        """Start `command` in the repository's root, wait until `ready` says so, and return its pid.

        Raise ChildFailed when it ends before that, or is not ready within `deadline` seconds.
        """
        log = self._logs[name] = self._folder / f"{name}.log"
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches only this process, which then ends the child in order.
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=_ROOT,
                start_new_session=True,
            )
        self._stack.push_async_callback(_end, child)
        if self._cpu is not None and child.returncode is None:
            os.sched_setaffinity(child.pid, {self._cpu})
        try:
            async with asyncio.timeout(deadline):
                while not await ready():
                    if child.returncode is not None:
                        raise ChildFailed(f"{name} ended with code {child.returncode}{_tail(log)}")
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            raise ChildFailed(f"{name} was not ready within {deadline:g} s{_tail(log)}") from None
        return child.pid


def parts_of(pid: int) -> dict[str, int]:
    """Return the processes that `dynamo serve` runs as process `pid`, by the part that each was started for."""
    found: dict[str, int] = {}
    for child in children_of(pid):
        arguments = read_proc(child, "cmdline").split("\0")
        if "--only" in arguments:
            found[arguments[arguments.index("--only") + 1]] = child
    return found


def pin(pid: int, cpu: int) -> None:
    """Keep a process, and the threads it has, on one CPU."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {cpu})


async def accepts(port: int) -> bool:
    """Return whether something accepts connections on a loopback port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def answers_ready(port: int) -> bool:
    """Return whether `GET /ready` on a loopback port answers 200."""
    try:
        reply = await fetch(Endpoint("127.0.0.1", port, ""), "/ready", timeout=2.0)
    except (OSError, TimeoutError, BadResponse):
        return False
    return reply.status == 200


async def _end(child: asyncio.subprocess.Process) -> None:
    """Send SIGTERM, and SIGKILL when that does not help in time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:
            return
        child.send_signal(number)
        try:
            async with asyncio.timeout(TERM_DEADLINE):
                await child.wait()
        except TimeoutError:
            continue


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-15:]
    return "".join(f"\n    {line}" for line in lines)
