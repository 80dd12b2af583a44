"""Processes that hold a record each, to be killed by checks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import aclosing

from dynamo_core.contracts.discovery import Discovery, WatchEvent, WatchKind

#: What such a process runs, for `format`: what it imports, and the discovery that it makes of its argument.
OWNER = """
import asyncio, sys
from dynamo_telemetry.metrics import Metrics
{imports}

async def main():
    discovery = {discovery}
    await discovery.start()
    lease = await discovery.lease()
    await lease.put(f"v1/instances/{{lease.id:x}}", b"here")
    print(f"{{lease.id:x}}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await discovery.aclose()

asyncio.run(main())
"""


async def start_owner(script: str, place: str) -> tuple[asyncio.subprocess.Process, str]:
    """Return a process that holds a record at a place until it reads a line, and the key of the record."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, place, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return process, f"v1/instances/{(await process.stdout.readline()).decode().strip()}"


async def records_end_with_their_processes(script: str, place: str, make: Callable[[], Discovery]) -> None:
    """Check that the record of a killed process vanishes and another's stays until its process ends."""
    (killed, killed_key), (stays, stays_key) = await asyncio.gather(*(start_owner(script, place) for _ in range(2)))
    try:
        async with asyncio.timeout(30), aclosing(make().watch("v1/")) as events:
            assert {(await anext(events)).key for _ in range(2)} == {killed_key, stays_key}
            assert (await anext(events)).kind is WatchKind.SYNCED

            killed.kill()
            assert await anext(events) == WatchEvent(WatchKind.DELETE, killed_key)
            await stays.communicate(b"end\n")
            assert await anext(events) == WatchEvent(WatchKind.DELETE, stays_key)
    finally:
        for process in (killed, stays):
            if process.returncode is None:
                process.kill()
            await process.wait()
