"""Real processes over tcp and the file discovery: frontends, and workers that are each reached through a proxy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import aiohttp
from dynamo_core.testing.faults import FaultPlan, FaultProxy

from tests.chaos.wire import Requests

START_DEADLINE = 20.0
STOP_DEADLINE = 15.0

CONFIG = """
workers:
  mock:
    model: {name: mock-model, migration_limit: %(migration_limit)s}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    grace_period: 0.5
    drain_timeout: 1
client: {drain_grace: 0.5, write_stall: 2}
frontend: {write_buffer: 65536}
transport: {use: tcp, heartbeat: 0.5, silence: %(silence)s, write_stall: %(silence)s}
discovery: {use: file, path: "%(folder)s", ttl: 2}
"""

#: What must be back at zero when nothing runs.
FRONTEND_GAUGES = (
    "dynamo_frontend_active_requests",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_queued_requests",
)
WORKER_GAUGES = (
    "dynamo_component_inflight_requests",
    "dynamo_engine_request",
    "dynamo_request_queue",
    "dynamo_mocker_running_requests",
    "dynamo_mocker_waiting_requests",
    "dynamo_mocker_kv_used_blocks",
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Part:
    """One `dynamo serve` process, that can be started again."""

    def __init__(self, config: Path, *options: str) -> None:
        self._words = [sys.executable, "-m", "dynamo_core.cli.main", "serve", str(config), *options]
        self._log = config.with_name(f"log-{free_port()}")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def start(self) -> None:
        """Starts the process; the one before it is gone."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        env = kept | {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(self._log.with_name("cache"))}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, env=env, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def abandon(self) -> None:
        """Ends it without a word, and without an event loop; safe twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(5)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Ends it without a word."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self) -> int:
        """Waits for its end; the exit code."""
        assert self._process is not None
        await until(lambda: not self.running, STOP_DEADLINE)
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def end(self) -> None:
        """Ends it, however it is."""
        if not self.running:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            await self.gone()
        except TimeoutError:
            await self.kill()


class Worker(Part):
    """A replica, and the wire to it. It binds to a port of its own, and advertises that of its proxy."""

    def __init__(self, config: Path, number: int, port: int, proxy: FaultProxy, requests: Requests) -> None:
        options = ["--only", "workers.mock", "--replica", str(number)]
        for key, value in (("bind", port), ("advertise", proxy.port)):
            options += ["--set", f"transport.{key}=127.0.0.1:{value}"]
        super().__init__(config, *options)
        self.proxy = proxy
        #: Which requests it was ever sent.
        self.requests = requests

    @property
    def plan(self) -> FaultPlan:
        """What shall happen on the wire to it."""
        return self.proxy.plan


class ProxiedWorkers:
    """Frontends and their workers. `async with` starts them, and ends them and their proxies."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        frontends: int = 1,
        migration_limit: int = 0,
        itl: float = 10,
        silence: float = 2,
    ) -> None:
        self.migration_limit = migration_limit
        self.silence = silence
        self._count = workers
        self._discovery = folder / "discovery"
        self._config = folder / "config.yaml"
        values = {"migration_limit": migration_limit, "itl": itl, "silence": silence, "folder": self._discovery}
        self._config.write_text(CONFIG % values)
        self.workers: list[Worker] = []
        # Each on a port of its own, so that one that is started again is where it was.
        ports = [free_port() for _ in range(frontends)]
        self.frontends = [Part(self._config, "--only", "frontend", "--set", f"frontend.port={port}") for port in ports]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        try:
            for number in range(self._count):
                requests, port = Requests(), free_port()
                proxy = FaultProxy("127.0.0.1", port, tap=requests)
                await proxy.start()
                self.workers.append(Worker(self._config, number, port, proxy, requests))
            for part in (*self.workers, *self.frontends):
                part.start()
            await self.complete()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        for part in (*self.frontends, *self.workers):
            await part.end()
        for worker in self.workers:
            await worker.proxy.aclose()
        if self._session is not None:
            await self._session.close()

    def abandon(self) -> None:
        """Leaves no process behind, even where the test was cut off and nothing was closed."""
        for part in (*self.frontends, *self.workers):
            part.abandon()

    @property
    def url(self) -> str:
        """The first frontend's."""
        return self.urls[0]

    async def pids(self, url: str) -> set[int]:
        """The processes of the workers that a frontend sees; none while it does not listen."""
        try:
            listed = json.loads(await self._get(f"{url}/health"))["instances"]
        except aiohttp.ClientConnectionError:
            return set()
        return {entry["pid"] for entry in listed}

    async def complete(self) -> None:
        """Returns when every frontend sees all workers, and none beside."""
        deadline = asyncio.get_running_loop().time() + START_DEADLINE
        wanted = {worker.pid for worker in self.workers}
        for frontend, url in zip(self.frontends, self.urls, strict=True):
            while await self.pids(url) != wanted:
                if not frontend.running:
                    raise RuntimeError("a frontend ended:\n" + frontend.log)
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError("not all workers are seen:\n" + self.logs)
                await asyncio.sleep(0.05)

    def wipe(self) -> None:
        """Removes the folder of the discovery, with all that is in it."""
        # What a process writes meanwhile may stand in the way, and is gone with the next look.
        while self._discovery.exists():
            shutil.rmtree(self._discovery, ignore_errors=True)

    async def moves(self) -> float:
        """How many answers in the middle have been moved, by all frontends."""
        name = "dynamo_frontend_model_migration_total"
        counted = 0.0
        for url in self.urls:
            for line in (await self._get(f"{url}/metrics")).splitlines():
                if line.startswith(f"{name}{{") and 'migration_type="ongoing_request"' in line:
                    counted += float(line.split()[-1])
        return counted

    @property
    def logs(self) -> str:
        """What all processes have logged."""
        return "\n".join(part.log for part in (*self.frontends, *self.workers))

    async def held(self) -> dict[str, float]:
        """All accounting gauges of all processes that are not zero."""
        places: dict[str, tuple[str, tuple[str, ...]]]
        places = {f"frontend {number}": (url, FRONTEND_GAUGES) for number, url in enumerate(self.urls)}
        places |= {f"worker {pid}": (url, WORKER_GAUGES) for pid, url in self._system_urls().items()}
        held: dict[str, float] = {}
        for place, (url, gauges) in places.items():
            values = read_metrics(await self._get(f"{url}/metrics"), gauges)
            held |= {f"{place}: {name}": value for name, value in values.items() if value}
        return held

    async def quiet(self, seconds: float) -> dict[str, float]:
        """What is still held after so many seconds: nothing, as soon as that is so."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (held := await self.held()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return held

    def _system_urls(self) -> dict[int, str]:
        """Where the workers that run have their metrics, by pid: as their records in discovery say."""
        pids = {worker.pid for worker in self.workers}
        urls: dict[int, str] = {}
        for path in (self._discovery / "records").glob("v1%2Finstances*"):
            try:
                record = json.loads(path.read_bytes().partition(b"\n")[2])
            except FileNotFoundError:
                continue
            if record["pid"] in pids:
                urls[record["pid"]] = record["system_url"]
        assert urls.keys() == pids, "a worker has no record"
        return urls

    async def _get(self, url: str) -> str:
        assert self._session is not None
        async with self._session.get(url) as response:
            return await response.text()


def read_metrics(text: str, names: Iterable[str]) -> dict[str, float]:
    """The sum over the samples of each of these metrics; one that is not there is an error."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", line)
        if found:
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return {name: totals[name] for name in names}


async def until(condition: Callable[[], Any], seconds: float) -> Any:
    """The first result that is true; for what happens in other processes, and has no event here.

    Raises:
        TimeoutError: there was none in time.
    """
    async with asyncio.timeout(seconds):
        while not (result := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return result
