"""The sections with the options of a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click
from dynamo_runtime.cli.route import explain
from dynamo_testing.command import engine

from scripts.pages.tables import code, table


def _options(command: click.Command) -> str:
    rows = []
    for parameter in command.params:
        known: dict[str, Any] = parameter.to_info_dict()
        if known["param_type_name"] == "option" and not known["hidden"]:
            unset = known["multiple"] or known["default"] in (None, False)
            default = known["default"]
            shown = "–" if unset else code(f"{default:g}" if isinstance(default, float) else default)
            names = [*known["opts"], *([known["envvar"]] if known["envvar"] else [])]
            rows.append((", ".join(map(code, names)), shown, known["help"] or ""))
    return table(("Option", "Default", "Meaning"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "conformance-options": partial(_options, engine),
    "explain-options": partial(_options, explain),
}
