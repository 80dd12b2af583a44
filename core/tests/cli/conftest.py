"""A folder with one small plugin of every kind, and a way to run the command in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import TypeAlias

import pytest
from click.testing import CliRunner, Result
from dynamo_core.cli.main import cli

STAGES = """
from dynamo_core import (
    Admission, Discovery, EngineConfig, Frontend, LLMEngine, LLMEngineOutput, PluginConfig, Router, Transport, hookimpl
)
from pydantic import Field

DYNAMO_API = 2


class Limits(PluginConfig):
    limit: int = Field(default=4, ge=1, description="Requests at once.")

    def remarks(self):
        return [f"a limit of {self.limit} is large"] if self.limit > 100 else []


def stage(base, name, **members):
    members = {method: lambda *args: None for method in base.__abstractmethods__} | members
    return type(name.capitalize(), (base,), {"NAME": name} | members)


@hookimpl
def dynamo_register_engines():
    return [stage(LLMEngine, "fake", Config=Limits)]

@hookimpl
def dynamo_register_transports():
    return [stage(Transport, "near", CROSS_PROCESS=False), stage(Transport, "far", CROSS_PROCESS=True)]

@hookimpl
def dynamo_register_discovery():
    return [stage(Discovery, "near", CROSS_PROCESS=False), stage(Discovery, "far", CROSS_PROCESS=True)]

@hookimpl
def dynamo_register_routers():
    return [stage(Router, "fake")]

@hookimpl
def dynamo_register_admission():
    return [stage(Admission, "fake", Config=Limits)]

@hookimpl
def dynamo_register_frontends():
    return [stage(Frontend, "fake", Config=Limits)]

@hookimpl
def dynamo_engine_stopped(worker_id):
    pass
"""

NAMES = (
    "engine-fake",
    "transport-near",
    "transport-far",
    "discovery-near",
    "discovery-far",
    "router-fake",
    "admission-fake",
    "frontend-fake",
    "hook-fake",
)

CONFIG = """
frontend: {use: fake}
router: {use: fake}
transport: {use: near}
discovery: {use: near}
workers:
  one:
    model: {name: a-model}
    engine: {use: fake, limit: 2}
    replicas: 3
"""

RunCli: TypeAlias = Callable[..., Result]


class Site:
    """A folder on the import path into which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, group: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> None:
        """Writes a distribution with entry points of one group and modules, given as name and source."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2.3\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("DYN_CONFIG", "DYN_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    site = Site(folder)
    site.install("acme-stages", "dynamo", dict.fromkeys(NAMES, "fake_stages"), {"fake_stages": STAGES})
    before = set(sys.modules)
    yield site
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A sound config file over the small plugins."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def dynamo(site: Site) -> RunCli:
    """Runs the command in this process."""

    def run(*args: object) -> Result:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="dynamo", catch_exceptions=False)

    return run
