"""Many registered workers: how long until a frontend knows them, what a change costs, and what choosing one costs."""

import argparse
import asyncio
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from dynamo_core import (
    AdmissionServices,
    Discovery,
    Lease,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    Router,
    RouterServices,
    RoutingRequest,
    Served,
)
from dynamo_core.contracts.transports.call import GENERATE
from dynamo_core.plugins.loader import PluginLoader
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import CARDS, INSTANCES
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_runtime.dispatch.admission import NoAdmission
from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Deadlines, Pipeline
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.models.model import Model
from dynamo_runtime.dispatch.models.models import Models
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics
from dynamo_text import load_tokenizer

from benchmarks.loops import LOOP_NAME, run

SIZES: Final = (33, 200, 1000)
ROUTERS: Final = ("round-robin", "random", "power-of-two", "least-loaded")
#: Of these routers the cost must not grow with the number of workers: the most that the largest size may cost, relative
#: to the smallest.
CONSTANT: Final = ("round-robin", "random", "power-of-two")
GROWTH: Final = 2.0
#: Seconds without a change, in which only heartbeats come.
REST: Final = 3.0

MODEL: Final = "many"
REQUEST: Final = PreprocessedRequest(model=MODEL, token_ids=[1, 2, 3])


class Fleet:
    """Registered workers that answer with one item, each under a lease of its own, held by `directory`."""

    def __init__(self, directory: Discovery) -> None:
        self._directory = directory
        self.leases: dict[int, Lease] = {}

    async def add(self, number: int) -> list[int]:
        """Register so many more; their ids."""
        return [await self._register() for _ in range(number)]

    async def remove(self, ids: list[int]) -> None:
        """Let these leave in order."""
        for instance_id in ids:
            await self.leases.pop(instance_id).aclose()

    async def churn(self) -> tuple[int, int]:
        """Let the one leave that has been there longest, and another come; return who left and who came."""
        oldest = next(iter(self.leases))
        await self.remove([oldest])
        return oldest, (await self.add(1))[0]

    async def _register(self) -> int:
        lease = await self._directory.lease()
        instance = Instance(instance_id=lease.id, worker="fake", address={"inproc": "here"})
        card = ModelCard(name=MODEL, instance_id=lease.id, model_types=["chat"], checksum="same")
        await lease.put(INSTANCES + instance.path, msgspec.json.encode(instance))
        await lease.put(CARDS + card.path, msgspec.json.encode(card))
        self.leases[lease.id] = lease
        return lease.id


