from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

RunCli = Callable[..., Result]


def test_show_prints_the_settings_in_force(dynamo: RunCli, config: Path) -> None:
    lines = [line.split() for line in dynamo("config", "show", config).output.splitlines()]

    assert ["frontend.use", '"fake"'] in lines
    assert ["workers.one.engine.limit", "2"] in lines
    assert ["client.retries", "2"] in lines


def test_show_with_origin_names_the_origin_of_each_value(
    dynamo: RunCli, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_CLIENT__RETRIES", "5")

    output = dynamo("config", "show", config, "--origin", "--set", "workers.one.replicas=9").output

    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in output.splitlines()}
    assert rows["client.retries"] == ["5", "environment DYN_CLIENT__RETRIES"]
    assert rows["workers.one.replicas"] == ["9", "--set workers.one.replicas=9"]
    assert rows["router.use"] == ['"fake"', f"{config}:3"]
    assert rows["log.level"] == ['"info"', "default"]


def test_show_as_json_is_the_merged_tree(dynamo: RunCli, config: Path) -> None:
    shown = json.loads(dynamo("config", "show", config, "--json").output)

    assert shown["workers"]["one"]["engine"] == {"use": "fake", "limit": 2}


def test_show_as_json_with_origin_is_a_list(dynamo: RunCli, config: Path) -> None:
    shown = json.loads(dynamo("config", "show", config, "--json", "--origin").output)

    assert {"key": "router.use", "value": "fake", "origin": f"{config}:3"} in shown


def test_show_hides_secrets(dynamo: RunCli, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTER_PASSWORD", "hunter2")
    config.write_text(
        config.read_text().replace("router: {use: fake}", "router: {use: fake, key: '${env:ROUTER_PASSWORD}'}")
    )

    outputs = [dynamo("config", "show", config, *more).output for more in ([], ["--json"], ["--origin"])]

    assert all("router" in output for output in outputs)
    assert all("hunter2" not in output for output in outputs)


def test_schema_has_the_keys_of_the_plugins_that_the_config_names(dynamo: RunCli, config: Path) -> None:
    schema = json.loads(dynamo("config", "schema", config).output)

    frontend = schema["$defs"]["FrontendSection"]
    engine = schema["$defs"]["EngineSection"]
    assert frontend["properties"]["limit"]["description"] == "Requests at once."
    assert engine["properties"]["limit"]["minimum"] == 1
    assert engine["additionalProperties"] is False


def test_schema_has_the_keys_of_a_router_that_another_one_wraps(dynamo: RunCli, config: Path) -> None:
    wrapped = config.read_text().replace("router: {use: fake}", "router: {use: sticky, then: {use: fake}}")
    config.write_text(wrapped)

    schema = json.loads(dynamo("config", "schema", config).output)

    assert "limit" in schema["$defs"]["router.PluginRef"]["properties"]


def test_schema_leaves_the_section_of_a_missing_plugin_open(dynamo: RunCli, config: Path) -> None:
    result = dynamo("config", "schema", config, "--set", "workers.one.engine.use=missing")

    assert result.exit_code == 0
    assert json.loads(result.output)["$defs"]["EngineSection"]["additionalProperties"] is True


def test_show_takes_the_flags_of_serve_and_names_them_as_origin(dynamo: RunCli, config: Path) -> None:
    output = dynamo("config", "show", config, "--origin", "--http-port", "8123").output

    assert ["frontend.port", "8123", "flag", "--http-port"] in [line.split() for line in output.splitlines()]


def test_show_distinguishes_the_built_in_example_from_defaults(site: object, dynamo: RunCli) -> None:
    output = dynamo("config", "show", "--origin").output

    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in output.splitlines()}
    assert rows["workers.mock.model.name"] == ['"mock-model"', "built-in example"]
    assert rows["workers.mock.replicas"][1] == "built-in example"
    assert rows["workers.mock.grace_period"][1] == "default"
    assert rows["router.use"][1] == "default"


def test_show_works_while_the_variable_of_a_secret_is_not_set(dynamo: RunCli, config: Path) -> None:
    config.write_text(config.read_text().replace("router: {use: fake}", "router: {use: fake, key: '${env:NOT_SET_X}'}"))

    shown = dynamo("config", "show", config)
    checked = dynamo("check", config)

    assert shown.exit_code == 0
    assert "*** (environment variable 'NOT_SET_X' is not set)" in shown.output
    assert checked.exit_code == 2
    assert "environment variable 'NOT_SET_X' is not set" in checked.stderr


def test_the_schema_describes_itself(dynamo: RunCli, config: Path) -> None:
    schema = json.loads(dynamo("config", "schema", config).output)

    assert "profiles" in schema["properties"]
    assert "apart from" not in schema["description"]
