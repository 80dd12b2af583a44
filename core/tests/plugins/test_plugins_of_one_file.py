"""`use: ./file.py:Class`: who may say it, who may have written the file, and what runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from dynamo_core.errors import PluginError
from dynamo_core.plugin_files import FileName, foreign_fault
from dynamo_core.plugins.loader import CONTRACTS, PluginLoader
from dynamo_core.protocol.records import ModelCard, RuntimeConfig
from dynamo_runtime.assembly.resolve import load_parsers, load_plugin, named_plugins
from dynamo_runtime.cli.main import cli
from dynamo_runtime.settings import LoadedSettings, load_settings

STAGES = """
from __future__ import annotations

from dataclasses import dataclass

from dynamo_core import (
    Admission, Discovery, EngineConfig, Extension, Frontend, LLMEngine, PluginConfig, ReasoningParser,
    ResponseStore, Router, ToolCallParser, Transport, hookimpl,
)

DYNAMO_API = 1
SEEN = []
HERE = __file__


class Limits(PluginConfig):
    limit: int = 4


@dataclass
class Row:
    worker: int


def stage(base):
    members = {method: lambda *args: None for method in base.__abstractmethods__}
    return type("Mine", (base,), {"NAME": "mine", "Config": Limits, "__module__": __name__} | members)


engine = stage(LLMEngine)
transport = stage(Transport)
discovery = stage(Discovery)
router = stage(Router)
admission = stage(Admission)
frontend = stage(Frontend)
response_store = stage(ResponseStore)
extension = stage(Extension)
tool_parser = stage(ToolCallParser)
reasoning_parser = stage(ReasoningParser)


class Nameless(router):
    NAME = ""


class Unfinished(Router):
    NAME = "unfinished"


@hookimpl
def dynamo_engine_stopped(worker_id):
    SEEN.append(Row(worker_id))