class Watcher:
    """A frontend without HTTP: it watches a directory, and calls are answered by handlers in this process."""

    def __init__(self, directory: Discovery, stack: AsyncExitStack, router: str = "round-robin") -> None:
        metrics = Metrics()
        self.transport = InprocTransport(PluginConfig(), metrics)
        self.tracker = LoadTracker()
        pipeline = Pipeline(
            transport=self.transport,
            admission=NoAdmission(PluginConfig(), AdmissionServices(metrics)),
            tracker=self.tracker,
            deadlines=Deadlines(),
            metrics=metrics,
        )
        caller = Caller(self.transport)
        loader = PluginLoader()

        def make_router(pool: Pool, name: str = router) -> Router:
            cls = cast("type[Router]", loader.load("router", name))
            services = RouterServices(
                pool=pool,
                tracker=self.tracker,
                events=self.transport.events(),
                directory=directory,
                metrics=metrics,
                call=caller,
            )
            return cls(cls.Config(), services)

        self.make_router = make_router
        self.announced: list[str] = []
        self.models = Models(
            discovery=directory,
            pipeline=pipeline,
            caller=caller,
            make_router=make_router,
            announce=self._announce,
            load_tokenizer=load_tokenizer,
        )
        #: How many requests each worker answered.
        self.answered: dict[int, int] = {}
        self._served: dict[int, Served] = {}
        stack.push_async_callback(self.transport.aclose)
        stack.push_async_callback(pipeline.aclose)
        stack.push_async_callback(self.models.aclose)

    @property
    def known(self) -> set[int]:
        """The workers that can be routed to."""
        return {instance.instance_id for instance in self.models.instances()}

    @property
    def model(self) -> Model:
        """The one model."""
        return self.models.get(MODEL)

    @property
    def pool(self) -> Pool:
        """Its workers."""
        return self.model.groups["aggregated"].pool

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once something holds, looked at after each change; TimeoutError after a minute."""
        async with asyncio.timeout(60):
            while not condition():
                await self.models.changed()

    async def serve(self, ids: list[int]) -> None:
        """Answer for these workers."""
        for instance_id in ids:
            self._served[instance_id] = await self.transport.serve(instance_id, GENERATE, self._handler(instance_id))

    def _handler(self, instance_id: int) -> Callable[..., Any]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            yield LLMEngineOutput.stop()

        async def handle(request: Any, ctx: Any) -> AsyncGenerator[LLMEngineOutput, None]:
            self.answered[instance_id] = self.answered.get(instance_id, 0) + 1
            return items()

        return handle

    def _announce(self, hook: str, **arguments: object) -> None:
        self.announced.append(hook)


@asynccontextmanager
async def directory(name: str, folder: str | None = None) -> AsyncIterator[Discovery]:
    """Yield a running discovery plugin; `folder` is where the one of that kind keeps its files."""
    cls = cast("type[Discovery]", PluginLoader().load("discovery", name))
    made = cls(cls.Config(**({} if folder is None else {"path": folder})), Metrics())
    try:
        await made.start()
        yield made
    finally:
        await made.aclose()


class Elsewhere:
    """A fleet in a process of its own, so that what its leases cost is not counted here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.ids: set[int] = set()

    @classmethod
    async def start(cls, folder: str, size: int) -> "Elsewhere":
        """Return once `size` workers are registered in the folder."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks", "registrations", "--hold", folder, "--sizes", str(size),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        fleet = cls(process)
        fleet.ids = set(map(int, await fleet._line()))
        return fleet

    async def churn(self) -> tuple[int, int]:
        """See `Fleet.churn`."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        left, came = map(int, await self._line())
        self.ids = self.ids - {left} | {came}
        return left, came

    async def aclose(self) -> None:
        """Let all leave, and end the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def _line(self) -> list[bytes]:
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            words = (await self._process.stdout.readline()).split()
        if not words:
            raise RuntimeError("the process that holds the workers has ended")
        return words


async def _hold(folder: str, size: int) -> int:
    """Run the process of `Elsewhere`: a line of all ids, then one of those that left and came for each line read."""
    async with directory("file", folder) as workers:
        fleet = Fleet(workers)
        print(*await fleet.add(size), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(*await fleet.churn(), flush=True)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks registrations`."""
    parser.add_argument("--hold", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default %(default)s)")
    parser.add_argument("--changes", type=int, default=50, help="workers that leave and come (default %(default)s)")
    parser.add_argument("--routes", type=int, default=2000, help="choices of one round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of which the best counts (default %(default)s)")


