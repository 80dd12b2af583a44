"""What clients get when three times as many come as there is room for, with each admission; and what it costs.

A frontend and four workers with a mocker whose pace is set by its steps, so that they, and not this machine, are what
is full. Clients come at random, wait for `Retry-After` when they are refused, and leave when an answer takes too long.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
from dynamo_http.auth import hash_of, new_key
from dynamo_testing.servers.ports import free_port

from benchmarks.children import ChildFailed, Children, answers_ready, parts_of
from benchmarks.http1 import BadResponse, Connection, Endpoint, fetch
from benchmarks.loops import run_reporting
from benchmarks.meters import ProcessMeter
from benchmarks.overload_clients import (
    ANSWERED,
    FAILED,
    GAVE_UP,
    REFUSED,
    Client,
    Load,
    body_of,
    by_second,
    closed_loop,
    rate,
    ttft,
)
from benchmarks.overload_plot import Panel, picture
from benchmarks.stats import percentile

#: What is promised.
GOODPUT, TTFT_RATIO, PROBE, FAIR_RATIO, REFUSED_CPU = 0.9, 2.0, 5.0, 1.2, 0.15

WORKERS, SLOTS, STEP_MS, PROMPT = 4, 8, 50, "a" * 240
#: Answers are of different lengths, so that places become free one by one.
TOKENS: Final = range(16, 49)
_OVERLOAD: Final = 3.0
_USUAL: Final = 0.8
#: Parts of what can be served that two tenants ask for; the second one then asks for ten times as much.
_QUIET, _LOUD, _TIMES = 0.3, 0.5, 10
#: Of a phase, what is left out at its beginning.
_WARM_UP: Final = 0.2
_ADMISSIONS: Final[Mapping[str, str]] = {
    "none": "{use: none}",
    # Busy with one prompt to compute, or with eight requests of about 18 blocks each.
    "token-capacity": "{use: token-capacity, active_prefill_tokens_threshold: 200, "
    "active_decode_blocks_threshold: 0.84}",
    "fair-queue": "{use: fair-queue, requests_per_worker: %d, max_queue: %d, max_wait: %d, headroom: %g}",
}
_CONFIG: Final = """\
frontend: {{use: openai, host: 127.0.0.1, port: {port}}}
admission: {admission}
router: {{use: least-loaded}}
transport: {{use: tcp}}
discovery: {{use: file, path: {records}}}
log: {{level: warning}}
client: {{drain_grace: 0}}
{keys}
workers:
  mock:
    model: {{name: m}}
    engine:
      use: mocker
      fixed_itl_ms: {step}
      max_num_seqs: {slots}
      max_num_batched_tokens: 128
      enable_prefix_caching: false
      block_size: 16
      num_gpu_blocks: 160
    replicas: {workers}
    grace_period: 0
"""
#: Everything that is counted for a request while it lasts.
_ACCOUNTS: Final = (
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_active_requests",
    "dynamo_frontend_worker_active_prefill_tokens",
    "dynamo_frontend_worker_active_decode_blocks",
    "dynamo_frontend_worker_kv_blocks_active",
    "dynamo_admission_queue_requests",
    "dynamo_admission_running_requests",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one admission made of the load. Rates are per second, times in seconds."""

    usual_p99: float | None
    goodput: float
    p50: float | None
    p99: float | None
    refused: float
    gave_up: float
    failed: int
    probe: float | None
    left: dict[str, float]
    goodput_by_second: list[float | None]
    p99_by_second: list[float | None]


