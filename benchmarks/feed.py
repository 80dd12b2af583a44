"""What the extension `feed` costs a frontend: CPU and memory, with 0, 1 and 20 readers, one of which reads nothing.

Events of a steady number of requests a second are given to the extension as core gives them, beside as many workers as
asked for. The CPU time of the same without the extension is taken off. Readers are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from dynamo_core.contracts.requests.request_events import RequestEvent
from dynamo_plugin_extension_feed.feed import FeedConfig, FeedExtension
from dynamo_testing.extension.host import TOKEN, ExtensionHost
from dynamo_testing.extension.sample_events import answered

from benchmarks.loops import run

#: Turns of the event loop between which events come.
_TURNS: Final = 50
_MB: Final = 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks feed`."""
    parser.add_argument("--workers", type=int, default=1000, help="how many workers there are")
    parser.add_argument("--rate", type=int, default=1000, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each round takes")


def run_feed(options: argparse.Namespace) -> int:
    """Print a row for each number of readers."""
    return run(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    bare = await _events_alone(options)
    print(f"{options.workers} workers, {options.rate} requests/s; without the feed {bare:.1%} of a core")
    print(f"{'READERS':<28}{'CPU':>8}{'MEMORY':>12}{'SIZE':>10}")
    for readers, stalled in ((0, 0), (1, 0), (20, 0), (20, 1)):
        cpu, memory, size = await _round(options, readers, stalled)
        name = f"{readers}, {stalled} reads nothing" if stalled else str(readers)
        print(f"{name:<28}{cpu - bare:>8.1%}{memory / _MB:>9.1f} MiB{size / 1024:>6.0f} KiB")
    return 0


async def _events_alone(options: argparse.Namespace) -> float:
    def publish(event: RequestEvent) -> None:
        """Drop the event: no extension listens."""

    began = time.process_time()
    await _requests(options, publish)
    return (time.process_time() - began) / float(options.seconds)


async def _round(options: argparse.Namespace, readers: int, stalled: int) -> tuple[float, int, int]:
    """Return CPU as a share of a core, memory in bytes, and the bytes of a state."""
    before = _resident()
    host = ExtensionHost(lambda services: FeedExtension(FeedConfig(), services), workers=range(1, options.workers + 1))
    async with AsyncExitStack() as stack:
        await host.start()
        stack.push_async_callback(host.aclose)
        for _ in range(readers - stalled):
            await stack.enter_async_context(_Reader(host.url))
        for _ in range(stalled):
            stack.enter_context(_stalled(host.url))
        began = time.process_time()
        await _requests(options, host.publish)
        cpu = (time.process_time() - began) / options.seconds
        memory = _resident() - before
        async with host.asked("GET", "/admin/state", token=TOKEN) as answer:
            size = len(await answer.read())
    return cpu, memory, size


async def _requests(options: argparse.Namespace, publish: object) -> None:
    assert callable(publish)
    loop = asyncio.get_running_loop()
    began, number = loop.time(), 0
    for turn in range(int(options.seconds * _TURNS)):
        for _ in range(options.rate // _TURNS):
            number += 1
            for event in answered(f"request-{number}", 5):
                publish(event)
        await asyncio.sleep(began + (turn + 1) / _TURNS - loop.time())


class _Reader:
    """A process that reads the feed."""

    def __init__(self, url: str) -> None:
        self._words = ["curl", "-sN", "-o", "/dev/null", "-H", f"Authorization: Bearer {TOKEN}", f"{url}/admin/feed"]

    async def __aenter__(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self._words)

    async def __aexit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


def _stalled(url: str) -> socket.socket:
    """Return a reader that asks, and then reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((host, int(port)))
    reader.sendall(f"GET /admin/feed HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    return reader


def _resident() -> int:
    """Return bytes of memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
