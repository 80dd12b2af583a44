"""Holds the pages for authors of plugins to what the code does."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from dynamo_core import (
    BackendError,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.contracts.plugin import KINDS, Plugin
from dynamo_core.hookspecs import lifecycle, register
from dynamo_core.plugins.loader import CONTRACTS, PluginLoader
from dynamo_core.protocol import RequestRecord
from dynamo_runtime.cli.main import cli

REPOSITORY = Path(__file__).parents[2]
PAGES = ("how-to/package-a-plugin.md", "reference/plugins.md")
PAGE = "".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)

HOOKS = {
    name: list(inspect.signature(function).parameters)
    for area in (register, lifecycle)
    for name, function in vars(area).items()
    if name.startswith("dynamo_")
}


def table_rows(name: str) -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]


def snippets() -> list[tuple[str, str]]:
    """The snippets that are whole files, with their paths, in the order of the page."""
    return re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", PAGE, re.DOTALL)


def renamed(text: str) -> str:
    """The text with names that nobody has installed, so that a plugin made by following the page is not met."""
    return text.replace("hello", "okapi7").replace("counter", "quagga7")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_row_with_every_parameter(hook: str) -> None:
    [row] = table_rows(hook)

    for parameter in HOOKS[hook]:
        assert f"`{parameter}`" in row


def test_no_hook_is_described_that_is_not_there() -> None:
    assert set(re.findall(r"dynamo_(?:register|engine|instance|request)_\w+", PAGE)) == set(HOOKS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_row_with_its_class_hook_and_required_methods(kind: str) -> None:
    [row] = table_rows(kind)

    if kind in CONTRACTS:
        contract = CONTRACTS[kind]
        required = set(re.findall(r"`(\w+)`", row.split("|")[-2]))
        assert f"`{contract.class_name}`" in row
        assert f"`{contract.hook}`" in row
        assert required == getattr(contract.load(), "__abstractmethods__")  # noqa: B009 - unknown to type checkers


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page on disk, the last of each name, installed as their manifests say."""
    _write(tmp_path, snippets())
    for project in ("okapi7", "quagga7"):
        _install(tmp_path / project)
        monkeypatch.syspath_prepend(str(tmp_path / project / "src"))
    yield tmp_path
    _forget()


def _write(folder: Path, texts: list[tuple[str, str]]) -> None:
    for name, text in texts:
        path = folder / renamed(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(text))


