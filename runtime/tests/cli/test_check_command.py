from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_runtime.cli.check import exposure

RunCli = Callable[..., Result]

EXTENSION = """
    from dynamo_core import Extension, PluginConfig, hookimpl

    DYNAMO_API = 1


    class FakeConfig(PluginConfig):
        size: int = 10

        def remarks(self):
            return [f"{self.size} is small"] if self.size < 5 else []


    class Fake(Extension):
        NAME = "fake"
        ROLES = ("frontend", "worker")
        Config = FakeConfig


    @hookimpl
    def dynamo_register_extensions():
        return [Fake]
"""


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


def test_check_and_plugins_show_each_extension_by_its_name(dynamo: RunCli, config: Path, site: Any) -> None:
    site.install("acme-extensions", {"extension-fake": "fake_extension"}, {"fake_extension": EXTENSION})
    config.write_text(
        config.read_text() + "extensions: [{use: fake}, {use: fake, name: second, role: both, size: 3}]\n"
    )

    graph = json.loads(dynamo("check", config, "--json").output)
    plugins = json.loads(dynamo("plugins", config, "--json").output)["plugins"]

    stages = [(row["stage"], row["plugin"]) for row in graph["stages"] if row["stage"].startswith("extensions.")]
    assert stages == [("extensions.fake", "fake"), ("extensions.second", "fake")]
    assert graph["remarks"] == [{"section": "extensions.second", "remark": "3 is small"}]
    (found,) = [plugin for plugin in plugins if plugin["kind"] == "extension" and plugin["name"] == "fake"]
    assert (found["loaded"], found["hooks"]) == (True, ["dynamo_register_extensions"])


def test_check_prints_the_remarks_of_plugins(dynamo: RunCli, config: Path) -> None:
    config.write_text(config.read_text().replace("limit: 2", "limit: 200"))

    text, graph = dynamo("check", config).output, json.loads(dynamo("check", config, "--json").output)

    assert "workers.one.engine: a limit of 200 is large." in text.splitlines()
    assert graph["remarks"] == [{"section": "workers.one.engine", "remark": "a limit of 200 is large"}]


def test_check_shows_the_router_that_another_one_wraps(dynamo: RunCli, config: Path) -> None:
    wrapped = "{use: sticky, then: {use: sticky, then: {use: fake, limit: 300}}}"
    config.write_text(config.read_text().replace("router: {use: fake}", f"router: {wrapped}"))

    graph = json.loads(dynamo("check", config, "--json").output)

    stages = [(row["stage"], row["plugin"]) for row in graph["stages"] if row["stage"].startswith("router")]
    assert stages == [("router", "sticky"), ("router.then", "sticky"), ("router.then.then", "fake")]
    assert graph["remarks"] == [{"section": "router.then.then", "remark": "a limit of 300 is large"}]


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("{use: fakes}", ["config.yaml:3: router.then.use: there is no router 'fakes'", "did you mean 'fake'?"]),
        ("{use: fake, limits: 3}", ["router.then.limits: unknown key of router 'fake'; did you mean 'limit'?"]),
    ],
    ids=["no such router", "no such key"],
)
def test_check_reports_faults_of_a_wrapped_router(dynamo: RunCli, config: Path, then: str, words: list[str]) -> None:
    config.write_text(config.read_text().replace("router: {use: fake}", f"router: {{use: sticky, then: {then}}}"))

    result = dynamo("check", config)

    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


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
        (["router.use=fak"], ["--set router.use=fak: there is no router 'fak'", "did you mean 'fake'?"]),
        (["workers.one.engine.limit=0"], ["workers.one.engine.limit", "1"]),
        (["workers.one.engine.limits=2"], ["limits", "limit"]),
        (["admission.limit=2"], ["admission", "limit"]),
        (["events.limit=2"], ["events", "limit"]),
        (["transport.use=far"], ["--set transport.use=far: 'far'", "discovery.use: 'near'", "'inproc'"]),
        (["hooks=[loud]"], ["--set hooks=[loud]: there is no hook 'loud'", "ours are called dynamo-plugin-hook-NAME"]),
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


def test_line_of_list_entry_that_names_a_missing_api_is_told(dynamo: RunCli, config: Path) -> None:
    listed = "frontend:\n  - {use: fake}\n  - {use: fakes}\n"
    config.write_text(listed + config.read_text().replace("frontend: {use: fake}\n", "", 1))

    result = dynamo("check", config)

    assert "config.yaml:3: frontend[1].use: there is no frontend 'fakes'" in result.stderr


def test_a_missing_model_folder_is_reported_with_its_line(dynamo: RunCli, config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    config.write_text(config.read_text().replace("{name: a-model}", f"{{name: a-model, path: {folder}}}"))

    missing = dynamo("check", config)
    folder.mkdir()
    empty = dynamo("check", config)
    (folder / "tokenizer.json").write_text("{}")
    whole = dynamo("check", config)
    with_a_file = dynamo("check", config, "--model-path", folder / "tokenizer.json")

    assert missing.exit_code == 2
    assert missing.stderr.startswith(f"dynamo: {config}:8: workers.one.model.path: {folder} does not exist; ")
    assert f"{folder} has no tokenizer.json" in empty.stderr
    assert whole.exit_code == 0
    assert "flag --model-path: workers.one.model.path: " in with_a_file.stderr
    assert "is not a folder" in with_a_file.stderr


@pytest.mark.parametrize(
    ("frontend", "admin", "clash"),
    [
        (("127.0.0.1", 8000), ("127.0.0.1", 8000), True),
        (("localhost", 8000), ("127.0.0.1", 8000), True),
        (("0.0.0.0", 8000), ("127.0.0.1", 8000), True),
        (("10.0.0.7", 8000), ("127.0.0.1", 8000), False),
        (("127.0.0.1", 8000), ("127.0.0.1", 8001), False),
        (("127.0.0.1", 0), ("127.0.0.1", 0), False),
        (("0.0.0.0", 8000), ("::1", 8000), False),
    ],
)
def test_two_listeners_on_one_address_are_refused(
    dynamo: RunCli, config: Path, frontend: tuple[str, int], admin: tuple[str, int], clash: bool
) -> None:
    text = config.read_text().replace("{use: fake}", f"{{use: fake, host: '{frontend[0]}', port: {frontend[1]}}}", 1)
    config.write_text(f"{text}admin:\n  host: '{admin[0]}'\n  port: {admin[1]}\n")

    result = dynamo("check", config)

    assert result.exit_code == (2 if clash else 0)
    if clash:
        assert result.stderr.startswith(f"dynamo: {config}:13: admin.port: 8000 is the port of the frontend too")


def test_a_config_without_workers_that_no_other_process_could_bring_is_refused(dynamo: RunCli, config: Path) -> None:
    config.write_text(config.read_text().split("workers:")[0])

    alone = dynamo("check", config)
    among_others = dynamo("check", config, "--set", "transport.use=far", "--set", "discovery.use=far")

    assert alone.exit_code == 2
    assert "workers: none is configured" in alone.stderr
    assert "'near'" in alone.stderr
    assert among_others.exit_code == 0


def test_check_takes_the_flags_of_serve(dynamo: RunCli, config: Path) -> None:
    graph = json.loads(dynamo("check", config, "--http-port", "8123", "--json").output)

    assert graph["listeners"][0]["port"] == 8123
