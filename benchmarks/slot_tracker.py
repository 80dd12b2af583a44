"""The slot tracker: CPU time and calls per second of its busiest routes over HTTP, and of the accounting alone."""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from dynamo_plugin_router_slot_tracker.held_capacity import REQUEST
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.schemas import Addition, Projection, Registration, RequestKey
from dynamo_testing.servers.ports import free_port

from benchmarks.children import ChildFailed, Children, accepts
from benchmarks.http1 import BadResponse, Connection, Endpoint, fetch
from benchmarks.loops import LOOP_NAME, run_reporting
from benchmarks.meters import cpu_seconds
from benchmarks.runner import two_cpus

#: Data-parallel ranks of each worker.
RANKS_PER_WORKER: Final = 8
#: Active requests on each rank while it is measured.
ACTIVE: Final = 8
#: Blocks that all prompts share, as those of one system prompt.
SHARED: Final = 32
TIMEOUT: Final = 30.0

MODEL: Final = "bench"

Calls = dict[str, Sequence[tuple[str, msgspec.Struct]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks slot-tracker`."""
    parser.add_argument("--ranks", type=int, default=64, help="ranks of all workers together (default %(default)s)")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[16, 128, 512], help="blocks of a prompt (default %(default)s)"
    )
    parser.add_argument("--calls", type=int, default=4000, help="calls of each kind and round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts (default %(default)s)")
    parser.add_argument("--connections", type=int, default=8, help="clients at the same time (default %(default)s)")


def run_slot_tracker(options: argparse.Namespace) -> int:
    """Measure and print; exit code 1 if the service fails or answers anything but what it should."""
    return run_reporting(
        _measure(options), (ChildFailed, BadResponse, ConnectionError, TimeoutError, ProcessLookupError)
    )


async def _measure(options: argparse.Namespace) -> int:
    cpus = two_cpus()
    where = "one CPU for both" if cpus is None else f"client on CPU {cpus[0]}, service on CPU {cpus[1]}"
    print(f"{LOOP_NAME}, Python {sys.version.split()[0]}; {where}")
    print(f"{options.ranks} ranks, {ACTIVE} active requests on each, {SHARED} blocks shared by all prompts\n")
    if cpus is not None:
        os.sched_setaffinity(0, {cpus[0]})
    names = "".join(f"{name:>26}" for name in ("/add", "/free", "/potential_loads"))
    print(f"{'':<18}{names}")
    for blocks in options.blocks:
        figures = _accounting(options, blocks)
        _row(f"accounting, {blocks}", [f"{figures[path] * 1e6:.1f} µs" for path in figures])
    print()
    with tempfile.TemporaryDirectory(prefix="slot-tracker-") as folder:
        async with Children(Path(folder), None if cpus is None else cpus[1]) as children:
            for blocks in options.blocks:
                port = free_port()
                command = [sys.executable, "-m", "dynamo_plugin_router_slot_tracker", "--host", "127.0.0.1"]
                command += ["--max-held", str(_max_held(options, blocks))]
                name = f"slot-tracker-{blocks}"

                async def ready(port: int = port) -> bool:
                    return await accepts(port)

                pid = await children.start(name, [*command, "--port", str(port)], ready)
                over_http = await _over_http(options, blocks, port, pid)
                _row(f"HTTP, {blocks}", [f"{cpu * 1e6:.0f} µs {rate:,.0f}/s" for cpu, rate in over_http.values()])
    return 0


def _row(name: str, cells: Sequence[str]) -> None:
    print(f"{name:<18}" + "".join(f"{cell:>26}" for cell in cells), flush=True)


def _workers(ranks: int) -> Iterator[Registration]:
    for worker_id, start in enumerate(range(0, ranks, RANKS_PER_WORKER)):
        size = min(RANKS_PER_WORKER, ranks - start)
        yield Registration(
            worker_id=worker_id, model_name=MODEL, block_size=16, dp_start=start % RANKS_PER_WORKER, dp_size=size
        )


def _max_held(options: argparse.Namespace, blocks: int) -> int:
    """Return a bound on hashes that one tenant, who may hold half of them, does not reach."""
    requests: int = options.ranks * ACTIVE + options.calls
    return 4 * (blocks + REQUEST) * requests


def _hashes(number: int, blocks: int) -> list[int]:
    """Return a prompt of its own after the shared beginning; numbers as large as hashes are."""
    shared = min(SHARED, blocks // 2)
    own = range(number * blocks, number * blocks + blocks - shared)
    return [(value + 1) * 0x9E3779B97F4A7C15 % 2**63 for value in (*range(10**12, 10**12 + shared), *own)]


def _addition(number: int, ranks: int, blocks: int) -> Addition:
    worker_id, dp_rank = divmod(number % ranks, RANKS_PER_WORKER)
    return Addition(
        model_name=MODEL,
        request_id=f"request-{number}",
        worker_id=worker_id,
        dp_rank=dp_rank,
        sequence_hashes=_hashes(number, blocks),
        new_isl_tokens=16 * blocks,
    )


def _calls(options: argparse.Namespace, blocks: int, round_number: int) -> Calls:
    """Return what is called in one round, in order of path. Nothing is left of it afterwards."""
    first = options.ranks * ACTIVE + round_number * options.calls
    numbers = range(first, first + options.calls)
    additions = [_addition(number, options.ranks, blocks) for number in numbers]
    projections = [
        Projection(model_name=MODEL, sequence_hashes=_hashes(number, blocks), new_isl_tokens=16 * blocks)
        for number in numbers
    ]
    keys = [RequestKey(model_name=MODEL, request_id=addition.request_id) for addition in additions]
    return {
        "/add": [("/add", one) for one in additions],
        "/free": [("/free", one) for one in keys],
        "/potential_loads": [("/potential_loads", one) for one in projections],
    }


def _accounting(options: argparse.Namespace, blocks: int) -> dict[str, float]:
    """Return CPU seconds of a call without HTTP and JSON."""
    registry = Registry(max_held=_max_held(options, blocks))
    for worker in _workers(options.ranks):
        registry.register(worker)
    for number in range(options.ranks * ACTIVE):
        registry.add(_addition(number, options.ranks, blocks))
    work: dict[str, Callable[..., object]] = {
        "/add": registry.add,
        "/free": registry.free,
        "/potential_loads": registry.potential_loads,
    }
    best = dict.fromkeys(work, float("inf"))
    for round_number in range(options.rounds):
        for path, calls in _calls(options, blocks, round_number).items():
            bodies = [body for _, body in calls]
            call = work[path]
            gc.collect()
            gc.disable()
            begun = time.process_time()
            for body in bodies:
                call(body)
            best[path] = min(best[path], (time.process_time() - begun) / len(bodies))
            gc.enable()
    return best


async def _over_http(options: argparse.Namespace, blocks: int, port: int, pid: int) -> dict[str, tuple[float, float]]:
    """Return CPU seconds of the service's process for a call, and calls per second, by path."""
    endpoint = Endpoint("127.0.0.1", port, "")
    connections = [await Connection.open(endpoint) for _ in range(options.connections)]

    async def call_all(calls: Sequence[tuple[str, msgspec.Struct]], status: int) -> tuple[float, float]:
        waiting = iter([endpoint.post(path, msgspec.json.encode(body)) for path, body in calls])

        async def work(connection: Connection) -> None:
            for request in waiting:
                reply = await connection.exchange(request, stream=False, timeout=TIMEOUT)
                if reply.status != status:
                    raise BadResponse(f"answered {reply.status}, not {status}: {reply.body[:200]!r}")

        used, begun = cpu_seconds(pid), time.perf_counter()
        await asyncio.gather(*(work(connection) for connection in connections))
        return (cpu_seconds(pid) - used) / len(calls), len(calls) / (time.perf_counter() - begun)

    await call_all([("/register", worker) for worker in _workers(options.ranks)], 201)
    active = [_addition(number, options.ranks, blocks) for number in range(options.ranks * ACTIVE)]
    await call_all([("/add", one) for one in active], 201)
    best: dict[str, tuple[float, float]] = {}
    for round_number in range(options.rounds):
        for path, calls in _calls(options, blocks, round_number).items():
            cpu, rate = await call_all(calls, 201 if path == "/add" else 200)
            known = best.get(path, (float("inf"), 0.0))
            best[path] = (min(cpu, known[0]), max(rate, known[1]))
    loads = await fetch(endpoint, "/loads", timeout=TIMEOUT)
    entries = msgspec.json.decode(loads.body, type=list[dict[str, int | str]])
    if len(entries) != options.ranks:
        raise BadResponse(f"{len(entries)} ranks are listed, not {options.ranks}")
    return best
