from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from click.testing import Result

RunCli = Callable[..., Result]


class Site(Protocol):
    def install(self, distribution: str, entries: dict[str, str], modules: dict[str, str]) -> None: ...


def rows(result: Result) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["kind"], row["name"]): row for row in json.loads(result.stdout)["plugins"]}


def test_configured_plugins_are_loaded_with_their_hooks(dynamo: RunCli, config: Path) -> None:
    found = rows(dynamo("plugins", config, "--json"))

    engine, admission = found["engine", "fake"], found["admission", "fake"]
    assert engine["loaded"]
    assert engine["distribution"] == "acme-stages"
    assert "dynamo_register_engines" in engine["hooks"]
    assert not admission["loaded"]
    assert admission["hooks"] == []


def test_other_plugins_are_listed_without_an_import(site: Site, dynamo: RunCli, config: Path) -> None:
    site.install("acme-other", {"engine-other": "fake_other"}, {"fake_other": "raise SystemExit"})

    output = dynamo("plugins", config).output

    assert ["engine", "other", "acme-other", "1.2.3", "installed"] in [line.split() for line in output.splitlines()]
    assert "fake_other" not in sys.modules


def test_a_named_plugin_that_cannot_be_loaded_is_reported_below_the_list(
    site: Site, dynamo: RunCli, config: Path
) -> None:
    site.install("acme-other", {"router-other": "fake_other"}, {"fake_other": "import no_such_package"})

    result = dynamo("plugins", config, "--set", "router.use=other")

    assert result.exit_code == 0
    assert ["router", "other", "acme-other", "1.2.3", "installed"] in [
        line.split() for line in result.stdout.splitlines()
    ]
    assert "--set router.use=other: router 'other' (acme-other 1.2.3): cannot be imported" in result.stderr


def test_an_entry_point_without_a_known_kind_is_shown_with_a_question_mark(
    site: Site, dynamo: RunCli, config: Path
) -> None:
    site.install("odd", {"motor-echo": "fake_odd"}, {"fake_odd": ""})

    output = dynamo("plugins", config).output

    assert ["?", "motor-echo", "odd", "1.2.3", "installed"] in [line.split() for line in output.splitlines()]
