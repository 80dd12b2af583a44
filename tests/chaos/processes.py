"""Real processes: frontends and workers, with a proxy between each worker and the others.

Over tcp it stands where the worker listens; over a message broker, between the worker and the broker.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp
from dynamo_testing.faults import FaultPlan, FaultProxy, Raw
from dynamo_testing.servers.ports import free_port

from tests.chaos.wire import BrokerRequests, Requests, TcpRequests
from tests.e2e.brokers import Servers

START_DEADLINE = 60.0
STOP_DEADLINE = 30.0

CONFIG = """
workers:
  mock:
    model: {name: mock-model, migration_limit: %(migration_limit)s}
    engine: {use: mocker, fixed_itl_ms: %(itl)s}
    grace_period: 0.5
    drain_timeout: 1
client: {drain_grace: 0.5, write_stall: 2}
frontend: {write_buffer: 65536}
transport: %(transport)s
discovery: %(discovery)s
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


class Part:
    """One `dynamo serve` process, or one of another `command`, that can be started again."""

    def __init__(
        self, config: Path, *options: str, command: Sequence[str] = ("dynamo_runtime.cli.main", "serve")
    ) -> None:
        self._words = [sys.executable, "-m", *command, str(config), *options]
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
        """Start the process; the one before it is gone."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        env = kept | {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(self._log.with_name("cache"))}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, env=env, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    def abandon(self) -> None:
        """End it without a word, and without an event loop; safe twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(5)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """End it without a word."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        await until(lambda: not self.running, STOP_DEADLINE)
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def end(self) -> None:
        """End it, however it is."""
        if not self.running:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            await self.gone()
        except TimeoutError:
            await self.kill()


class Worker(Part):
    """A replica, the proxy that all calls to it go through, and the port of its metrics."""

    def __init__(
        self, config: Path, proxy: FaultProxy, requests: Requests, transport: dict[str, Any], system_port: int
    ) -> None:
        """`transport`: what it has beside the others, so that the proxy is on the way."""
        settings = {f"transport.{key}": value for key, value in transport.items()}
        settings["workers.mock.system_port"] = system_port
        options = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        # All are replica 0: a number would be added to the port.
        super().__init__(config, "--only", "workers.mock", *options)
        self.proxy = proxy
        self.metrics = f"http://127.0.0.1:{system_port}/metrics"
        #: Which requests it was ever sent.
        self.requests = requests

    @property
    def plan(self) -> FaultPlan:
        """What shall happen on the wire to it."""
        return self.proxy.plan


async def proxied(servers: Servers) -> tuple[FaultProxy, Requests, dict[str, Any]]:
    """Return a proxy for one worker, the requests seen there, and the settings that put it on the way."""
    broker, requests = servers.broker, TcpRequests() if servers.broker is None else BrokerRequests()
    port = free_port() if broker is None else broker.port
    proxy = FaultProxy("127.0.0.1", port, tap=requests, framing=None if broker is None else Raw())
    await proxy.start()
    if broker is None:
        return proxy, requests, {"bind": f"127.0.0.1:{port}", "advertise": f"127.0.0.1:{proxy.port}"}
    own = servers.transport(broker.url.replace(str(port), str(proxy.port)))
    del own["use"]
    return proxy, requests, own


class Started(ABC):
    """Something that `async with` starts and ends, also where it did not start as a whole."""

    @abstractmethod
    async def start(self) -> None:
        """Return when everything is there."""

    @abstractmethod
    async def aclose(self) -> None:
        """End everything."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class ProxiedWorkers(Started):
    """Frontends, their workers, and the servers of their profile. `async with` starts and ends all of them."""

    def __init__(
        self,
        folder: Path,
        *,
        profile: str = "tcp-file",
        workers: int = 2,
        frontends: int = 1,
        migration_limit: int = 0,
        itl: float = 10,
        silence: float | None = 2,
    ) -> None:
        """`silence` None: as long as the lease of a worker lives, and a second."""
        self.migration_limit = migration_limit
        self.silence = silence
        self.servers = Servers(profile, folder)
        self._count = workers
        self._config = folder / "config.yaml"
        transport = self.servers.transport() | {"heartbeat": 0.5, "silence": silence}
        if self.servers.broker is None:
            transport["write_stall"] = 2
        values = {"transport": json.dumps(transport), "discovery": json.dumps(self.servers.discovery())}
        self._config.write_text(CONFIG % (values | {"migration_limit": migration_limit, "itl": itl}))
        self.workers: list[Worker] = []
        # Each on a port of its own, so that one that is started again is where it was.
        ports = [free_port() for _ in range(frontends)]
        self.frontends = [Part(self._config, "--only", "frontend", "--set", f"frontend.port={port}") for port in ports]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        self.servers.__enter__()
        for _ in range(self._count):
            self.workers.append(Worker(self._config, *await proxied(self.servers), free_port()))
        for part in (*self.workers, *self.frontends):
            part.start()
        await self.complete()

    async def aclose(self) -> None:
        for part in (*self.frontends, *self.workers):
            await part.end()
        self.servers.__exit__()
        for worker in self.workers:
            await worker.proxy.aclose()
        if self._session is not None:
            await self._session.close()

    def abandon(self) -> None:
        """Leave no process behind, even where the test was cut off and nothing was closed."""
        for part in (*self.frontends, *self.workers):
            part.abandon()
        self.servers.__exit__()

    @property
    def url(self) -> str:
        """The first frontend's."""
        return self.urls[0]

    async def pids(self, url: str) -> set[int]:
        """Return the processes of the workers that a frontend sees; none while it does not listen."""
        try:
            listed = json.loads(await self._get(f"{url}/health"))["instances"]
        except aiohttp.ClientConnectionError:
            return set()
        return {entry["pid"] for entry in listed}

    async def complete(self) -> None:
        """Return when every frontend sees all workers, and none beside."""
        deadline = asyncio.get_running_loop().time() + START_DEADLINE
        wanted = {worker.pid for worker in self.workers}
        for frontend, url in zip(self.frontends, self.urls, strict=True):
            while await self.pids(url) != wanted:
                if not frontend.running:
                    raise RuntimeError("a frontend ended:\n" + frontend.log)
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError("not all workers are seen:\n" + self.logs)
                await asyncio.sleep(0.05)

    async def moves(self) -> float:
        """Return how many answers in the middle have been moved, by all frontends."""
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

    @property
    def misattributed(self) -> list[str]:
        """Log lines that speak of one request and carry the ids of another, or none."""
        lines = [line for part in self.frontends for line in part.log.splitlines()]
        spoken = ((re.search(r"client\.migration: request (\S+) ", line), line) for line in lines)
        return [line for found, line in spoken if found and f" request_id={found[1]}" not in line]

    async def held(self) -> dict[str, float]:
        """Return all accounting gauges of all processes that are not zero."""
        places: dict[str, tuple[str, tuple[str, ...]]]
        places = {f"frontend {number}": (f"{url}/metrics", FRONTEND_GAUGES) for number, url in enumerate(self.urls)}
        places |= {f"worker {worker.pid}": (worker.metrics, WORKER_GAUGES) for worker in self.workers}
        held: dict[str, float] = {}
        for place, (url, gauges) in places.items():
            values = read_metrics(await self._get(url), gauges)
            held |= {f"{place}: {name}": value for name, value in values.items() if value}
        return held

    async def quiet(self, seconds: float) -> dict[str, float]:
        """Return what is still held after so many seconds: nothing, as soon as that is so."""
        deadline = asyncio.get_running_loop().time() + seconds
        while (held := await self.held()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return held

    async def _get(self, url: str) -> str:
        assert self._session is not None
        async with self._session.get(url) as response:
            return await response.text()


def read_metrics(text: str, names: Iterable[str]) -> dict[str, float]:
    """Return the sum over the samples of each of these metrics; one that is not there is an error."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        found = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", line)
        if found:
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return {name: totals[name] for name in names}


async def until(condition: Callable[[], Any], seconds: float) -> Any:
    """Return the first result that is true; for what happens in other processes, and has no event here.

    Raises:
        TimeoutError: there was none in time.
    """
    async with asyncio.timeout(seconds):
        while not (result := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return result