def _install(project: Path) -> None:
    manifest = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = project / "src" / f"{manifest['name'].replace('-', '_')}-{manifest['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {manifest['name']}\nVersion: {manifest['version']}\n")
    lines = [f"{name} = {module}" for name, module in manifest["entry-points"]["dynamo"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[dynamo]", *lines, ""]))


def _forget() -> None:
    for name in list(sys.modules):
        if name.startswith(("dynamo_plugin_engine_okapi7", "dynamo_plugin_hook_quagga7")):
            del sys.modules[name]


def dynamo(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="dynamo", catch_exceptions=False)


def _engine(**config: Any) -> LLMEngine:
    cls: Any = PluginLoader().load("engine", "okapi7")
    engine: LLMEngine = cls(cls.Config(**config), WorkerConfig(model_name="m"))
    return engine


async def _answer(engine: LLMEngine, ctx: EngineContext, max_tokens: int | None = None) -> list[LLMEngineOutput]:
    request = PreprocessedRequest(token_ids=[72, 105], stop_conditions=StopConditions(max_tokens=max_tokens))
    return [item async for item in engine.generate(request, GenerateContext(ctx))]


def _text(items: list[LLMEngineOutput]) -> bytes:
    return bytes(token for item in items for token in item.token_ids)


def test_the_line_that_proves_the_tutorials_plugin_is_loaded_is_the_one_shown(tutorial: Path) -> None:
    shown = re.search(r"The list has the line `(.*?)`", PAGE)

    output = dynamo("plugins", tutorial / "okapi7" / "okapi7.yaml").output

    assert shown is not None
    assert renamed(shown[1]).split() in [line.split() for line in output.splitlines()]


async def test_the_engine_of_the_page_keeps_the_rules(tutorial: Path) -> None:
    engine = _engine()
    stopped = EngineContext("r")
    stopped.stop_generating()

    whole = await _answer(engine, EngineContext("r"))
    cut = await _answer(engine, EngineContext("r"), max_tokens=2)
    [cancelled] = await _answer(engine, stopped)

    assert (_text(whole), whole[-1].finish_reason) == (b"Hello!", FinishReason.STOP)
    assert (_text(cut), cut[-1].finish_reason) == (b"He", FinishReason.LENGTH)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    for items, tokens in ((whole, 6), (cut, 2), ([cancelled], 0)):
        used = items[-1].completion_usage
        assert used is not None
        assert (used.prompt_tokens, used.completion_tokens) == (2, tokens)
    assert vars(engine)["running"] == 0


async def test_the_engine_of_the_page_refuses_an_empty_prompt(tutorial: Path) -> None:
    engine = _engine()

    with pytest.raises(BackendError.InvalidArgument):
        await anext(aiter(engine.generate(PreprocessedRequest(token_ids=[]), GenerateContext(EngineContext("r")))))


def test_the_tutorials_config_picks_its_engine_and_sets_its_key(tutorial: Path) -> None:
    config = tutorial / "okapi7" / "okapi7.yaml"

    result = dynamo("check", config, "--set", "workers.okapi7.engine.delay=0.1", "--set", "hooks=[quagga7]")

    assert "The config is sound." in result.output
    assert ["hooks", "quagga7", "dynamo-plugin-hook-quagga7", "0.1.0"] in [
        line.split() for line in result.output.splitlines()
    ]


def test_the_listening_plugin_of_the_page_counts_requests_and_says_so(
    tutorial: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Record:
        status = "success"

    loader = PluginLoader()
    shown = re.search(r"a line `dynamo_plugin_hook_counter: (.*?)`", PAGE)

    loader.listen("quagga7")
    with caplog.at_level("INFO", logger="dynamo_plugin_hook_quagga7"):
        loader.hooks.announce("dynamo_request_finished", record=Record())

    assert shown is not None
    assert caplog.messages == [shown[1]]


def fields_listed_after(words: str) -> set[str]:
    """The names in the first column of the first table after some words."""
    table = PAGE.split(words, 1)[1].split("| --- |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_fields_of_a_request_record_are_all_listed() -> None:
    assert fields_listed_after("is a `RequestRecord`.") == set(RequestRecord.__struct_fields__)


def shown_contract(kind: str) -> ast.ClassDef:
    [text] = re.findall(rf"```python\n# contract: {kind}\n(.*?)```", PAGE, re.DOTALL)
    [shown] = ast.parse(text).body
    assert isinstance(shown, ast.ClassDef)
    return shown


@pytest.mark.parametrize("kind", CONTRACTS)
def test_the_contract_of_each_kind_is_shown_as_it_is(kind: str) -> None:
    contract = CONTRACTS[kind].load()
    shown = shown_contract(kind)
    methods = {node.name: node for node in shown.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    assert shown.name == contract.__name__
    # What kinds have in common stands in a base of theirs; `wait_for` is called by plugins, and not theirs to write.
    bases = [base for base in contract.__mro__ if base.__module__.startswith("dynamo_core.contracts.")]
    assert set(methods) == {
        name
        for base in bases
        if base is not Plugin
        for name, value in vars(base).items()
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_"))
    } - {"wait_for"}
    for name, node in methods.items():
        real = getattr(contract, name)
        assert isinstance(node, ast.AsyncFunctionDef) == inspect.iscoroutinefunction(real), name
        assert bool(node.decorator_list) == getattr(real, "__isabstractmethod__", False), name
        signature = inspect.signature(real)
        written = {each.arg: each.annotation and ast.unparse(each.annotation) for each in node.args.args}
        assert written == {
            parameter.name: None if parameter.name == "self" else parameter.annotation
            for parameter in signature.parameters.values()
        }, name
        assert node.returns is not None
        assert ast.unparse(node.returns) == signature.return_annotation, name