def run_registrations(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if a choice costs more with more workers where it must not."""
    if options.hold is not None:
        return run(_hold(options.hold, options.sizes[0]))
    return run(_measure(options))


async def _measure(options: argparse.Namespace) -> int:
    print(f"{LOOP_NAME}, Python {sys.version.split()[0]}; CPU time of the frontend's process\n")
    print(f"{'workers known':<14} {'workers':>8} {'snapshot, ms':>13} {'a change, µs':>13} {'at rest, ms/s':>14}")
    for size in options.sizes:
        await _knowing_in_memory(size, options.changes)
    for size in options.sizes:
        await _knowing_in_files(size, options.changes)
    print(f"\n{'a choice, µs':<14} " + "".join(f"{size:>10}" for size in options.sizes))
    kept = True
    for name in ROUTERS:
        costs = [await _choosing(name, size, options) for size in options.sizes]
        grown = costs[-1] / costs[0]
        kept = kept and (name not in CONSTANT or grown <= GROWTH)
        print(f"{name:<14} " + "".join(f"{cost:>10.2f}" for cost in costs) + f"   x{grown:.2f}")
    print(f"\n{', '.join(CONSTANT)}: the cost must not grow (x{GROWTH}): {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


async def _knowing_in_memory(size: int, changes: int) -> None:
    async with directory("memory") as place, AsyncExitStack() as stack:
        fleet = Fleet(place)
        await fleet.add(size)
        # What the workers' side of a change costs is measured first, with no watcher.
        begun = time.process_time()
        for _ in range(changes):
            await fleet.churn()
        alone = time.process_time() - begun
        watcher = Watcher(place, stack)
        snapshot = await _snapshot(watcher, size)
        figures = await _changes(watcher, fleet.churn, changes, alone)
        assert watcher.known == set(fleet.leases)
    _row("in memory", size, snapshot, *figures)


async def _knowing_in_files(size: int, changes: int) -> None:
    folder = tempfile.mkdtemp(prefix="registrations-")
    path = str(Path(folder) / "discovery")
    try:
        async with directory("file", path) as place, AsyncExitStack() as stack:
            fleet = await Elsewhere.start(path, size)
            stack.push_async_callback(fleet.aclose)
            watcher = Watcher(place, stack)
            snapshot = await _snapshot(watcher, size)
            figures = await _changes(watcher, fleet.churn, changes, 0.0)
            assert watcher.known == fleet.ids
        _row("in files", size, snapshot, *figures)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _snapshot(watcher: Watcher, size: int) -> float:
    """Return CPU seconds until all are known."""
    gc.collect()
    begun = time.process_time()
    watcher.models.start()
    await watcher.until(lambda: len(watcher.known) == size)
    return time.process_time() - begun


async def _changes(
    watcher: Watcher, churn: Callable[[], Awaitable[tuple[int, int]]], changes: int, alone: float
) -> tuple[float, float]:
    """Return CPU seconds of one worker that leaves and one that comes, without what the workers' side took.

    And at rest.
    """
    begun = time.process_time()
    for _ in range(changes):
        left, came = await churn()
        while left in watcher.pool.instances or came not in watcher.pool.instances:
            await watcher.models.changed()
    change = (time.process_time() - begun - alone) / changes
    begun = time.process_time()
    await asyncio.sleep(REST)
    return change, (time.process_time() - begun) / REST


def _row(name: str, size: int, snapshot: float, change: float, rest: float) -> None:
    print(f"{name:<14} {size:>8} {snapshot * 1e3:>13.1f} {change * 1e6:>13.0f} {rest * 1e3:>14.2f}")


async def _choosing(name: str, size: int, options: argparse.Namespace) -> float:
    """Return microseconds to choose a worker and to count the request in and out, with some running on every worker."""
    async with directory("memory") as place, AsyncExitStack() as stack:
        fleet, watcher = Fleet(place), Watcher(place, stack)
        await fleet.add(size)
        watcher.models.start()
        await watcher.until(lambda: len(watcher.known) == size)
        pool, tracker, router = watcher.pool, watcher.tracker, watcher.make_router(watcher.pool, name)
        names = (f"r{number}" for number in count())
        for _ in range(2 * size):
            await _place(router, pool, tracker, next(names))
        best = float("inf")
        for _ in range(options.rounds):
            ids = [next(names) for _ in range(options.routes)]
            with _undisturbed():
                begun = time.process_time()
                for request_id in ids:
                    (await _place(router, pool, tracker, request_id)).release()
                best = min(best, time.process_time() - begun)
        await router.aclose()
    return best / int(options.routes) * 1e6


async def _place(router: Router, pool: Pool, tracker: LoadTracker, request_id: str) -> Any:
    route = await router.route(RoutingRequest(REQUEST, request_id), pool)
    return tracker.reserve(route, request_id, prompt_tokens=3, block_size=None, hashes=())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the collector out of a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
