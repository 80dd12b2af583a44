"""Tells how many of the mutants of a fixed sample are noticed by tests: ``python -m tests.mutation``.

``python -m tests.mutation [--against CHECKOUT] [--baseline FOLDER] [--most N] [--draw] [PATTERN ...]``

The sample is tried on this tree, or on another checkout that has its environment in ``.venv``. With patterns, only
mutants of matching modules and functions take part. The README of this folder says how a trial goes.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from tests.mutation.mutants import Key, Mutant, draw, follow
from tests.mutation.trials import Baseline, Copy, attempt, measure

ROOT = Path(__file__).parents[2]
SAMPLE, RENAMES = Path(__file__).with_name("sample.tsv"), Path(__file__).with_name("renames.tsv")

#: The seed and the size of the sample; how many mutants run at a time.
SEED, SIZE, PARALLEL = 31, 200, 2

#: Where the tests of modules are; the folders of core are those of runtime before it was a distribution.
IN_DISPATCH = ("runtime/tests/dispatch", "core/tests/dispatch", "tests/integration")
IN_WORKER = ("runtime/tests/worker", "core/tests/worker", "tests/integration")
IN_GENERATION = ("libs/generation/tests", "plugins/frontends/*/tests")
DISPATCH = "runtime/src/dynamo_runtime/dispatch"
GENERATION = "libs/generation/src/dynamo_generation"
#: The modules of the sample, of the hot path, of accounting, of recovery, and codecs, with the folders of their tests.
MODULES = {
    f"{DISPATCH}/execution/execution.py": IN_DISPATCH,
    f"{DISPATCH}/execution/response_stream.py": IN_DISPATCH,
    "runtime/src/dynamo_runtime/worker/adapter.py": IN_WORKER,
    f"{GENERATION}/choices/choice.py": IN_GENERATION,
    f"{GENERATION}/answers/usage.py": IN_GENERATION,
    f"{DISPATCH}/load/tracker.py": IN_DISPATCH,
    "plugins/routers/slot-tracker/src/dynamo_plugin_router_slot_tracker/sequences.py": ("plugins/routers/*/tests",),
    f"{DISPATCH}/execution/migrate.py": IN_DISPATCH,
    "libs/leases/src/dynamo_leases/maintainer.py": ("libs/leases/tests",),
    f"{GENERATION}/answers/sse.py": IN_GENERATION,
    "plugins/transports/tcp/src/dynamo_plugin_transport_tcp/frames.py": ("plugins/transports/tcp/tests",),
    "core/src/dynamo_core/kv/chains.py": ("core/tests/kv", "plugins/routers/*/tests"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tells how many mutants of a fixed sample are noticed by tests.")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN", help="only mutants of these modules or functions")
    parser.add_argument("--against", type=Path, default=ROOT, metavar="CHECKOUT", help="another checkout to try")
    parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="keep what tests cover there, or read it there")
    parser.add_argument(
        "--most", type=int, default=100, metavar="N", help="how many tests run against a mutant at most"
    )
    parser.add_argument("--draw", action="store_true", help="draw the sample anew from this tree")
    args = parser.parse_args()
    if args.draw:
        SAMPLE.write_text("".join("\t".join(map(str, key)) + "\n" for key in draw_sample()))
    else:
        sys.stdout.writelines(f"{line}\n" for line in report(args.against.resolve(), args))


def read_rows(path: Path) -> list[list[str]]:
    """Return the rows of a table with tabs."""
    return [line.split("\t") for line in path.read_text().splitlines()]


def read_sample() -> list[Key]:
    """Return the keys of the sample."""
    return [
        Key(module, function, name, int(number), change) for module, function, name, number, change in read_rows(SAMPLE)
    ]


def draw_sample() -> Iterator[Key]:
    """Return as many mutants of each module; what is left over goes to the first ones."""
    for number, module in enumerate(MODULES):
        yield from draw(module, (ROOT / module).read_text(), (SIZE - number - 1) // len(MODULES) + 1, SEED)


def report(root: Path, args: argparse.Namespace) -> Iterator[str]:
    """Try the mutants of the sample; yield those that are gone, were edited, or have survived, and the score."""
    followed = {key: follow(key, root, read_rows(RENAMES)) for key in read_sample()}
    modules = sorted({mutant.key.module for mutant in followed.values() if mutant})
    followed = {
        key: mutant for key, mutant in followed.items() if any(word in str(key) for word in args.patterns or [""])
    }
    for key, mutant in followed.items():
        if mutant is None:
            yield f"gone      {key}"
        elif mutant.key.change != key.change:
            yield f"edited    {key}: now {mutant.key.change}"
    found = {mutant: key.module for key, mutant in followed.items() if mutant}
    killed = 0
    for mutant, (noticed, reason) in zip(found, try_all(root, modules, found, args), strict=True):
        killed += noticed
        if not noticed:
            before = (root / mutant.key.module).read_text().splitlines()
            yield f"\nsurvived  {mutant.key}: {reason}"
            yield from list(difflib.unified_diff(before, mutant.code.splitlines(), lineterm="", n=0))[2:]
    yield f"\n{killed} of {len(found)} mutants killed ({killed / len(found):.1%}), {len(followed) - len(found)} gone"


def try_all(
    root: Path, modules: list[str], mutants: dict[Mutant, str], args: argparse.Namespace
) -> Iterator[tuple[bool, str]]:
    """Try every mutant of a module of the sample, a few at a time, each in a copy of the tree that no other uses."""
    with TemporaryDirectory(prefix="mutation-") as folder, ThreadPoolExecutor(PARALLEL) as pool:
        trees = [Copy(root, root / ".venv/bin/python", Path(folder, str(number))) for number in range(PARALLEL)]
        measured = args.baseline or Path(folder, "baseline")
        if not measured.exists():
            found = chain.from_iterable(root.glob(pattern) for pattern in set(chain.from_iterable(MODULES.values())))
            measure(trees[0], measured, modules, sorted(str(path.relative_to(root)) for path in found))
        baseline = Baseline(measured, modules)
        copies: SimpleQueue[Copy] = SimpleQueue()
        for tree in trees:
            copies.put(tree)

        def attempted(mutant: Mutant) -> tuple[bool, str]:
            copy = copies.get()
            try:
                tests = baseline.chosen(mutant, MODULES[mutants[mutant]], args.most)
                killed, reason = attempt(copy, mutant, baseline, tests)
            finally:
                copies.put(copy)
            sys.stderr.write(f"{'killed' if killed else 'SURVIVED'}  {mutant.key}: {reason}\n")
            return killed, reason

        yield from pool.map(attempted, mutants)


if __name__ == "__main__":
    main()
