"""Small distributions on disk: a module and the metadata that an installer would have written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

ECHO = """
from dynamo_core import EngineConfig, LLMEngine, LLMEngineOutput, hookimpl

DYNAMO_API = 2


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


class Site:
    """A folder on the import path into which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, distribution: str, entries: Mapping[str, str], modules: Mapping[str, str], *, version: str = "1.2.3"
    ) -> None:
        """Writes a distribution with entry points of the group ``dynamo`` and modules, given as name and source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[dynamo]", *lines, ""]))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))

    def install_echo(self, source: str = ECHO) -> None:
        """Installs the engine ``echo``, or something else in its place."""
        self.install("dynamo-plugin-engine-echo", {"engine-echo": "fake_engine_echo"}, {"fake_engine_echo": source})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def echo() -> str:
    """The source of a sound plugin, to be broken."""
    return ECHO
