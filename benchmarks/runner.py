"""Runs scenarios in rounds, the targets taking turns, and writes the results."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.load import Measured, Target, measure
from benchmarks.report import Block, document, table
from benchmarks.scenarios import Scenario

ROUNDS: Final = 3
QUICK_SECONDS: Final = 1.0

Plan = Sequence[tuple[Scenario, Sequence[Target]]]


def quick(scenario: Scenario) -> Scenario:
    """Return a short form of a scenario: it starts no request after a second, which is one wave of the paced load."""
    return replace(scenario, seconds=min(scenario.seconds, QUICK_SECONDS))


def chosen_rounds(asked: int | None, *, quick: bool) -> int:
    """Return how often to measure each scenario: what was asked for, at least 1.

    Else 1 in quick mode and 3 otherwise.
    """
    if asked is not None:
        return max(asked, 1)
    return 1 if quick else ROUNDS


async def run_plan(plan: Plan, rounds: int, prepare: Callable[[Scenario], None] | None = None) -> list[Block]:
    """Measure every scenario `rounds` times on each of its targets; `prepare` is called before each turn of one.

    Targets take turns within a round, and the order turns round with each, so that neither always goes first.
    """
    results: list[dict[str, list[Measured]]] = [{target.name: [] for target in targets} for _, targets in plan]
    for number in range(rounds):
        for (scenario, targets), taken in zip(plan, results, strict=True):
            if prepare is not None:
                prepare(scenario)
            for target in targets if number % 2 == 0 else reversed(targets):
                print(f"round {number + 1} of {rounds}: {scenario.name} on {target.name}", file=sys.stderr, flush=True)
                taken[target.name].append(await measure(target, scenario))
    return [Block(scenario, taken) for (scenario, _), taken in zip(plan, results, strict=True)]


def publish(blocks: Sequence[Block], settings: Mapping[str, object], json_path: Path | None) -> int:
    """Print the table, write the JSON where wanted, and return the exit code: 1 if any answer was wrong."""
    print(table(blocks))
    if json_path is not None:
        json_path.write_text(json.dumps(document(blocks, settings), indent=2) + "\n")
        print(f"\nwritten to {json_path}")
    errors = sum(block.errors for block in blocks)
    if errors:
        print(f"\n{errors} wrong or failed answers: the figures are not to be trusted", file=sys.stderr)
    return 1 if errors else 0


def two_cpus() -> tuple[int, int] | None:
    """Return a CPU for the client and another for the servers; None where only one may be used."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[-1]) if len(allowed) > 1 else None


def pin_client(pin: bool) -> tuple[int, int] | None:
    """Keep this process on the first of two CPUs, and return both; None where all are shared."""
    cpus = two_cpus() if pin else None
    if cpus is None:
        print("client and servers share all CPUs")
    else:
        os.sched_setaffinity(0, {cpus[0]})
    return cpus
