"""A folder with one small plugin of every kind, and a way to run the command in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeAlias

import pytest
from click.testing import CliRunner, Result
from dynamo_runtime.cli.main import cli

STAGES = """
from dynamo_core import (
    Admission, Discovery, EngineConfig, Frontend, LLMEngine, LLMEngineOutput, PluginConfig, PluginRef, Router,
    Transport, hookimpl
)
from pydantic import Field

DYNAMO_API = 1


class Limits(PluginConfig):
    limit: int = Field(default=4, ge=1, description="Requests at once.")

    def remarks(self):
        return [f"a limit of {self.limit} is large"] if self.limit > 100 else []


class Wrapping(PluginConfig):
    then: PluginRef | None = None


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
    return [stage(Router, "fake", Config=Limits), stage(Router, "sticky", Config=Wrapping)]

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
    "router-sticky",
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


class Site(Protocol):
    def install(self, distribution: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> None: ...


@pytest.fixture
def site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a folder on the import path in which a plugin of every kind is installed."""
    for name in ("DYN_CONFIG", "DYN_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    site.install("acme-stages", dict.fromkeys(NAMES, "fake_stages"), {"fake_stages": STAGES})
    return site


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a sound config file over the small plugins."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def dynamo(site: Site) -> RunCli:
    """Run the command in this process."""

    def run(*args: object) -> Result:
        return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="dynamo", catch_exceptions=False)

    return run
