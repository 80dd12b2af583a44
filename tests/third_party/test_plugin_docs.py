"""Holds the pages for authors of plugins to what the code does."""

from __future__ import annotations

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
from dynamo_core.plugins.loader import PluginLoader
from dynamo_runtime.cli.main import cli

REPOSITORY = Path(__file__).parents[2]
PAGES = ("how-to/package-a-plugin.md", "reference/plugins.md")
PAGE = "".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)


def snippets() -> list[tuple[str, str]]:
    """Return the snippets that are whole files, with their paths, in the order of the page."""
    return re.findall(r"```\w+\n# file: (\S+)\n(.*?)```", PAGE, re.DOTALL)


def renamed(text: str) -> str:
    """Return the text with names that nobody has installed, so that a plugin made by following the page is not met."""
    return text.replace("hello", "okapi7").replace("counter", "quagga7")


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the files of the page on disk, the last of each name, installed as their manifests say."""
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


def test_the_pages_listener_plugin_counts_and_logs_requests(tutorial: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Record:
        status = "success"

    loader = PluginLoader()
    shown = re.search(r"a line `dynamo_plugin_hook_counter: (.*?)`", PAGE)

    loader.listen("quagga7")
    with caplog.at_level("INFO", logger="dynamo_plugin_hook_quagga7"):
        loader.hooks.announce("dynamo_request_finished", record=Record())

    assert shown is not None
    assert caplog.messages == [shown[1]]
