"""One run of a kit over an installed plugin, and its output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from dynamo_core.errors import ConfigError

from dynamo_testing.assertion_rewriting import REWRITTEN
from dynamo_testing.engine.report import FAILED, OK, SKIPPED
from dynamo_testing.installed.subject import Subject

if TYPE_CHECKING:
    import pytest

#: As wide as the longest outcome.
_WIDTH = 7


class Trial:
    """A plugin of pytest that prints a line for each check as soon as it is made."""

    def __init__(self, subject: Subject, *, as_json: bool, start_timeout: float) -> None:
        self._subject = subject
        self._as_json = as_json
        self._start_timeout = start_timeout
        self._checks: list[dict[str, Any]] = []
        # pytest captures what is printed while it runs.
        self._out = sys.stdout

    def run(self) -> int:
        """Return the exit code: 0 if the plugin keeps its contract, else 1.

        Raises:
            ConfigError: pytest is not installed, or the plugin cannot be started with these settings.
        """
        try:
            import pytest
        except ModuleNotFoundError:
            raise ConfigError(
                "the kits of this kind are classes of tests and need pytest: pip install 'dynamo-testing[pytest]'"
            ) from None
        from dynamo_core.contracts.plugin import ConnectingPlugin

        if issubclass(self._subject.cls, ConnectingPlugin):
            asyncio.run(self._try_start())
        Subject.current = self._subject
        entry, began = self._subject.entry, time.monotonic()
        self._say(f"{self._kind} {entry.name} ({entry.origin})")
        # Neither the plugins of pytest that happen to be installed nor the options of a project belong to this run.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ.pop("PYTEST_ADDOPTS", None)
        here = Path(__file__).parent
        options = ["-c", os.devnull, "--rootdir", str(here), "--confcutdir", str(here), "--import-mode=importlib"]
        options += ["--capture=sys", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "pytest_asyncio.plugin"]
        options += ["-o", "asyncio_mode=auto", "-W", "ignore::pytest.PytestWarning"]
        pytest.main([*options, str(here / "checks.py")], plugins=[self])
        return self._finish(time.monotonic() - began)

    @property
    def _kind(self) -> str:
        return self._subject.entry.kind.replace("_", " ")

    async def _try_start(self) -> None:
        from dynamo_telemetry.metrics import Metrics

        plugin = self._subject.cls(self._subject.config, Metrics())
        try:
            async with asyncio.timeout(self._start_timeout):
                await plugin.start()
        except TimeoutError:
            waits = f": {plugin.waits_for}" if plugin.waits_for else ""
            raise ConfigError(
                f"{self._kind} {self._subject.entry.name!r} did not start within {self._start_timeout:g} s{waits}; "
                "if it needs a server, start one and give its address with --set"
            ) from None
        finally:
            await plugin.aclose()

    # What pytest calls.

    def pytest_configure(self, config: pytest.Config) -> None:
        """Have the failures of the kits explained."""
        import pytest

        pytest.register_assert_rewrite(*REWRITTEN)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the checks of this kind, and tell their classes what the command line says of the kit."""
        from dynamo_testing.installed import checks

        names = [cls.__name__ for cls in checks.CHECKS[self._subject.entry.kind]]
        items[:] = [item for item in items if getattr(getattr(item, "cls", None), "__name__", "") in names]
        for cls in {getattr(item, "cls", None) for item in items}:
            for name, value in self._subject.attributes.items():
                if hasattr(cls, name):
                    setattr(cls, name, value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a check ended: its call, or a step before or after it that did not go well."""
        if report.when != "call" and report.outcome == "passed":
            return
        promise = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        outcome = {"passed": OK, "skipped": SKIPPED}.get(report.outcome, FAILED)
        seen = ""
        if outcome == SKIPPED and isinstance(report.longrepr, tuple):
            seen = report.longrepr[2].removeprefix("Skipped: ")
        elif outcome == FAILED:
            crash = getattr(report.longrepr, "reprcrash", None)
            seen = crash.message if crash is not None else str(report.longrepr)
        self._checks.append({"check": promise, "outcome": outcome.lower(), "seen": seen, "duration": report.duration})
        indent = "\n" + " " * (_WIDTH + 4)
        self._say(f"{outcome:{_WIDTH}}  {promise}" + (indent + seen.replace("\n", indent) if seen else ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report a kit that cannot be loaded as an error of the set-up."""
        if report.failed:
            raise ConfigError(f"the kits cannot be loaded: {report.longreprtext.splitlines()[-1]}")

    def _finish(self, duration: float) -> int:
        failed = [check for check in self._checks if check["outcome"] == FAILED.lower()]
        done = [check for check in self._checks if check["outcome"] == OK]
        skipped = len(self._checks) - len(failed) - len(done)
        passed = bool(done) and not failed
        entry = self._subject.entry
        if self._as_json:
            about = {"kind": entry.kind, "name": entry.name, "distribution": entry.distribution}
            about |= {"version": entry.version}
            result = {"passed": passed, "duration": round(duration, 3), "checks": self._checks}
            click.echo(json.dumps(about | result, indent=2), file=self._out)
        elif passed:
            self._say(
                f"The {self._kind} keeps its contract: {len(done)} checks ok"
                + (f", {skipped} skipped" if skipped else "")
                + f", in {duration:.1f} s."
            )
        else:
            self._say(
                f"The {self._kind} does not keep its contract: {len(failed)} of {len(self._checks)} checks failed."
            )
        return 0 if passed else 1

    def _say(self, text: str) -> None:
        if not self._as_json:
            click.echo(text, file=self._out)
