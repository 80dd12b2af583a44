from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import Result
from dynamo_runtime.cli.main import COMMANDS

RunCli = Callable[..., Result]

COMMAND_GROUP = "dynamo.commands"


class Site(Protocol):
    @property
    def folder(self) -> Path: ...
    def install(
        self, distribution: str, entries: dict[str, str], modules: dict[str, str], *, group: str = ...
    ) -> None: ...


IMPORTED_BY_HELP = """
import sys
from dynamo_runtime.cli.main import main
sys.argv = ["dynamo", {argument!r}]
try:
    main()
except SystemExit as end:
    assert end.code in (None, 0), end.code
print(*sorted(sys.modules), sep="\\n", file=sys.stderr)
"""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_no_plugin_and_nothing_heavy(site: Site, argument: str) -> None:
    site.install(
        "acme-extra", {"extra": "fake_extra:command"}, {"fake_extra": "raise SystemExit"}, group="dynamo.commands"
    )
    path = f"import sys; sys.path.insert(0, {str(site.folder)!r})"

    done = subprocess.run(
        [sys.executable, "-c", path + IMPORTED_BY_HELP.format(argument=argument)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )

    imported = set(done.stderr.splitlines())
    heavy = {"pydantic", "pydantic_settings", "aiohttp", "msgspec", "pluggy", "yaml", "asyncio"}
    assert done.stdout.startswith(("Usage: dynamo", "dynamo-core "))
    assert imported.isdisjoint(heavy)
    assert {name for name in imported if name.startswith("dynamo_")} == {
        "dynamo_core",
        "dynamo_runtime",
        "dynamo_runtime.cli",
        "dynamo_runtime.cli.lazy",
        "dynamo_runtime.cli.main",
        "dynamo_runtime.garbage_collector",
        "dynamo_core.lazy",
    }
    assert "fake_extra" not in imported
    assert "fake_stages" not in imported


def test_help_lists_every_command_with_its_line(dynamo: RunCli) -> None:
    output = dynamo("--help").output

    for name, line in COMMANDS.items():
        assert f"{name} " in output
        assert line in output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(dynamo: RunCli, name: str) -> None:
    result = dynamo(name, "--help")

    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: dynamo {name}")


def test_a_command_of_a_plugin_is_listed_unimported_and_runs(site: Site, dynamo: RunCli) -> None:
    source = """
        import click
        @click.command()
        def command():
            click.echo("extra ran")
    """
    site.install("acme-extra", {"extra": "fake_extra:command"}, {"fake_extra": source}, group=COMMAND_GROUP)

    listed = dynamo("--help").output
    imported_by_list = "fake_extra" in sys.modules
    ran = dynamo("extra").output

    assert "From acme-extra 1.2.3." in listed
    assert not imported_by_list
    assert ran == "extra ran\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_package", "cannot be imported: ModuleNotFoundError"),
        ("command = 7", "fake_extra:command is no click command"),
    ],
)
def test_a_broken_command_of_a_plugin_is_one_line(site: Site, dynamo: RunCli, source: str, words: str) -> None:
    site.install("acme-extra", {"extra": "fake_extra:command"}, {"fake_extra": source}, group=COMMAND_GROUP)

    result = dynamo("extra")

    assert result.exit_code == 2
    assert result.stderr.startswith("dynamo: command 'extra' (acme-extra 1.2.3): ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_plugin_cannot_take_the_name_of_a_command(site: Site, dynamo: RunCli) -> None:
    site.install(
        "acme-serve", {"serve": "fake_serve:command"}, {"fake_serve": "raise SystemExit"}, group="dynamo.commands"
    )

    assert "acme-serve" not in dynamo("--help").output
    assert dynamo("serve", "--help").output.startswith("Usage: dynamo serve")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["serv"], "serve"), (["chekc"], "check"), (["conformence", "engine"], "conformance"), (["ekstra"], "extra")],
)
def test_a_mistyped_command_is_asked_whether_another_was_meant(
    site: Site, dynamo: RunCli, typed: list[str], meant: str
) -> None:
    site.install(
        "acme-extra", {"extra": "fake_extra:command"}, {"fake_extra": "raise SystemExit"}, group="dynamo.commands"
    )

    result = dynamo(*typed)

    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2
    assert last.startswith(f"Error: No such command '{typed[0]}'")
    assert "Did you mean" in last
    assert f"'{meant}'" in last


def test_naming_two_files_is_refused(dynamo: RunCli, config: Path) -> None:
    result = dynamo("check", config, "--config", "other.yaml")

    assert result.exit_code == 2
    assert "two config files are named" in result.stderr


def test_an_error_that_is_no_config_error_is_not_hidden(
    dynamo: RunCli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dynamo_runtime.settings.load_settings", explode)

    with pytest.raises(ZeroDivisionError):
        dynamo("check", config)