@dataclass(frozen=True, slots=True)
class _Server:
    endpoint: Endpoint
    meter: ProcessMeter
    keys: dict[str, str]

    def client(self, *, patience: float, attempts: int = 1, tenant: str = "") -> Client:
        bodies = [body_of("m", PROMPT, tokens) for tokens in TOKENS]
        return Client(self.endpoint, bodies, patience, attempts, self.keys.get(tenant))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks overload`."""
    parser.add_argument("--seconds", type=float, default=60.0, help="how long too many come (default %(default)g)")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds a client waits (default %(default)g)")
    parser.add_argument("--svg", type=Path, help="write a picture to this file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def run_overload(options: argparse.Namespace) -> int:
    """Print the figures; return the exit code: 1 if one of them is not what is promised, or a server failed."""
    return run_reporting(
        _measure(options), (ChildFailed, BadResponse, TimeoutError, OSError), "the measurement did not end in time"
    )


async def _measure(options: argparse.Namespace) -> int:
    seconds: float = options.seconds
    usual = max(seconds / 2, 10.0)
    async with asyncio.timeout(12 * seconds + 600):
        with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as name:
            bench = _Bench(Path(name))
            capacity = await bench.capacity(max(seconds / 3, 10.0))
            print(f"{WORKERS} workers answer {capacity:.1f} requests/s; {_OVERLOAD:g} times as many come", flush=True)
            outcomes = {
                mode: await bench.overload(mode, capacity, seconds, usual, options.patience) for mode in _ADMISSIONS
            }
            print(table(outcomes, capacity), flush=True)
            fair = await bench.fairness(capacity, 2 * usual, options.patience)
            print(fair.line(), flush=True)
            costs = {mode: await bench.refusals(mode) for mode in _ADMISSIONS if mode != "none"}
    for mode, cost in costs.items():
        print(f"{mode}: 1,000 refused requests cost the frontend {cost.cpu:.3f} CPU s; p99 {cost.p99 * 1e3:.1f} ms")
    missed = misses(outcomes, capacity, fair, costs)
    for line in missed:
        print(f"MISSED  {line}")
    if options.svg is not None:
        options.svg.write_text(plot(outcomes, capacity))
    if options.json is not None:
        everything = {"capacity": capacity, "outcomes": outcomes, "fairness": fair, "refusals": costs}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(everything)))
    return int(bool(missed))


@dataclass(frozen=True, slots=True)
class Fairness:
    """The p95 of a quiet tenant's time to the first text, in seconds, before and while another asks for too much."""

    before: float | None
    during: float | None
    #: Of the quiet tenant's requests in that time, and how many of them were refused or not answered.
    asked: int
    lost: int

    @property
    def ratio(self) -> float | None:
        """How many times as long."""
        return self.during / self.before if self.before and self.during else None

    def line(self) -> str:
        """Return the line for a reader."""
        ratio = "?" if self.ratio is None else f"{self.ratio:.2f}"
        return (
            f"fair-queue: p95 TTFT of a quiet tenant {_ms(self.before)}, and {_ms(self.during)} while another sends "
            f"{_TIMES} times its share: {ratio} times; {self.lost} of its {self.asked} requests were not answered"
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of the frontend for 1,000 refused requests, and the 99th percentile of their times in seconds."""

    cpu: float
    p99: float


class _Bench:
    """Starts a server for each measurement."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = 0

    async def capacity(self, seconds: float) -> float:
        """Answer a second while there is always more to do."""
        async with Children(self._folder, None) as children:
            server = await self._start(children, "none")
            began = perf_counter()
            attempts = await closed_loop(server.client(patience=60.0), 2 * WORKERS * SLOTS, seconds)
            return rate(attempts, began + 0.3 * seconds, began + seconds)

    async def overload(self, mode: str, capacity: float, seconds: float, usual: float, patience: float) -> Outcome:
        """Return the usual load, then too much of it, then a client that comes when all have left."""
        async with Children(self._folder, None) as children:
            server = await self._start(children, mode)
            client = server.client(patience=patience, attempts=8)
            before = Load(client, _USUAL * capacity)
            began = perf_counter()
            await before.run(usual)
            usual_p99 = ttft(before.attempts, 0.99, began + _WARM_UP * usual)
            load = Load(client, _OVERLOAD * capacity, seed=2)
            began = perf_counter()
            await load.run(seconds)
            probe = await _probe(server.client(patience=PROBE))
            left = await _left(server.endpoint)
        met, warm, end = load.attempts, began + _WARM_UP * seconds, began + seconds
        whole = int(seconds)
        return Outcome(
            usual_p99=usual_p99,
            goodput=rate(met, warm, end),
            p50=ttft(met, 0.5, warm),
            p99=ttft(met, 0.99, warm),
            refused=rate(met, warm, end, REFUSED),
            gave_up=rate(met, warm, end, GAVE_UP),
            failed=sum(one.outcome == FAILED for one in met),
            probe=probe,
            left=left,
            goodput_by_second=by_second(met, began, whole, lambda some: sum(one.outcome == ANSWERED for one in some)),
            p99_by_second=by_second(met, began, whole, lambda some: ttft(some, 0.99)),
        )

    async def fairness(self, capacity: float, seconds: float, patience: float) -> Fairness:
        """Return a quiet tenant beside another: at first within its share, then far above it."""
        async with Children(self._folder, None) as children:
            server = await self._start(children, "fair-queue", tenants=("quiet", "loud"))
            phases = []
            for number, times in enumerate((1, _TIMES)):
                quiet = Load(server.client(patience=patience, tenant="quiet"), _QUIET * capacity, seed=number)
                loud = Load(server.client(patience=patience, tenant="loud"), times * _LOUD * capacity, seed=10 + number)
                began = perf_counter()
                await asyncio.gather(quiet.run(seconds), loud.run(seconds))
                phases.append([one for one in quiet.attempts if one.began >= began + _WARM_UP * seconds])
        before, during = phases
        lost = sum(one.outcome != ANSWERED for one in during)
        return Fairness(ttft(before, 0.95), ttft(during, 0.95), len(during), lost)

    async def refusals(self, mode: str, count: int = 4000, clients: int = 4) -> Cost:
        """Measure the cost of a refusal, without other load: the workers are full of requests that never go on."""
        async with Children(self._folder, None) as children:
            server = await self._start(children, mode, step=600_000, wait=600)
            holder = server.client(patience=600.0)
            async with asyncio.TaskGroup() as group:
                held = []
                async with asyncio.timeout(60):
                    refused = False
                    while not refused:
                        asked = group.create_task(holder.ask())
                        done, _ = await asyncio.wait([asked], timeout=0.3)
                        # What is not refused by then is in, or in the queue, and takes a place there.
                        refused = bool(done) and asked.result().outcome == REFUSED
                        held.append(asked)
                await _refused(server.endpoint, count // 10, clients)
                before = await server.meter.read()
                times = await _refused(server.endpoint, count, clients)
                after = await server.meter.read()
                for task in held:
                    task.cancel()
        cpu = (after.cpu_seconds or 0.0) - (before.cpu_seconds or 0.0)
        return Cost(cpu * 1000 / count, percentile(sorted(times), 0.99))

    async def _start(
        self, children: Children, mode: str, *, step: int = STEP_MS, wait: int = 1, tenants: tuple[str, ...] = ()
    ) -> _Server:
        self._started += 1
        port = free_port()
        name = f"{mode}-{self._started}"
        keys = {tenant: new_key() for tenant in tenants}
        # Short where all are the same; between tenants, what one has in the queue is no other's wait.
        queue, headroom = (8, 3 / (WORKERS * SLOTS)) if tenants else (3, 0)
        listed = ", ".join(f'{{id: {one}, tenant: {one}, hash: "{hash_of(key)}"}}' for one, key in keys.items())
        admission = _ADMISSIONS[mode]
        config = self._folder / f"{name}.yaml"
        config.write_text(
            _CONFIG.format(
                port=port,
                admission=admission % (SLOTS, queue, wait, headroom) if "%" in admission else admission,
                records=self._folder / f"{name}-records",
                keys=f"auth: {{keys: [{listed}]}}\nadmin: {{token: {new_key()}}}" if keys else "",
                step=step,
                slots=SLOTS,
                workers=WORKERS,
            )
        )
        endpoint = Endpoint("127.0.0.1", port, "")

        async def ready() -> bool:
            if not await answers_ready(port):
                return False
            health = msgspec.json.decode((await fetch(endpoint, "/health", timeout=2.0)).body)
            return len(health["instances"]) == WORKERS

        command = Path(sys.executable).with_name("dynamo")
        pid = await children.start(name, [str(command), "serve", str(config)], ready)
        return _Server(endpoint, ProcessMeter(parts_of(pid)["frontend"]), keys)


async def _probe(client: Client) -> float | None:
    """Return seconds until one who comes anew, and again each quarter of a second, has the first text.

    None if never.
    """
    began = perf_counter()
    while perf_counter() - began < 2 * PROBE:
        met = await client.ask()
        if met.first is not None:
            return met.first - began
        await asyncio.sleep(0.25)
    return None


async def _left(endpoint: Endpoint, seconds: float = 15.0) -> dict[str, float]:
    """Return what is counted for requests after all have ended, if it still is after so many seconds."""
    deadline = perf_counter() + seconds
    while True:
        page = (await fetch(endpoint, "/metrics", timeout=10.0)).body.decode()
        sums = sums_of(page, _ACCOUNTS)
        if not any(sums.values()) or perf_counter() > deadline:
            return {name: value for name, value in sums.items() if value}
        await asyncio.sleep(0.5)


async def _refused(endpoint: Endpoint, count: int, clients: int) -> list[float]:
    """Return times of requests that are all refused, in seconds."""
    request = endpoint.post("/v1/chat/completions", body_of("m", PROMPT, TOKENS[0]))
    times: list[float] = []

    async def one(asks: int) -> None:
        connection = await Connection.open(endpoint)
        try:
            for _ in range(asks):
                reply = await connection.exchange(request, stream=False, timeout=10.0)
                if reply.status != 503:
                    raise BadResponse(f"status {reply.status}, not a refusal")
                times.append(reply.ended - reply.sent)
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one(count // clients))
    return times


def sums_of(page: str, names: tuple[str, ...]) -> dict[str, float]:
    """Return the sums of metrics over all their labels, of a page that Prometheus reads."""
    sums = dict.fromkeys(names, 0.0)
    for line in page.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    return sums


def table(outcomes: Mapping[str, Outcome], capacity: float) -> str:
    """Return the figures, a column for each admission."""
    rows: list[tuple[str, list[str]]] = [("", list(outcomes))]
    all_of = list(outcomes.values())
    rows.append(("goodput, requests/s", [f"{one.goodput:.1f}" for one in all_of]))
    rows.append(("goodput / capacity", [f"{one.goodput / capacity:.0%}" for one in all_of]))
    rows.append(("TTFT p50", [_ms(one.p50) for one in all_of]))
    rows.append(("TTFT p99", [_ms(one.p99) for one in all_of]))
    rows.append((f"TTFT p99 at {_USUAL:.0%} load", [_ms(one.usual_p99) for one in all_of]))
    rows.append(("refused/s", [f"{one.refused:.1f}" for one in all_of]))
    rows.append(("gave up/s", [f"{one.gave_up:.1f}" for one in all_of]))
    rows.append(("failed", [str(one.failed) for one in all_of]))
    rows.append(("probe served after", [_ms(one.probe) for one in all_of]))
    rows.append(("left in accounts", ["nothing" if not one.left else str(sum(one.left.values())) for one in all_of]))
    return "\n".join(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells) for name, cells in rows) + "\n"


def misses(outcomes: Mapping[str, Outcome], capacity: float, fair: Fairness, costs: Mapping[str, Cost]) -> list[str]:
    """Return what is promised and was not found.

    Nothing is promised for `none` but that its books are even in the end.
    """
    found: list[str] = []
    for mode, one in outcomes.items():
        if one.left:
            found.append(f"{mode}: left in accounts: {one.left}")
        if mode == "none":
            continue
        if one.goodput < GOODPUT * capacity:
            found.append(f"{mode}: goodput is less than {GOODPUT:.0%} of the capacity")
        if one.p99 is None or one.usual_p99 is None or one.p99 > TTFT_RATIO * one.usual_p99:
            found.append(f"{mode}: p99 TTFT is more than {TTFT_RATIO:g} times that of the usual load")
        if one.probe is None or one.probe > PROBE:
            found.append(f"{mode}: a fresh client was not served within {PROBE:g} s")
        if one.failed:
            found.append(f"{mode}: {one.failed} requests failed")
    if fair.ratio is None or fair.ratio > FAIR_RATIO:
        found.append(f"fair-queue: a quiet tenant's p95 TTFT rose to more than {FAIR_RATIO:g} times")
    found += [
        f"{mode}: 1,000 refused requests cost more than {REFUSED_CPU:g} CPU s"
        for mode, cost in costs.items()
        if cost.cpu > REFUSED_CPU
    ]
    return found


def plot(outcomes: Mapping[str, Outcome], capacity: float) -> str:
    """Return goodput and times over the seconds of the overload, as SVG."""
    return picture(
        [
            Panel(
                f"Answers per second while {_OVERLOAD:g} times as many come as can be served",
                {mode: one.goodput_by_second for mode, one in outcomes.items()},
                {"capacity": capacity},
            ),
            Panel(
                "p99 of the time to the first text, in seconds",
                {mode: one.p99_by_second for mode, one in outcomes.items()},
            ),
        ]
    )


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"
