"""The transports beside each other: `dynamo serve` over each on this machine, in turns, and what every process costs.

A frontend, workers with the mocker and, where the transport has one, its broker are processes of their own; with inproc
one process is all of them. Ratios are to tcp.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dynamo_testing.servers.ports import free_port
from dynamo_testing.tiny_model import make_tokenizer_folder

from benchmarks.brokers import BROKERS, Broker, ServerMissing
from benchmarks.children import ChildFailed, Children, answers_ready, parts_of, pin
from benchmarks.http1 import Endpoint
from benchmarks.load import Measured, Target, measure
from benchmarks.loops import run_until_sigterm
from benchmarks.meters import Usage, cpu_seconds, peak_rss_mib, read_proc
from benchmarks.report import Block, Row, document
from benchmarks.runner import chosen_rounds, pin_client, quick
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.stats import ratio, spread

TRANSPORTS: Final = ("inproc", "tcp", "nats", "redis")
BASE: Final = "tcp"
DEADLINE: Final = 900.0
PACE_MS: Final = 6.4

# No request comes once it is over, so nothing is waited for at the end.
_CONFIG: Final = """\
frontend: {{use: openai, host: 127.0.0.1, port: {port}}}
router: {{use: round-robin}}
transport: {transport}
discovery: {discovery}
log: {{level: warning}}
client: {{drain_grace: 0}}
workers:
  fast:
    model: {{name: fast, path: {folder}}}
    engine: {{use: mocker, speedup_ratio: 0}}
    grace_period: 0
  paced:
    model: {{name: paced, path: {folder}}}
    engine: {{use: mocker, fixed_itl_ms: {pace}}}
    grace_period: 0
