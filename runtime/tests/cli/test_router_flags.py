"""The router's flags and variables: what is on or off has two spellings."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.options import flag_options
from dynamo_runtime.settings import load_settings


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], None), (["--router-kv-events"], True), (["--no-router-kv-events"], False)],
    ids=["neither", "on", "off"],
)
def test_a_flag_that_is_on_or_off_can_be_given_either_way(arguments: list[str], expected: bool | None) -> None:
    seen: list[object] = []

    @click.command()
    @flag_options
    def command(**options: object) -> None:
        seen.append(options["router_kv_events"])

    result = CliRunner().invoke(command, arguments)

    assert result.exit_code == 0, result.output
    assert seen == [expected]


def test_the_variables_of_the_router_set_its_keys() -> None:
    loaded = load_settings(
        env={"DYN_ROUTER_MODE": "kv", "DYN_ROUTER_TEMPERATURE": "0.5", "DYN_ROUTER_REPLICA_SYNC": "true"},
        flags={"--router-kv-events": False},
    )

    assert loaded.settings.router.use == "kv"
    assert loaded.settings.router.options == {"temperature": 0.5, "kv_events": False}
    assert loaded.settings.client.share_loads is True
