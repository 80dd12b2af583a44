"""The project's own suite: `dynamo serve` in one process with the mocker, beside the bare probe, on this machine."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.children import ChildFailed, Children, accepts, answers_ready, free_port
from benchmarks.http1 import Endpoint
from benchmarks.load import Target
from benchmarks.loops import run
from benchmarks.meters import ProcessMeter
from benchmarks.report import Block
from benchmarks.runner import chosen_rounds, publish, quick, run_plan, two_cpus
from benchmarks.scenarios import SCENARIOS

MODEL: Final = "mock-model"
PACE_MS: Final = 6.4
SUITE_DEADLINE: Final = 300.0

_FAST: Final = ("unary-1", "unary-32", "unary-128", "flood")
_CONFIG: Final = """\
frontend: {{use: openai, host: 127.0.0.1, port: {port}}}
router: {{use: round-robin}}
transport: {{use: inproc}}
discovery: {{use: memory}}
log: {{level: warning}}
workers:
  mock:
    model: {{name: {model}}}
    engine: {{use: mocker, {engine}}}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks suite`."""
    parser.add_argument("--quick", action="store_true", help="one short round of each scenario, about 20 s")
    parser.add_argument("--rounds", type=int, help="measurements of each scenario (default 3, quick 1)")
    parser.add_argument("--json", type=Path, default=Path("bench-results.json"), help="default: %(default)s")
    parser.add_argument(
        "--no-pin", dest="pin", action="store_false", help="do not give client and servers a CPU each (default: do)"
    )
    parser.add_argument(
        "--split-probe",
        action="store_true",
        help="run the probe as two processes over TCP and count its front only (default: one process, as ours)",
    )


def run_suite(options: argparse.Namespace) -> int:
    """Run the suite in an event loop of its own; returns the exit code (143 when ended by SIGTERM)."""
    try:
        return run(_guarded(options))
    except asyncio.CancelledError:
        return 143


async def _guarded(options: argparse.Namespace) -> int:
    """SIGTERM cancels, as Ctrl-C does, so that the children are ended."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    cpus = two_cpus() if options.pin else None
    if cpus is None:
        print("client and servers share all CPUs")
    else:
        os.sched_setaffinity(0, {cpus[0]})
        print(f"client on CPU {cpus[0]}, servers on CPU {cpus[1]}")
    try:
        async with asyncio.timeout(SUITE_DEADLINE):
            with tempfile.TemporaryDirectory(prefix="dynamo-bench-") as folder:
                async with Children(Path(folder), cpus[1] if cpus else None) as children:
                    blocks = await _measure(options, children, Path(folder))
                    if any(block.errors for block in blocks):
                        print(children.last_words(), file=sys.stderr)
    except ChildFailed as error:
        print(error, file=sys.stderr)
        return 1
    except TimeoutError:
        print(f"the suite did not end within {SUITE_DEADLINE:g} s", file=sys.stderr)
        return 1
    settings = {"suite": "inproc mocker", "quick": options.quick, "pinned": cpus is not None}
    settings["probe"] = "two processes, front counted" if options.split_probe else "one process"
    return publish(blocks, settings, options.json)


async def _measure(options: argparse.Namespace, children: Children, folder: Path) -> list[Block]:
    flat_out = [
        await _ours(children, folder, "dynamo-flood", "speedup_ratio: 0"),
        await _probe(children, "probe-flood", 0.0, split=options.split_probe),
    ]
    paced = [
        await _ours(children, folder, "dynamo-paced", f"fixed_itl_ms: {PACE_MS}"),
        await _probe(children, "probe-paced", PACE_MS, split=options.split_probe),
    ]
    plan = [(SCENARIOS[name], flat_out) for name in _FAST] + [(SCENARIOS["paced"], paced)]
    if options.quick:
        plan = [(quick(scenario), targets) for scenario, targets in plan]
    return await run_plan(plan, chosen_rounds(options.rounds, quick=options.quick))


async def _ours(children: Children, folder: Path, name: str, engine: str) -> Target:
    port = free_port()
    config = folder / f"{name}.yaml"
    config.write_text(_CONFIG.format(port=port, model=MODEL, engine=engine))
    command = Path(sys.executable).with_name("dynamo")
    if not command.exists():
        raise ChildFailed(f"{command} is missing: install the distributions into this Python's environment first")
    pid = await children.start(name, [str(command), "serve", str(config)], lambda: answers_ready(port))
    return Target("dynamo", Endpoint("127.0.0.1", port, ""), MODEL, ProcessMeter(pid))


async def _probe(children: Children, name: str, step_ms: float, *, split: bool) -> Target:
    port = free_port()
    base = [sys.executable, "-m", "benchmarks.probe"]
    front = [*base, "front", "--port", str(port)]
    if split:
        link = free_port()
        worker = [*base, "worker", "--port", str(link), "--step-ms", str(step_ms)]
        await children.start(f"{name}-worker", worker, lambda: accepts(link))
        front += ["--worker-port", str(link)]
    else:
        front += ["--inproc", "--step-ms", str(step_ms)]
    pid = await children.start(name, front, lambda: accepts(port))
    return Target("probe", Endpoint("127.0.0.1", port, ""), MODEL, ProcessMeter(pid))
