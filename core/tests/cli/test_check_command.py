from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from dynamo_core.cli.check import exposure

RunCli = Callable[..., Result]


def test_check_prints_each_stage_with_its_plugin_and_distribution(dynamo: RunCli, config: Path) -> None:
    result = dynamo("check", config)

    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert ["frontend", "fake", "acme-stages", "1.2.3"] in lines
    assert ["workers.one", "fake", "acme-stages", "1.2.3", "3", "x", "a-model"] in lines
    assert ["public", "127.0.0.1", "8000", "loopback"] in lines


def test_check_as_json_is_the_whole_graph(dynamo: RunCli, config: Path) -> None:
    config.write_text(
        config.read_text() + "hooks: [fake]\nadmission: {use: fake}\nadmin: {host: 0.0.0.0, port: 9000}\n"
    )

    graph = json.loads(dynamo("check", config, "--json").output)

    stages = [(row["stage"], row["plugin"]) for row in graph["stages"]]
    assert stages == [
        ("frontend", "fake"),
        ("admission", "fake"),
        ("router", "fake"),
        ("transport", "near"),
        ("events", "near"),
        ("discovery", "near"),
        ("workers.one", "fake"),
        ("hooks", "fake"),
    ]
    assert graph["listeners"] == [
        {"listener": "public", "host": "127.0.0.1", "port": 8000, "exposure": "loopback"},
        {"listener": "admin", "host": "0.0.0.0", "port": 9000, "exposure": "exposed to the network"},
    ]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "loopback"),
        ("127.8.8.8", "loopback"),
        ("::1", "loopback"),
        ("[::1]", "loopback"),
        ("localhost", "loopback"),
        ("0.0.0.0", "exposed to the network"),
        ("::", "exposed to the network"),
        ("10.0.0.7", "exposed to the network"),
        ("inside.example", "exposed to the network"),
    ],
)
def test_exposure_of_an_address(host: str, expected: str) -> None:
    assert exposure(host) == expected


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["router.use=fak"], ["--set router.use=fak: router.use: there is no router 'fak'", "use 'fake'"]),
        (["workers.one.engine.limit=0"], ["workers.one.engine.limit", "1"]),
        (["workers.one.engine.limits=2"], ["limits", "limit"]),
        (["admission.limit=2"], ["admission", "limit"]),
        (["events.limit=2"], ["events", "limit"]),
        (["transport.use=far"], ["transport.use: 'far'", "discovery.use: 'near'", "'inproc'"]),
        (["hooks=[loud]"], ["hooks: there is no hook 'loud'", "pip install dynamo-plugin-hook-loud"]),
    ],
)
def test_a_config_that_could_not_be_served_is_one_line_and_exit_code_2(
    dynamo: RunCli, config: Path, sets: list[str], words: list[str]
) -> None:
    result = dynamo("check", config, *[part for assignment in sets for part in ("--set", assignment)])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("dynamo: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_a_transport_between_processes_goes_with_a_discovery_between_processes(dynamo: RunCli, config: Path) -> None:
    assert dynamo("check", config, "--set", "transport.use=far", "--set", "discovery.use=far").exit_code == 0


def test_the_line_of_the_file_that_names_a_missing_plugin_is_told(dynamo: RunCli, config: Path) -> None:
    config.write_text(config.read_text().replace("router: {use: fake}", "router: {use: sharp}"))

    assert f"{config}:3: router.use: there is no router 'sharp'" in dynamo("check", config).stderr
