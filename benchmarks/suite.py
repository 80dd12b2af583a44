"""The project's own suite: `dynamo serve` with the mocker beside the bare probe, both with one model, on this machine.

Frontend and worker are processes of their own, and only the frontend is measured; with `--inproc` one process is both.
With `--extension` the probe gives way: the frontend with that extension is measured beside one without any. With
`--parser` it is one that parses answers with thoughts and calls of tools, beside one that passes them on as text.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamo_testing.servers.ports import free_port
from dynamo_testing.tiny_model import make_tokenizer_folder

from benchmarks import extensions, parsing
from benchmarks.children import ChildFailed, Children, accepts, answers_ready, parts_of, pin
from benchmarks.http1 import Endpoint
from benchmarks.load import Target
from benchmarks.loops import run_until_sigterm
from benchmarks.meters import ProcessMeter
from benchmarks.report import Block
from benchmarks.runner import Plan, chosen_rounds, pin_client, publish, quick, run_plan
from benchmarks.scenarios import SCENARIOS, Scenario

MODEL: Final = "mock-model"
PACE_MS: Final = 6.4
SUITE_DEADLINE: Final = 300.0

_FAST: Final = ("unary-1", "stream-1", "unary-32", "unary-128", "flood")
_CONFIG: Final = """\
frontend: {{use: openai, host: 127.0.0.1, port: {port}}}
router: {{use: round-robin}}
transport: {{use: {transport}}}
discovery: {discovery}
log: {{level: warning}}
extensions: [{extensions}]
workers:
  mock:
    model: {{name: {model}, path: {folder}, tool_call_parser: {tool_parser}, reasoning_parser: {reasoning_parser}}}
    engine: {{use: mocker, {engine}}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks suite`."""
    parser.add_argument("--quick", action="store_true", help="one short round of each scenario, about 20 s")
    parser.add_argument("--rounds", type=int, help="measurements of each scenario (default 3, quick 1)")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), help="default: %(default)s")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="do not give client and servers a CPU each (default: do)"
    )
    parser.add_argument(
        "--inproc",
        action="store_true",
        help="one process for everything, on both sides (default: the frontend is a process of its own, and measured)",
    )
    parser.add_argument(
        "--extension",
        choices=(extensions.Idle.NAME, extensions.Subscriber.NAME, "otel-metrics"),
        help="compare the frontend with this extension and the one without, in place of the probe",
    )

    parser.add_argument(
        "--parser",
        choices=tuple(parsing.CALLS),
        help="compare the frontend with this parser of calls, and one of reasoning, and the one without",
    )


def run_suite(options: argparse.Namespace) -> int:
    """Run the suite in an event loop of its own; returns the exit code (143 when ended by SIGTERM)."""
    return run_until_sigterm(_run(options))


async def _run(options: argparse.Namespace) -> int:
    cpus = pin_client(options.pin)
    if cpus is not None:
        others = "" if options.inproc else " and workers"
        lonely = "" if options.inproc else f"; a lonely client on CPU {cpus[1]} too"
        print(f"client{others} on CPU {cpus[0]}, measured processes on CPU {cpus[1]}{lonely}")
    try:
        async with asyncio.timeout(SUITE_DEADLINE):
            with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
                async with Children(Path(folder), cpus[1] if cpus else None) as children:
                    bench = Bench(children, Path(folder), options.inproc, cpus)
                    make_tokenizer_folder(bench.model)
                    if options.parser is not None:
                        parsing.add_markers(bench.model, options.parser)
                    blocks = await _measure(options, bench)
                    if any(block.errors for block in blocks):
                        print(children.last_words(), file=sys.stderr)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 1
    except TimeoutError:
        print(f"the suite did not end within {SUITE_DEADLINE:g} s", file=sys.stderr)
        return 1
    processes = "one process" if options.inproc else "frontend process only"
    settings = {"suite": "mocker", "measured": processes, "quick": options.quick, "pinned": cpus is not None}
    print(f"measured: {processes}\n")
    return publish(blocks, settings, options.json)


@dataclass(frozen=True, slots=True)
class Bench:
    """Starts the servers. `folder` is for their files; `cpus` are one for the client and workers, one for frontends."""

    children: Children
    folder: Path
    inproc: bool
    cpus: tuple[int, int] | None

    @property
    def model(self) -> Path:
        """The model folder that both sides serve."""
        return self.folder / "model"

    async def ours(self, name: str, engine: str, extension: str | None = None, *, parser: str | None = None) -> Target:
        """Return `dynamo serve`, with an extension if one is named, and with parsers if one is."""
        port = free_port()
        records = self.folder / f"{name}-records"
        config = self.folder / f"{name}.yaml"
        config.write_text(
            _CONFIG.format(
                port=port,
                model=MODEL,
                folder=self.model,
                engine=engine,
                tool_parser=parser or "none",
                reasoning_parser="none" if parser is None else "think",
                extensions="" if extension is None else f"{{use: {extension}}}",
                transport="inproc" if self.inproc else "tcp",
                discovery="{use: memory}" if self.inproc else f"{{use: file, path: {records}}}",
            )
        )
        command = Path(sys.executable).with_name("dynamo")
        if not command.exists():
            raise ChildFailed(f"{command} is missing: install the distributions into this Python's environment first")
        words = [str(command), "serve", str(config)]
        if extension is not None:
            extensions.install(self.folder / "extensions")
            words = ["env", f"PYTHONPATH={self.folder / 'extensions'}", *words]
        pid = await self.children.start(name, words, lambda: answers_ready(port))
        if not self.inproc:
            parts = parts_of(pid)
            pid = parts.pop("frontend")
            self._beside_the_clients(*parts.values())
        return Target(extension or parser or "dynamo", Endpoint("127.0.0.1", port, ""), MODEL, ProcessMeter(pid))

    async def probe(self, name: str, step_ms: float) -> Target:
        """Return the floor."""
        port = free_port()
        base = [sys.executable, "-m", "benchmarks.probe"]
        front = [*base, "front", "--port", str(port), "--model-dir", str(self.model)]
        if self.inproc:
            front += ["--inproc", "--step-ms", str(step_ms)]
        else:
            link = free_port()
            worker = [*base, "worker", "--port", str(link), "--step-ms", str(step_ms)]
            self._beside_the_clients(await self.children.start(f"{name}-worker", worker, lambda: accepts(link)))
            front += ["--worker-port", str(link)]
        pid = await self.children.start(name, front, lambda: accepts(port))
        return Target("probe", Endpoint("127.0.0.1", port, ""), MODEL, ProcessMeter(pid))

    def seat_client(self, scenario: Scenario) -> None:
        """Put this process on its CPU.

        One lonely client sleeps while the frontend works and the other way round, but the worker goes on making tokens
        when the first has left: a client on the worker's CPU would wait for it, and time that.
        """
        if self.cpus is not None:
            lonely = scenario.clients == 1 and not self.inproc
            os.sched_setaffinity(0, {self.cpus[lonely]})

    def _beside_the_clients(self, *pids: int) -> None:
        if self.cpus is not None:
            for pid in pids:
                pin(pid, self.cpus[0])


async def _measure(options: argparse.Namespace, bench: Bench) -> list[Block]:
    if options.extension is not None:
        plan = await _with_and_without(bench, options.extension)
    elif options.parser is not None:
        plan = await _parsed_and_not(bench, options.parser)
    else:
        plan = await _against_probe(bench)
    if options.quick:
        plan = [(quick(scenario), targets) for scenario, targets in plan]
    return await run_plan(plan, chosen_rounds(options.rounds, quick=options.quick), bench.seat_client)


async def _against_probe(bench: Bench) -> Plan:
    flat_out = [await bench.ours("dynamo-flood", "speedup_ratio: 0"), await bench.probe("probe-flood", 0.0)]
    paced = [await bench.ours("dynamo-paced", f"fixed_itl_ms: {PACE_MS}"), await bench.probe("probe-paced", PACE_MS)]
    return [*((SCENARIOS[name], flat_out) for name in _FAST), (SCENARIOS["paced"], paced)]


async def _with_and_without(bench: Bench, extension: str) -> Plan:
    pair = [
        await bench.ours("dynamo-with", "speedup_ratio: 0", extension),
        await bench.ours("dynamo-without", "speedup_ratio: 0"),
    ]
    return [(SCENARIOS[name], pair) for name in _FAST]


async def _parsed_and_not(bench: Bench, parser: str) -> Plan:
    engine = parsing.engine(parser)
    targets = [await bench.ours("dynamo-parsed", engine, parser=parser), await bench.ours("dynamo-plain", engine)]
    return [(SCENARIOS[name], [replace(target, tools=parsing.TOOLS) for target in targets]) for name in _FAST]
