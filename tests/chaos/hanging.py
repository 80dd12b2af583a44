"""Fleets whose workers hang in every way, and a crowd that has requests in every phase on the worker that does.

Two models are served by three workers each, one without migration and one with. The first worker of each is killed, so
that its requests move. Then the second one hangs, with requests of its own and with moved ones, before their first
token and in mid-answer. The third goes on.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from dynamo_testing.faults import Direction, FaultPlan, FaultProxy, HalfOpen
from dynamo_testing.servers.ports import free_port

from tests.chaos.client import Client
from tests.chaos.history import Asked, History
from tests.chaos.processes import Part, Started, proxied, until
from tests.chaos.wire import Requests
from tests.e2e.brokers import Servers

#: The models by their `migration_limit`.
MODELS = {"m0": 0, "m3": 3}
WORKERS = 3

#: Seconds that a worker's lease lives by default, by discovery.
LEASES = {"file": 3.0, "redis": 5.0, "etcd": 10.0}

START_DEADLINE = 60.0

CONFIG = """
workers:
  m0: {model: {name: m0}, engine: {use: mocker}, grace_period: 0.5, drain_timeout: 1}
  m3: {model: {name: m3}, engine: {use: mocker}, grace_period: 0.5, drain_timeout: 1}
client: {drain_grace: 0.5, stall_timeout: %(stall)s}
transport: %(transport)s
discovery: %(discovery)s
"""


class HangingWorker(Part):
    """A worker that can be made to hang, and the proxy between it and the others."""

    def __init__(
        self, config: Path, model: str, proxy: FaultProxy, requests: Requests, transport: dict[str, Any]
    ) -> None:
        settings = {f"transport.{key}": value for key, value in transport.items()}
        options = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        command = ("tests.chaos.freezable",)
        super().__init__(config, model, str(MODELS[model]), *options, command=command)
        self.model = model
        self.proxy = proxy
        #: Which requests it was ever sent.
        self.requests = requests

    @property
    def plan(self) -> FaultPlan:
        """What shall happen on the wire to it."""
        return self.proxy.plan


class HangingFleet(Started):
    """One frontend and the workers of both models. `async with` starts and ends all of them."""

    def __init__(self, folder: Path, profile: str, *, stall: float | None) -> None:
        self.profile = profile
        self.servers = Servers(profile, folder)
        self.lease = LEASES[profile.partition("-")[2]]
        self._config = folder / "config.yaml"
        values = {
            "stall": json.dumps(stall),
            "transport": json.dumps(self.servers.transport()),
            "discovery": json.dumps(self.servers.discovery(quick=False)),
        }
        self._config.write_text(CONFIG % values)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.frontend = Part(self._config, "--only", "frontend", "--set", f"frontend.port={port}")
        self.workers: dict[str, list[HangingWorker]] = {model: [] for model in MODELS}

    async def start(self) -> None:
        self.servers.__enter__()
        for model in MODELS:
            for _ in range(WORKERS):
                self.workers[model].append(HangingWorker(self._config, model, *await proxied(self.servers)))
        for part in self._parts():
            part.start()
        await self.complete()

    async def aclose(self) -> None:
        for part in self._parts():
            await part.end()
        self.servers.__exit__()
        for worker in self._all_workers():
            await worker.proxy.aclose()

    def abandon(self) -> None:
        """Leave no process behind, even where the test was cut off and nothing was closed."""
        for part in self._parts():
            part.abandon()
        self.servers.__exit__()

    async def complete(self) -> None:
        """Return when the frontend sees all workers, and none beside."""
        wanted = {worker.pid for worker in self._all_workers()}
        async with aiohttp.ClientSession() as session, asyncio.timeout(START_DEADLINE):
            while await self._seen(session) != wanted:
                assert self.frontend.running, self.frontend.log
                await asyncio.sleep(0.1)

    async def _seen(self, session: aiohttp.ClientSession) -> set[int]:
        try:
            async with session.get(f"{self.url}/health") as response:
                return {entry["pid"] for entry in (await response.json())["instances"]}
        except aiohttp.ClientConnectionError:
            return set()

    @property
    def logs(self) -> str:
        """What all processes have logged."""
        return "\n".join(part.log for part in self._parts())

    def _parts(self) -> list[Part]:
        return [*self._all_workers(), self.frontend]

    def _all_workers(self) -> Iterator[HangingWorker]:
        for workers in self.workers.values():
            yield from workers


Act = Callable[[HangingWorker], Awaitable[None]]


@dataclass(frozen=True)
class Hang:
    """A way to hang, and how it is ended."""

    name: str
    strike: Act
    mend: Act
    #: Whether the thread that needs neither engine nor event loop goes on, so that only a stall timeout gives up.
    alive: bool = False

    def __str__(self) -> str:
        return self.name


def _signals(first: signal.Signals, last: signal.Signals) -> tuple[Act, Act]:
    async def strike(worker: HangingWorker) -> None:
        worker.signal(first)

    async def mend(worker: HangingWorker) -> None:
        worker.signal(last)

    return strike, mend


async def _half_open(worker: HangingWorker) -> None:
    # Of every connection, those made meanwhile too: in both directions nothing passes any more.
    for direction in (Direction.UP, Direction.DOWN):
        worker.plan.inject(HalfOpen(), direction=direction, times=None)


async def _whole(worker: HangingWorker) -> None:
    worker.plan.clear()
    worker.proxy.cut()


HANGS = [
    Hang("suspended", *_signals(signal.SIGSTOP, signal.SIGCONT)),
    Hang("half open", _half_open, _whole),
    Hang("frozen engine", *_signals(signal.SIGUSR1, signal.SIGUSR2), alive=True),
]


def crowd_of(model: str, first: int, deadline: float) -> list[Asked]:
    """Return requests with long prompts, whose first token takes seconds, and long answers that begin at once."""
    asked = []
    for number in range(24):
        long = number % 2
        asked.append(
            Asked(
                first + number,
                # No two begin alike, or the cache of the first would save the others their prefill.
                f"question {first + number} " + "x" * (6_000 if long else 10),
                60 if long else 400,
                # Over three workers in turn, each gets streams and whole answers of both kinds.
                stream=number // 6 % 2 == 0,
                deadline=deadline,
                model=model,
            )
        )
    return asked


async def all_are_asked(fleet: HangingFleet, client: Client, seeds: Iterator[int]) -> None:
    """Return when every worker gets requests: one that has hung is passed over for a while."""
    for model, workers in fleet.workers.items():
        waiting = list(workers)
        async with asyncio.timeout(START_DEADLINE):
            while waiting:
                sent = {next(seeds) for _ in range(4)}
                await asyncio.gather(
                    *(client.ask(Asked(seed, max_tokens=1, stream=False, model=model)) for seed in sent)
                )
                waiting = [worker for worker in waiting if not worker.requests.seeds & sent]


@dataclass
class Struck:
    """What the second worker of a model had when it began to hang, by phase: seeds."""

    moved_before_first: set[int] = field(default_factory=set)
    moved_in_mid_answer: set[int] = field(default_factory=set)
    own_before_first: set[int] = field(default_factory=set)
    own_in_mid_answer: set[int] = field(default_factory=set)

    @property
    def all(self) -> set[int]:
        return self.moved_before_first | self.moved_in_mid_answer | self.own_before_first | self.own_in_mid_answer


async def kill_and_strike(fleet: HangingFleet, model: str, hang: Hang, histories: dict[int, History]) -> Struck:
    """Kill the first worker of a model, and have another one hang that has been given some of its requests.

    From then on that one is the second.
    """
    first, *others = fleet.workers[model]
    left = set(first.requests.seeds) & histories.keys()
    before = {worker: set(worker.requests.seeds) for worker in others}
    await first.kill()
    moving = {seed for seed in left if not histories[seed].ends and (MODELS[model] or not _begun(histories[seed]))}

    def given() -> dict[HangingWorker, int]:
        return {worker: len(moving & (worker.requests.seeds - before[worker])) for worker in others}

    def moved() -> bool:
        there = {seed for worker in others for seed in worker.requests.seeds}
        # An answer that is collected whole may have begun, and then it ends where it does not migrate.
        settled = all(seed in there or histories[seed].ends for seed in moving)
        return settled and any(given().values())

    with _told(fleet):
        await until(moved, START_DEADLINE)
    second, third = sorted(others, key=lambda worker: -given()[worker])
    fleet.workers[model] = [first, second, third]
    struck = Struck()
    for seed in second.requests.seeds & histories.keys():
        history = histories[seed]
        if history.ends or seed in third.requests.seeds:
            continue
        name = ("moved" if seed in left else "own") + ("_in_mid_answer" if _begun(history) else "_before_first")
        getattr(struck, name).add(seed)
    await hang.strike(second)
    return struck


def _begun(history: History) -> bool:
    """Return whether an answer has begun. Of one that is collected whole the prompt tells: a long one takes seconds."""
    if history.asked.stream:
        return history.begun.is_set()
    return len(history.asked.prompt) < 1000


@contextmanager
def _told(fleet: HangingFleet) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError("nothing moved:\n" + fleet.logs) from error
