"""Trials of mutants: the tests that run a changed line, against a copy of the tree that has the change."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation.mutants import Mutant

#: Seconds that a single test may take at its trial, and above which it takes no part.
TEST_TIMEOUT, SLOW = 90, 30


def read_report(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Return what the plugin has written to a folder, if the run came to that: durations, and the tests that failed."""
    report = folder / "tests.json"
    seconds, failed = json.loads(report.read_text()) if report.exists() else ({}, [])
    return seconds, failed


class Copy:
    """A copy of a checkout in which tests run; the distributions of an environment are imported from it."""

    def __init__(self, checkout: Path, python: Path, folder: Path) -> None:
        self.tree, self.folder, self._python = folder / "tree", folder, python
        left_out = shutil.ignore_patterns(".*", "node_modules", "__pycache__")
        shutil.copytree(checkout, self.tree, ignore=left_out, symlinks=True)
        sources = [path for pattern in ("*/src", "libs/*/src", "plugins/*/*/src") for path in self.tree.glob(pattern)]
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": os.pathsep.join([*map(str, sorted(sources)), str(Path(__file__).parent)]),
        }

    def run(
        self, folder: Path, told: dict[str, list[str]], paths: Iterable[str], *arguments: str, deadline: float
    ) -> int | None:
        """Run tests with what the plugin is told, and let it write to a folder; return the status, None if too late."""
        (folder / "told.json").write_text(json.dumps(told))
        (folder / "tests.json").unlink(missing_ok=True)
        command = [str(self._python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutation_plugin"]
        command += ["-o", f"timeout={TEST_TIMEOUT}", "-m", "not full", *arguments, *paths]
        environment = {**self._environment, "MUTATION_FOLDER": str(folder)}
        with (
            (folder / "output.txt").open("w") as text,
            subprocess.Popen(
                command, cwd=self.tree, env=environment, stdout=text, stderr=text, start_new_session=True
            ) as process,
        ):
            with suppress(subprocess.TimeoutExpired):
                process.wait(deadline)
            status = process.poll()
            # Also the processes that tests have left.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if status == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"pytest finds none of its tests: {folder / 'output.txt'}")
        return status

    def write(self, module: str, source: str) -> None:
        """Write the source of a module, and forget its compiled one, which may have the same size and second."""
        path = self.tree / module
        path.write_text(source)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()


class Baseline:
    """What the tests do on the unchanged tree: how long they take, and which lines of which module they run."""

    def __init__(self, folder: Path, modules: list[str]) -> None:
        seconds, failed = read_report(folder)
        self.seconds = {name: spent for name, spent in seconds.items() if spent < SLOW and name not in failed}
        sys.stderr.write(f"{len(self.seconds)} of {len(seconds)} tests take part; failed: {', '.join(failed) or '-'}\n")
        self._tests: dict[str, dict[int, set[str]]] = {module: defaultdict(set) for module in modules}
        for path in folder.glob("coverage.*"):
            data = CoverageData(str(path))
            data.read()
            for measured, module in product(data.measured_files(), modules):
                if measured.endswith(f"/{module}"):
                    for line, names in data.contexts_by_lineno(measured).items():
                        self._tests[module][line].update(names)
        #: How many lines of all measured modules each test runs.
        self._breadth = Counter(name for lines in self._tests.values() for names in lines.values() for name in names)

    def chosen(self, mutant: Mutant, patterns: Iterable[str], most: int) -> list[str]:
        """Return tests below some folders that run the line of a mutant, not more than `most`, by file.

        A case of each test goes before the second of any, and those before others that run fewer lines.
        """
        lines = self._tests[mutant.key.module]
        names = {name for line in mutant.lines for name in lines.get(line, ()) if name in self.seconds}
        near = [name for name in names if any(fnmatch(name, f"{pattern}/*") for pattern in patterns)]
        cases: Counter[str] = Counter()
        ranks = {}
        for name in sorted(near, key=lambda name: (self._breadth[name], name)):
            test = name.partition("[")[0]
            ranks[name] = (cases[test], self._breadth[name], name)
            cases[test] += 1
        first = sorted(near, key=ranks.__getitem__)[:most]
        files = {file: number for number, file in enumerate(dict.fromkeys(map(file_of, first)))}
        return sorted(first, key=lambda name: files[file_of(name)])


def file_of(test: str) -> str:
    """Return the file of a test by its node id."""
    return test.partition("::")[0]


def measure(copy: Copy, folder: Path, modules: list[str], paths: list[str]) -> None:
    """Run all tests of some folders once, and let the plugin write what they cover."""
    folder.mkdir(parents=True)
    told = {"modules": [str(copy.tree / module) for module in modules]}
    if copy.run(folder, told, paths, "-n2", "--dist=loadfile", deadline=3600) not in (0, 1):
        raise RuntimeError((folder / "output.txt").read_text(errors="replace")[-4000:])


def attempt(copy: Copy, mutant: Mutant, baseline: Baseline, tests: list[str]) -> tuple[bool, str]:
    """Run the tests of a mutant until one fails; return whether one did, and which.

    That one runs once more. If it passes then, the others run without it.
    """

    def run(tests: list[str]) -> int | None:
        deadline = 2 * TEST_TIMEOUT + 5 * sum(baseline.seconds[name] for name in tests)
        files = dict.fromkeys(map(file_of, tests))
        return copy.run(copy.folder, {"tests": tests}, files, "-x", "-p", "no:xdist", deadline=deadline)

    original = (copy.tree / mutant.key.module).read_text()
    copy.write(mutant.key.module, mutant.code)
    try:
        while tests:
            if (status := run(tests)) == 0:
                return False, f"{len(tests)} tests pass"
            _, failed = read_report(copy.folder)
            if status is None or not failed:
                return True, "beyond its deadline" if status is None else "tests cannot be collected"
            if run(failed) != 0:
                return True, failed[0]
            tests = [name for name in tests if name not in failed]
        return False, "no test runs it"
    finally:
        copy.write(mutant.key.module, original)