"""

CONFIG = """
hooks: [./stages.py]
frontend: {use: ./stages.py:frontend, limit: 1, response_store: {use: ./stages.py:response_store}}
admission: {use: ./stages.py:admission, limit: 2}
router: {use: ./stages.py:router, limit: 3}
transport: {use: ./stages.py:transport}
discovery: {use: ./stages.py:discovery}
extensions: [{use: ./stages.py:extension, name: mine}]
workers:
  one:
    model: {name: a-model, tool_call_parser: ./stages.py:tool_parser, reasoning_parser: ./stages.py:reasoning_parser}
    engine: {use: ./stages.py:engine, limit: 5}
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a file that its owner alone may write, into a folder that is not the working directory."""
    before = set(sys.modules)

    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o644)
        return path

    written("stages.py", STAGES)
    yield written
    for name in set(sys.modules) - before:
        if name.startswith("dynamo_file_"):
            del sys.modules[name]


def load(path: Path, sets: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> LoadedSettings:
    return load_settings(path, env=env or {}, sets=sets)


def load_all(loaded: LoadedSettings) -> PluginLoader:
    loader = PluginLoader(loaded.plugin_files)
    for named in named_plugins(loaded.settings):
        load_plugin(named, loaded, loader)
    return loader


def refusal(loaded: LoadedSettings) -> str:
    with pytest.raises(PluginError) as refused:
        load_all(loaded)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def dynamo(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="dynamo", catch_exceptions=False)


def test_one_file_offers_plugins_of_every_kind(write: Write) -> None:
    loaded = load(write("config.yaml", CONFIG))
    loader = PluginLoader(loaded.plugin_files)

    for named in named_plugins(loaded.settings):
        cls = load_plugin(named, loaded, loader)
        if cls is not None:
            assert issubclass(cls, CONTRACTS[named.kind].load())

    assert {kind for kind in CONTRACTS if loader.load(kind, f"./stages.py:{kind}").NAME == "mine"} == set(CONTRACTS)


def test_keys_beside_use_are_the_plugins_settings(write: Write) -> None:
    loaded = load(write("config.yaml", CONFIG))
    cls = load_all(loaded).load("router", "./stages.py:router")

    assert loaded.plugin_config("router", cls.Config).model_dump() == {"limit": 3}


def test_classes_of_one_file_share_a_module(write: Write, tmp_path: Path) -> None:
    loader = load_all(load(write("config.yaml", CONFIG)))

    one, other = loader.load("router", "./stages.py:router"), loader.load("admission", "./stages.py:admission")

    assert one.__module__ == other.__module__
    assert sys.modules[one.__module__].router is one
    assert str(tmp_path / "stages.py") == sys.modules[one.__module__].HERE


def test_hooks_of_a_file_are_called_once(write: Write) -> None:
    loader = load_all(load(write("config.yaml", CONFIG)))

    loader.hooks.announce("dynamo_engine_stopped", worker=None, worker_id=7)

    module = sys.modules[loader.load("router", "./stages.py:router").__module__]
    seen = module.SEEN
    assert seen == [module.Row(7)]


def test_a_path_may_be_absolute_or_begin_with_the_users_home(write: Write, tmp_path: Path) -> None:
    home = f"~/{os.path.relpath(tmp_path, Path.home())}/stages.py:router"
    for name in (f"{tmp_path}/stages.py:router", home):
        loader = load_all(load(write("config.yaml", CONFIG.replace("./stages.py:router", name))))

        assert loader.find("router", name).target.endswith("stages.py")


def test_plugins_and_check_show_the_file(write: Write, tmp_path: Path) -> None:
    config = write("config.yaml", "router: {use: ./stages.py:router}\n" + dynamo_example())

    rows = {row["name"]: row for row in json.loads(dynamo("plugins", config, "--json").stdout)["plugins"]}
    stages = json.loads(dynamo("check", config, "--json").stdout)["stages"]

    assert rows["./stages.py:router"] == {
        "kind": "router",
        "name": "./stages.py:router",
        "distribution": "(file)",
        "version": "",
        "module": str(tmp_path / "stages.py"),
        "loaded": True,
        "hooks": ["dynamo_engine_stopped"],
    }
    assert {"stage": "router", "plugin": "./stages.py:router", "distribution": "(file)", "version": ""} in stages


def dynamo_example() -> str:
    return "workers: {mock: {model: {name: mock-model}, engine: {use: mocker}}}\n"


def test_a_profile_may_name_a_plugin_file(write: Write) -> None:
    path = write("config.yaml", f"{dynamo_example()}profiles: {{mine: {{router: {{use: './stages.py:router'}}}}}}\n")

    loader = load_all(load_settings(path, profile="mine", env={}))

    assert loader.load("router", "./stages.py:router").NAME == "mine"


@pytest.mark.parametrize(
    ("more", "origin"),
    [
        ({"sets": ("router.use=./stages.py:router",)}, "--set router.use=./stages.py:router: "),
        ({"sets": ("router={use: ./stages.py:router}",)}, "--set router="),
        ({"env": {"DYN_ROUTER__USE": "./stages.py:router"}}, "environment DYN_ROUTER__USE: router.use: "),
        ({"env": {"DYN_ROUTER_MODE": "./stages.py:router"}}, "environment DYN_ROUTER_MODE: router.use: "),
        ({"sets": ("hooks=[./stages.py]",)}, "--set hooks=[./stages.py]: hook './stages.py': "),
    ],
)
def test_environment_and_set_may_not_name_a_plugin_file(write: Write, more: dict[str, Any], origin: str) -> None:
    message = refusal(load(write("config.yaml", dynamo_example()), **more))

    assert message.startswith(origin)
    assert "only if the text of this process's own config file names it" in message


def test_a_flag_may_not_name_a_plugin_file(write: Write) -> None:
    result = dynamo("check", write("config.yaml", dynamo_example()), "--router-mode", "./stages.py:router")

    assert result.exit_code == 2
    assert "flag --router-mode: router.use: router './stages.py:router': a plugin of one file is loaded only" in (
        result.stderr
    )


@pytest.mark.parametrize("name", ["${env:WHICH}", "./${env:STAGE}.py:router"])
def test_a_referenced_variable_may_not_name_a_plugin_file(write: Write, name: str) -> None:
    path = write("config.yaml", f"router: {{use: '{name}'}}\n{dynamo_example()}")

    message = refusal(load(path, env={"WHICH": "./stages.py:router", "STAGE": "stages"}))

    assert "only if the text of this process's own config file names it" in message


def test_a_card_of_another_process_may_not_name_a_plugin_file(write: Write) -> None:
    loader = load_all(load(write("config.yaml", dynamo_example())))

    card = ModelCard(
        name="a-model", instance_id=1, runtime_config=RuntimeConfig(tool_call_parser="./stages.py:tool_parser")
    )

    with pytest.raises(PluginError, match="own config file names it"):
        asyncio.run(load_parsers(loader, card, {}))


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_plugin_file_writable_by_others_is_refused(write: Write, mode: int) -> None:
    path = write("config.yaml", CONFIG)
    (path.parent / "stages.py").chmod(mode)

    message = refusal(load(path))

    assert message == (
        f"{path}:3: frontend.use: frontend './stages.py:frontend' ({path.parent / 'stages.py'}): a plugin of one file "
        f"may be written by its owner alone, but its mode is {mode:04o}: chmod go-w"
    )


def test_a_config_writable_by_others_may_not_name_a_plugin_file(write: Write) -> None:
    path = write("config.yaml", CONFIG)
    path.chmod(0o664)

    message = refusal(load(path))

    assert f"{path}: a config file that names a plugin of one file may be written by its owner alone" in message
    assert "mode is 0664: chmod go-w" in message


def test_a_config_without_plugin_files_may_be_writable_by_others(write: Write) -> None:
    path = write("config.yaml", dynamo_example())
    path.chmod(0o666)

    assert load_all(load(path)).find("engine", "mocker").name == "mocker"


def test_a_file_of_another_user_is_refused_and_one_of_root_is_not(write: Write) -> None:
    status = list(os.stat(write("mine.py", "")))
    status[4] = os.geteuid() + 1
    foreign = os.stat_result(status)
    status[4] = 0
    roots = os.stat_result(status)

    assert "must belong to root or to the user of the process" in str(foreign_fault(foreign))
    assert foreign_fault(roots) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./gone.py:Mine", "gone.py): cannot be read: No such file or directory"),
        ("./stages.py:rooter", "there is no class rooter; did you mean router?"),
        ("./stages.py:engine", "Mine is not a class made from Router"),
        ("./stages.py:Limits", "Limits is not a class made from Router"),
        ("./stages.py:Nameless", "Nameless has no NAME"),
        ("./stages.py:Unfinished", "Unfinished does not define route"),
        ("./stages.py", "the name needs the class too: ./stages.py:CLASS"),
        ("./broken.py:Mine", "cannot be imported: ZeroDivisionError"),
        ("./old.py:Mine", "was made for DYNAMO_API 0, but this dynamo-core has 1: bring the file up to date"),
        ("./ageless.py:Mine", "does not say which DYNAMO_API it was made for"),
    ],
)
def test_a_fault_of_a_plugin_file_is_one_line(write: Write, name: str, words: str) -> None:
    write("broken.py", "1 / 0")
    write("old.py", "DYNAMO_API = 0")
    write("ageless.py", "")

    message = refusal(load(write("config.yaml", f"router: {{use: '{name}'}}\n{dynamo_example()}")))

    assert f"config.yaml:1: router.use: router '{name}' (" in message
    assert words in message


def test_a_listener_is_named_by_its_file_alone(write: Write) -> None:
    message = refusal(load(write("config.yaml", f"hooks: [./stages.py:router]\n{dynamo_example()}")))

    assert message.endswith("the name is that of the file alone, without a class")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("./a.py:B", FileName("./a.py", "B")),
        ("a.py:B", FileName("a.py", "B")),
        ("/x y/a.py:_B1", FileName("/x y/a.py", "_B1")),
        ("./a.py", FileName("./a.py")),
        ("round-robin", None),
        (".py:B", None),
        ("./.py:B", None),
        ("a.py:", None),
        ("a.py:B-C", None),
        ("a.txt:B", None),
        ("py:B", None),
    ],
)
def test_file_names_are_told_from_plugin_names(name: str, parsed: FileName | None) -> None:
    assert FileName.parse(name) == parsed
