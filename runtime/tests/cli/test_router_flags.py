"""The router's flags and variables: what is on or off has two spellings."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.options import flag_options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], None), (["--router-kv-events"], True), (["--no-router-kv-events"], False)],
    ids=["neither", "on", "off"],
)
def test_a_boolean_flag_has_a_negated_form(arguments: list[str], expected: bool | None) -> None:
    seen: list[object] = []

    @click.command()
    @flag_options
    def command(**options: object) -> None:
        seen.append(options["router_kv_events"])

    result = CliRunner().invoke(command, arguments)

    assert result.exit_code == 0, result.output
    assert seen == [expected]
