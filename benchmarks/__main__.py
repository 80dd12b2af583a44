"""The command line: `python -m benchmarks --url …` for any server.

`… suite`, `… transports`, `… adapter`, `… prompts`, `… registrations`, `… kv`, `… slot-tracker` and `… transformers`
for the project's own.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Final

from benchmarks.children import pin
from benchmarks.http1 import Endpoint
from benchmarks.load import Target
from benchmarks.loops import run
from benchmarks.meters import Meter, MetricsMeter, ProcessMeter
from benchmarks.report import Block
from benchmarks.runner import Plan, chosen_rounds, publish, quick, run_plan, two_cpus
from benchmarks.scenarios import SCENARIOS, chosen

#: Those of this project: each is a module of this package.
MEASUREMENTS: Final = (
    "suite",
    "transports",
    "adapter",
    "prompts",
    "registrations",
    "kv",
    "kv-frontend",
    "kv-quality",
    "slot-tracker",
    "overload",
    "feed",
    "bodies",
    "transformers",
)
#: Those whose module has another name.
MODULES: Final = {"kv": "kv_index", "transformers": "transformers_overhead"}


def main(arguments: list[str]) -> int:
    """Exit code 0 = measured and every answer right, 1 = wrong answers or a server that failed, 2 = usage."""
    if arguments[:1] and arguments[0] in MEASUREMENTS:
        name = arguments[0].replace("-", "_")
        # Some need plugins which the others do not.
        measurement = importlib.import_module(f"benchmarks.{MODULES.get(name, name)}")
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks {arguments[0]}", description=measurement.__doc__)
        measurement.add_arguments(parser)
        code: int = getattr(measurement, f"run_{name}")(parser.parse_args(arguments[1:]))
        return code
    return _measure_urls(arguments)


def _measure_urls(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure an OpenAI-compatible server. Measurements of this project have a name instead: "
        f"{', '.join(MEASUREMENTS)}. See python -m benchmarks NAME --help.",
    )
    parser.add_argument("--url", required=True, help="base URL, with or without /v1")
    parser.add_argument("--model", required=True, help="the model to ask for")
    parser.add_argument("--pid", type=int, help="the process under test (default: its GET /metrics says its CPU time)")
    parser.add_argument("--compare", metavar="URL", help="a second server, measured in turn with the first")
    parser.add_argument("--compare-pid", type=int, metavar="PID", help="its process")
    parser.add_argument("--compare-model", metavar="NAME", help="its model (default: the same)")
    parser.add_argument(
        "--scenarios",
        default="unary-1,unary-32,unary-128,flood",
        help=f"comma-separated, of {', '.join(SCENARIOS)}; the pace of a paced load is the server's own "
        "(default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="measurements of each scenario (default 3, quick 1)")
    parser.add_argument("--quick", action="store_true", help="one round of about a second for each scenario")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one request (default %(default)g)")
    parser.add_argument("--children", action="store_true", help="count processes below --pid as well")
    parser.add_argument("--pin", action="store_true", help="keep the client on one CPU and each --pid on another")
    parser.add_argument(
        "--no-stream-usage",
        dest="stream_usage",
        action="store_false",
        help="do not ask streams for their usage: for servers that refuse stream_options",
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    rounds = chosen_rounds(options.rounds, quick=options.quick)
    if options.compare == options.url:
        parser.error("--compare must be another server than --url")
    try:
        scenarios = chosen(options.scenarios)
        targets = [_target(options, options.url, options.model, options.pid)]
        if options.compare:
            model = options.compare_model or options.model
            targets.append(_target(options, options.compare, model, options.compare_pid))
    except ValueError as error:
        parser.error(str(error))
    if options.pin:
        _pin([pid for pid in (options.pid, options.compare_pid) if pid is not None])
    if options.quick:
        scenarios = [quick(scenario) for scenario in scenarios]
    plan: Plan = [(scenario, targets) for scenario in scenarios]
    try:
        blocks: list[Block] = run(run_plan(plan, rounds))
    except ProcessLookupError as error:
        print(error, file=sys.stderr)
        return 1
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    return publish(blocks, settings, options.json)


def _target(options: argparse.Namespace, url: str, model: str, pid: int | None) -> Target:
    endpoint = Endpoint.parse(url)
    if pid is not None and not Path(f"/proc/{pid}").exists():
        raise ValueError(f"there is no process {pid}")
    meter: Meter = MetricsMeter(endpoint) if pid is None else ProcessMeter(pid, children=options.children)
    return Target(
        f"{endpoint.host}:{endpoint.port}{endpoint.prefix}",
        endpoint,
        model,
        meter,
        options.timeout,
        options.stream_usage,
    )


def _pin(pids: list[int]) -> None:
    cpus = two_cpus()
    if cpus is None:
        print("only one CPU may be used: nothing is pinned")
        return
    os.sched_setaffinity(0, {cpus[0]})
    for pid in pids:
        pin(pid, cpus[1])
    print(f"client on CPU {cpus[0]}, processes {', '.join(map(str, pids)) or '(none given)'} on CPU {cpus[1]}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