"""


@dataclass(frozen=True, slots=True)
class Costs:
    """What one round took. CPU in seconds of each part; None = there is no such part, or it cannot be told.

    `whole` is all parts together; `messages` were sent to the broker; `writes` are write calls of the workers.
    """

    frontend: float | None
    worker: float | None
    broker: float | None
    whole: float
    messages: int | None
    writes: int | None


@dataclass(frozen=True, slots=True)
class Taken:
    """One round of one scenario over one transport."""

    measured: Measured
    costs: Costs

    def per_1k_requests(self, cpu: float | None) -> float | None:
        """Return CPU seconds of 1,000 requests; ms of one."""
        return None if cpu is None or not self.measured.requests else cpu / self.measured.requests * 1_000

    def per_100k_tokens(self, cpu: float | None) -> float | None:
        """Return CPU seconds of 100,000 tokens."""
        return None if cpu is None or not self.measured.tokens else cpu / self.measured.tokens * 100_000

    def per_request(self, count: int | None) -> float | None:
        """Return how many of something there were for each request."""
        return None if count is None or not self.measured.requests else count / self.measured.requests

    def per_token(self, count: int | None) -> float | None:
        """Return how many of something there were for each token."""
        return None if count is None or not self.measured.tokens else count / self.measured.tokens


class PartsMeter:
    """Reads the processes behind one address, part by part; and remembers its last two readings."""

    def __init__(self, parts: Mapping[str, Sequence[int]], messages: Callable[[], Awaitable[int]] | None) -> None:
        """`parts` are `frontend`, `worker` and `broker`, or `whole` where one process is all of them."""
        self._parts = parts
        self._messages = messages
        self._readings: list[tuple[dict[str, float], int | None, int | None]] = []

    async def read(self) -> Usage:
        """Return all parts together.

        Raise ProcessLookupError when a process is gone, ChildFailed when a broker is silent.
        """
        messages = None if self._messages is None else await self._messages()
        cpu = {part: sum(map(cpu_seconds, pids)) for part, pids in self._parts.items()}
        workers = self._parts.get("worker")
        writes = None if workers is None else sum(map(write_calls, workers))
        self._readings = [*self._readings[-1:], (cpu, messages, writes)]
        return Usage(sum(cpu.values()), sum(peak_rss_mib(pid) for pids in self._parts.values() for pid in pids))

    def costs(self) -> Costs:
        """Return what was used between the last two readings."""
        (cpu_before, messages_before, writes_before), (cpu, messages, writes) = self._readings
        used = {part: seconds - cpu_before[part] for part, seconds in cpu.items()}
        return Costs(
            frontend=used.get("frontend"),
            worker=used.get("worker"),
            broker=used.get("broker"),
            whole=sum(used.values()),
            messages=None if messages is None or messages_before is None else messages - messages_before,
            writes=None if writes is None or writes_before is None else writes - writes_before,
        )


def write_calls(pid: int) -> int:
    """Return how often a process has called write() or writev(), its threads included.

    uvloop writes so to connections; asyncio's own loop calls send(), which the kernel does not count here. Raise
    ProcessLookupError when the process is gone.
    """
    for line in read_proc(pid, "io").splitlines():
        if line.startswith("syscw:"):
            return int(line.split()[1])
    return 0


_MESSAGES: Final[Row[Taken]] = Row(
    "broker messages per request", "messages_per_request", 2, lambda t: t.per_request(t.costs.messages), compared=False
)
_LATENCY: Final[Sequence[Row[Taken]]] = (
    Row("latency p50, ms", "latency_p50_ms", 2, lambda t: t.measured.latency_p50_ms),
    Row("latency p99, ms", "latency_p99_ms", 2, lambda t: t.measured.latency_p99_ms),
)
_FIRST: Final[Sequence[Row[Taken]]] = (
    Row("TTFB p50, ms", "ttfb_p50_ms", 2, lambda t: t.measured.ttfb_p50_ms),
    Row("TTFB p99, ms", "ttfb_p99_ms", 2, lambda t: t.measured.ttfb_p99_ms),
)


def _cpu(title: str, key: str, each: Callable[[Taken, float | None], float | None]) -> Sequence[Row[Taken]]:
    """Return the CPU time of the parts, as `each` shares it out."""
    return (
        Row(f"{title}: frontend", f"frontend_{key}", 2, lambda t: each(t, t.costs.frontend)),
        Row("  worker", f"worker_{key}", 2, lambda t: each(t, t.costs.worker)),
        Row("  broker", f"broker_{key}", 2, lambda t: each(t, t.costs.broker), compared=False),
        Row("  all together", f"whole_{key}", 2, lambda t: each(t, t.costs.whole)),
    )


_REQUESTS: Final[Sequence[Row[Taken]]] = (
    Row("requests/s", "requests_per_second", 0, lambda t: t.measured.requests_per_second),
    *_cpu("CPU ms per request", "ms", Taken.per_1k_requests),
    _MESSAGES,
)
_TOKENS: Final[Sequence[Row[Taken]]] = (
    Row("tokens/s", "tokens_per_second", 0, lambda t: t.measured.tokens_per_second),
    *_cpu("CPU s per 100,000 tokens", "100k", Taken.per_100k_tokens),
    Row("broker messages per token", "messages_per_token", 3, lambda t: t.per_token(t.costs.messages), compared=False),
    Row("worker writes per token", "writes_per_token", 3, lambda t: t.per_token(t.costs.writes), compared=False),
    Row("events per stream", "events_per_stream", 0, lambda t: t.measured.events_per_stream, compared=False),
)
_SHOWN: Final[Mapping[str, Sequence[Row[Taken]]]] = {
    "unary-1": (*_LATENCY, _MESSAGES),
    "stream-1": (*_FIRST, *_LATENCY, _MESSAGES),
    "unary-32": (*_REQUESTS, *_LATENCY),
    "flood": (*_TOKENS, *_FIRST),
    "paced": (*_TOKENS, *_FIRST),
}
#: Where rows have to be merged: fewer messages than tokens.
_UNDER_LOAD: Final = ("flood", "paced")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks transports`."""
    parser.add_argument("--quick", action="store_true", help="one short round of each scenario, about a minute")
    parser.add_argument("--rounds", type=int, help="measurements of each scenario (default 3, quick 1)")
    parser.add_argument(
        "--transports",
        type=_chosen,
        help=f"comma-separated, of {', '.join(TRANSPORTS)} (default: those whose servers are installed)",
    )
    parser.add_argument("--json", type=Path, default=Path("bench-transports.json"), help="default: %(default)s")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="do not keep frontends on a CPU of their own (default: do)"
    )


def run_transports(options: argparse.Namespace) -> int:
    """Run it in an event loop of its own; returns the exit code (143 when ended by SIGTERM)."""
    return run_until_sigterm(_run(options))


