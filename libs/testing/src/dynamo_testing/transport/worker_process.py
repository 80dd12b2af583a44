"""A worker in a process of its own, which checks can freeze and keep busy. Run as a module, it is that process.

What it is run with: ``module:Class`` of the transport, its settings as JSON, and whether it runs on uvloop.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import msgspec
from dynamo_core.contracts.transports.call import Endpoint, ServedContext
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.protocol.records import Instance
from dynamo_core.tasks import TaskSet
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.transport.harness import INSTANCE, Tick

#: Items of an answer; half of them come before the middle.
ITEMS = 6

#: Where a call waits without end.
NOWHERE, DOOR, FIRST, MIDDLE = "", "door", "first", "middle"


class Work(msgspec.Struct):
    """The point at which to wait without end, and the seconds for which to block the event loop.

    That is in the middle of the answer or, `at_once`, before its first item.
    """

    wait: str = NOWHERE
    block: float = 0.0
    at_once: bool = False


WORK = Endpoint("work", Work, Tick)


class Elsewhere:
    """The process, as a check sees it."""

    def __init__(self, process: asyncio.subprocess.Process, instance: Instance) -> None:
        self._process = process
        #: The worker's record.
        self.instance = instance
        #: Calls of it, which end with it at the latest.
        self.calls = TaskSet()

    @classmethod
    async def start(cls, transport: type[Transport], settings: dict[str, Any], *, lease_ttl: float) -> Elsewhere:
        """Start it; `lease_ttl` is what its record says, in seconds."""
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        name = f"{transport.__module__}:{transport.__qualname__}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, name, json.dumps(settings), loop, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        address = json.loads(await process.stdout.readline())
        return cls(process, Instance(instance_id=INSTANCE, address=address, lease_ttl=lease_ttl))

    def freeze(self) -> None:
        """Stop the process, threads and all, as a debugger or a machine without memory does."""
        self._process.send_signal(signal.SIGSTOP)

    async def end(self) -> None:
        """End it, however it is."""
        await self.calls.aclose()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


async def work(request: Work, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
    """Handle a call: ticks, with the waits and blocks that it asks for."""
    if request.wait == DOOR:
        await ctx.stopped()

    async def items() -> AsyncGenerator[Tick, None]:
        if request.at_once:
            time.sleep(request.block)  # noqa: ASYNC251 - what a careless engine does
        if request.wait == FIRST:
            await ctx.stopped()
        for number in range(ITEMS):
            if number == ITEMS // 2:
                if request.wait == MIDDLE:
                    await ctx.stopped()
                # What the event loop has to send leaves before it is blocked.
                await asyncio.sleep(0.05 if request.block else 0)
                time.sleep(request.block)  # noqa: ASYNC251 - what a careless engine does
            yield Tick(number)

    return items()


async def _serve(name: str, settings: dict[str, Any]) -> None:
    module, _, found = name.partition(":")
    kind: type[Transport] = getattr(importlib.import_module(module), found)
    transport = kind(kind.Config.model_validate(settings), Metrics())
    await transport.start()
    served = await transport.serve(INSTANCE, WORK, work)
    sys.stdout.write(json.dumps(served.address) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main() -> None:
    """Serve until it is killed."""
    name, settings, loop = sys.argv[1:]
    factory = importlib.import_module("uvloop").new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_serve(name, json.loads(settings)))


if __name__ == "__main__":
    main()
