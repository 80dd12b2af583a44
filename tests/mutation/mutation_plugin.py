"""A plugin of pytest for each run of tests: runs chosen tests in order, or measures what each test covers."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from coverage import Coverage

#: The folder of a run: the plugin reads `told.json`, and writes `tests.json` and the data of coverage.
FOLDER = Path(os.environ["MUTATION_FOLDER"])


class Choice:
    """Keeps the chosen tests, in the order in which they were chosen."""

    def __init__(self, tests: list[str]) -> None:
        self._order = {name: number for number, name in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = (item for item in items if item.nodeid in self._order)
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])


class Measure:
    """Measures which lines of the modules each test runs."""

    def __init__(self, modules: list[str]) -> None:
        self._coverage = Coverage(str(FOLDER / "coverage"), data_suffix=True, include=modules, config_file=False)
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        self._coverage.save()


class Report:
    """Writes how long each test took, and which have failed."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_unconfigure(self) -> None:
        (FOLDER / "tests.json").write_text(json.dumps([self._seconds, self._failed]))


def pytest_configure(config: pytest.Config) -> None:
    """Register what the folder of the run asks for."""
    told = json.loads((FOLDER / "told.json").read_text())
    config.pluginmanager.register(Choice(told["tests"]) if "tests" in told else Measure(told["modules"]))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report())