async def _run(options: argparse.Namespace) -> int:
    cpus = pin_client(options.pin)
    if cpus is not None:
        print(f"client, workers and brokers on CPU {cpus[0]}, frontends and all of inproc on CPU {cpus[1]}")
    try:
        async with asyncio.timeout(DEADLINE):
            with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as name:
                folder = Path(name)
                async with Children(folder, cpus[1] if cpus else None) as children:
                    make_tokenizer_folder(folder / "model")
                    start = Houses(children, folder, cpus[0] if cpus else None).start
                    houses = await start_all(options.transports, start)
                    taken = await _measure(houses, chosen_rounds(options.rounds, quick=options.quick), options.quick)
                    if any(one.measured.errors for rounds in taken.values() for one in rounds):
                        print(children.last_words(), file=sys.stderr)
    except (ChildFailed, ServerMissing, ProcessLookupError) as error:
        print(error, file=sys.stderr)
        return 1
    except TimeoutError:
        print(f"not measured within {DEADLINE:g} s", file=sys.stderr)
        return 1
    settings = {"suite": "transports", "quick": options.quick, "pinned": cpus is not None}
    return publish_transports(taken, settings, options.json)


@dataclass(frozen=True, slots=True)
class House:
    """`dynamo serve` over one transport: where it listens, and the meter of its processes."""

    transport: str
    endpoint: Endpoint
    meter: PartsMeter

    async def take(self, scenario: Scenario) -> Taken:
        """Measure one round. Raise ProcessLookupError when a process is gone, ChildFailed when a broker is silent."""
        model = "paced" if scenario.name == "paced" else "fast"
        measured = await measure(Target(self.transport, self.endpoint, model, self.meter), scenario)
        return Taken(measured, self.meter.costs())


@dataclass(frozen=True, slots=True)
class Houses:
    """Starts them. `folder` is for their files; all but frontends run beside the client, on `client_cpu`."""

    children: Children
    folder: Path
    client_cpu: int | None

    async def start(self, transport: str) -> House:
        """Raise ServerMissing or ChildFailed."""
        broker = await BROKERS[transport](self.children, self.folder) if transport in BROKERS else None
        port = free_port()
        config = self.folder / f"{transport}.yaml"
        records = self.folder / f"{transport}-records"
        config.write_text(
            _CONFIG.format(
                port=port,
                transport=f"{{use: {transport}}}" if broker is None else broker.transport,
                discovery="{use: memory}" if transport == "inproc" else f"{{use: file, path: {records}}}",
                folder=self.folder / "model",
                pace=PACE_MS,
            )
        )
        command = Path(sys.executable).with_name("dynamo")
        if not command.exists():
            raise ChildFailed(f"{command} is missing: install the distributions into this Python's environment first")
        pid = await self.children.start(transport, [str(command), "serve", str(config)], lambda: answers_ready(port))
        meter = self._meter(pid, broker, one_process=transport == "inproc")
        return House(transport, Endpoint("127.0.0.1", port, ""), meter)

    def _meter(self, pid: int, broker: Broker | None, *, one_process: bool) -> PartsMeter:
        if one_process:
            return PartsMeter({"whole": [pid]}, None)
        # The supervisor, `pid` itself, has no part in a request.
        found = parts_of(pid)
        parts = {"frontend": [found.pop("frontend")], "worker": list(found.values())}
        if broker is not None:
            parts["broker"] = [broker.pid]
        if self.client_cpu is not None:
            for beside in (*parts["worker"], *parts.get("broker", ())):
                pin(beside, self.client_cpu)
        return PartsMeter(parts, None if broker is None else broker.messages)


async def start_all(asked: Sequence[str] | None, start: Callable[[str], Awaitable[House]]) -> list[House]:
    """Start those asked for, or else those with a server on this machine, and a line for each that is left out."""
    started: list[House] = []
    for transport in asked or TRANSPORTS:
        try:
            started.append(await start(transport))
        except ServerMissing as error:
            if asked:
                raise
            print(f"NOT MEASURED: {transport}: {error}", file=sys.stderr)
    return started


Results = Mapping[tuple[str, str], Sequence[Taken]]
"""The rounds, by scenario and transport, in the order of the tables and their columns."""


