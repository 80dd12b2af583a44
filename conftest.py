"""Fixtures of every test of the tree, and small distributions on disk as an installer would have written them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from unittest.mock import patch

import pytest
from hypothesis import settings

ECHO = """
from dynamo_core import EngineConfig, LLMEngine, LLMEngineOutput, hookimpl

DYNAMO_API = 1


class EchoEngine(LLMEngine):
    NAME = "echo"

    async def start(self, worker_id):
        return EngineConfig(model="echo")

    async def generate(self, request, ctx):
        yield LLMEngineOutput.stop()

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_engines():
    return [EchoEngine]
"""

# How much of what can be generated is tried: a little in every run, more in the long lanes, which choose it by option.
settings.register_profile("brief", max_examples=10, deadline=None)
settings.register_profile("thorough", max_examples=150, deadline=None)
settings.load_profile("brief")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what collecting leaves: ten thousand tests, and all that they import.

    To look through it again and again while it grows takes a quarter of the collecting, and later some of each test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment after each test: commands that run in this process may set variables."""
    with patch.dict(os.environ):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what tests log of a hostile client: reports travel between processes and must be text that can."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


class Site:
    """A folder on the import path into which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str],
        *,
        version: str = "1.2.3",
        group: str = "dynamo",
    ) -> None:
        """Write a distribution with entry points of one group and modules, given as name and source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))

    def install_echo(self, source: str = ECHO) -> None:
        """Install the engine ``echo``, or something else in its place."""
        self.install("dynamo-plugin-engine-echo", {"engine-echo": "fake_engine_echo"}, {"fake_engine_echo": source})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def echo() -> str:
    """Return the source of a sound plugin, to be broken."""
    return ECHO
