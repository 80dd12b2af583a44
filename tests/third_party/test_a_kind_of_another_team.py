"""A kind of plugins from another team: declared, offered, loaded, listed, checked and written by other teams."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from click.testing import CliRunner
from dynamo_core.errors import PluginError
from dynamo_core.plugins.loader import PluginLoader
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.cli.main import cli
from dynamo_runtime.settings import load_settings

OWNER = """
import click
from dynamo_core import Extension, Plugin, PluginConfig, hookimpl

DYNAMO_API = 1

class Launcher(Plugin):
    def launch(self) -> str:
        raise NotImplementedError

class FleetConfig(PluginConfig):
    launcher: str

class Fleet(Extension):
    NAME = "fleet"
    Config = FleetConfig

    async def start(self):
        self.launched = self.services.load_plugin("launcher", self.config.launcher)().launch()

@hookimpl
def dynamo_register_extensions():
    return [Fleet]

@click.command()
@click.argument("name")
def check(name):
    click.echo(f"{name} keeps its contract")

@click.command()
@click.argument("name")
def write(name):
    click.echo(f"wrote {name}")
"""
LOCAL = """
from dynamo_core import hookimpl
from fake_fleet import Launcher

DYNAMO_API = 1

class Local(Launcher):
    NAME = "local"

    def launch(self):
        return "a process"

@hookimpl
def dynamo_register_launchers():
    return [Local]
"""
CONFIG = """
frontend: {port: 0}
client: {drain_grace: 0, shutdown_timeout: 1}
workers: {mock: {model: {name: m}, engine: {use: mocker}, grace_period: 0}}
extensions: [{use: fleet, launcher: LAUNCHER}]
"""


class Site(Protocol):
    folder: Path

    def install(
        self, distribution: str, entries: dict[str, str], modules: dict[str, str], *, group: str = ...
    ) -> None: ...


@pytest.fixture
def fleet(site: Site) -> Site:
    """Install the kind `launcher` with its owner, and one launcher."""
    kinds = {
        "launcher": "fake_fleet:Launcher",
        "launcher.kit": "fake_fleet:check",
        "launcher.scaffold": "fake_fleet:write",
    }
    site.install("acme-kinds", kinds, {"fake_fleet": OWNER}, group="dynamo.kinds")
    site.install("acme-fleet", {"extension-fleet": "fake_fleet"}, {})
    site.install("acme-local", {"launcher-local": "fake_local"}, {"fake_local": LOCAL})
    return site


def dynamo(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_kind_that_two_distributions_declare_is_a_conflict_when_it_is_used(fleet: Site) -> None:
    site = fleet
    site.install(
        "other-kinds", {"launcher": "fake_other:Launcher", "launcher.kit": "fake_other:check"}, {}, group="dynamo.kinds"
    )

    with pytest.raises(PluginError, match="'launcher' is declared by both acme-kinds and other-kinds: uninstall all"):
        PluginLoader().load("launcher", "local")
    assert "'launcher.kit' is declared by both" in CliRunner().invoke(cli, ["conformance", "launcher", "x"]).output
    assert dynamo("plugins", "--json")


def test_declaring_a_kind_imports_nothing(fleet: Site) -> None:
    listed = json.loads(dynamo("plugins", "--json"))["plugins"]

    [local] = [plugin for plugin in listed if plugin["name"] == "local"]
    assert (local["kind"], local["distribution"], local["loaded"]) == ("launcher", "acme-local", False)
    assert not {"fake_fleet", "fake_local"} & set(sys.modules)


async def start_fleet(folder: Path, launcher: str) -> tuple[Any, Mapping[str, str]]:
    """Run a process with the extension; give the extension and the failures of extensions."""
    (folder / "config.yaml").write_text(CONFIG.replace("LAUNCHER", launcher))
    async with Application(load_settings(folder / "config.yaml", env={})) as application:
        await application.start()
        assert application.frontend_process is not None
        extensions = application.frontend_process.parts.extensions
        return extensions._made["fleet"], dict(extensions.failures)


async def test_an_extension_loads_plugins_of_its_own_kind(fleet: Site, tmp_path: Path) -> None:
    extension, failures = await start_fleet(tmp_path, "local")

    assert (extension.launched, failures) == ("a process", {})


async def test_a_plugin_that_is_not_installed_is_named(fleet: Site, tmp_path: Path) -> None:
    _, failures = await start_fleet(tmp_path, "lokal")

    assert "there is no launcher 'lokal' (installed: local): did you mean 'local'?" in failures["fleet"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOCAL.replace("class Local(Launcher)", "class Local"), "is not a class made from Launcher"),
        (LOCAL.replace("dynamo_register_launchers", "dynamo_register_launcher"), "did you mean dynamo_register_launc"),
    ],
)
def test_a_plugin_is_held_to_the_contract_and_the_hook_of_the_kind(fleet: Site, source: str, message: str) -> None:
    (fleet.folder / "fake_local.py").write_text(source)

    with pytest.raises(PluginError, match=message):
        PluginLoader().load("launcher", "local")


def test_a_contract_that_is_not_there_is_named(fleet: Site) -> None:
    fleet.install("acme-broken", {"scaler": "fake_fleet:Scaler"}, {}, group="dynamo.kinds")
    fleet.install("acme-up", {"scaler-up": "fake_up"}, {"fake_up": LOCAL.replace("launchers", "scalers")})

    with pytest.raises(PluginError, match="contract fake_fleet:Scaler cannot be imported"):
        PluginLoader().load("scaler", "up")


def test_a_kind_of_core_is_not_declared_again(fleet: Site) -> None:
    fleet.install("acme-engines", {"engine": "fake_fleet:Launcher"}, {}, group="dynamo.kinds")

    assert PluginLoader().load("engine", "mocker").__name__ == "MockerEngine"


def test_the_kit_and_the_scaffold_of_a_kind_are_commands(fleet: Site) -> None:
    assert dynamo("conformance", "launcher", "local") == "local keeps its contract\n"
    assert dynamo("new", "launcher", "mine") == "wrote mine\n"
    assert "launcher" in dynamo("new", "--help")