async def _measure(houses: Sequence[House], rounds: int, in_a_hurry: bool) -> Results:
    """Measure: transports take turns within a round, and the order turns round with each."""
    taken: dict[tuple[str, str], list[Taken]] = {(name, h.transport): [] for name in _SHOWN for h in houses}
    for number in range(rounds):
        for name in _SHOWN:
            scenario = quick(SCENARIOS[name]) if in_a_hurry else SCENARIOS[name]
            for house in houses if number % 2 == 0 else reversed(houses):
                print(f"round {number + 1} of {rounds}: {name} over {house.transport}", file=sys.stderr, flush=True)
                taken[name, house.transport].append(await house.take(scenario))
    return taken


def publish_transports(taken: Results, settings: Mapping[str, object], json_path: Path | None) -> int:
    """Print the table and what is wrong, write the JSON where wanted, and return the exit code: 1 if anything is."""
    print(transports_table(taken))
    if json_path is not None:
        json_path.write_text(json.dumps(_document(taken, settings), indent=2) + "\n")
        print(f"\nwritten to {json_path}")
    wrong = faults(taken)
    for fault in wrong:
        print(f"\n{fault}", file=sys.stderr)
    return 1 if wrong else 0


def transports_table(taken: Results) -> str:
    """Return one table for all: a column for each transport, a group of lines for each scenario.

    A figure is the median of its rounds with the smallest and largest behind it, and then its ratio to tcp, the
    median of the ratios round by round.
    """
    transports = list(dict.fromkeys(transport for _, transport in taken))
    lines = [["", *transports]]
    for name in dict.fromkeys(scenario for scenario, _ in taken):
        lines += [[""] * (1 + len(transports)), [SCENARIOS[name].title, *[""] * len(transports)]]
        base = taken.get((name, BASE))
        for row in _SHOWN[name]:
            cells = [_cell(row, taken[name, t], base if t != BASE else None) for t in transports]
            if any(cell != "-" for cell in cells):
                lines.append([f"  {row.title}", *cells])
    # A title of a group stands alone in its line, so it may be as long as it likes.
    widths = [max(map(len, column)) for column in zip(*(line for line in lines if any(line[1:])), strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )


def _cell(row: Row[Taken], rounds: Sequence[Taken], base: Sequence[Taken] | None) -> str:
    values = [row.value(one) for one in rounds]
    found = spread(values)
    if found is None:
        return "-"
    text = f"{found.median:,.{row.digits}f}"
    if found.low != found.high:
        text += f" ({found.low:,.{row.digits}f}–{found.high:,.{row.digits}f})"
    if base is not None and row.compared:
        to_base = spread(ratio(value, row.value(other)) for value, other in zip(values, base, strict=True))
        if to_base is not None:
            text += f" ×{to_base.median:.2f}"
    return text


def faults(taken: Results) -> list[str]:
    """Return wrong answers, and transports that under load send their broker as many messages as there are tokens."""
    found: list[str] = []
    for (name, transport), rounds in taken.items():
        kinds: dict[str, int] = {}
        for one in rounds:
            for kind, count in one.measured.error_kinds.items():
                kinds[kind] = kinds.get(kind, 0) + count
        found += [f"{name} over {transport}: {count} x {kind}" for kind, count in kinds.items()]
        share = spread(one.per_token(one.costs.messages) for one in rounds)
        if name in _UNDER_LOAD and share is not None and share.median >= 1:
            found.append(f"{name} over {transport}: {share.median:.2f} broker messages per token: rows are not merged")
    return found


def _document(taken: Results, settings: Mapping[str, object]) -> dict[str, object]:
    scenarios = list(dict.fromkeys(name for name, _ in taken))
    blocks = [
        Block(SCENARIOS[name], {t: [one.measured for one in rounds] for (of, t), rounds in taken.items() if of == name})
        for name in scenarios
    ]
    parts = [
        {
            "scenario": name,
            "transport": transport,
            "summary": {row.key: _plain([row.value(one) for one in rounds]) for row in _SHOWN[name]},
            "rounds": [asdict(one.costs) for one in rounds],
        }
        for (name, transport), rounds in taken.items()
    ]
    return {**document(blocks, settings), "parts": parts}


def _plain(values: Sequence[float | None]) -> dict[str, float] | None:
    found = spread(values)
    return None if found is None else asdict(found)


def _chosen(text: str) -> tuple[str, ...]:
    picked = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    unknown = [name for name in picked if name not in TRANSPORTS]
    if unknown or not picked:
        raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(TRANSPORTS)}")
    return picked
