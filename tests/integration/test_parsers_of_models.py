"""Parsers are named by workers, checked before the start, and loaded where answers are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from click.testing import CliRunner
from dynamo_core import (
    ContentDelta,
    EngineConfig,
    ParserDelta,
    Parsers,
    ReasoningDelta,
    ReasoningParser,
    ToolCallArguments,
    ToolCallParser,
    ToolCallStart,
)
from dynamo_core.plugins.loader import PluginLoader
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.think_tags import Qwen3Parser
from dynamo_runtime.assembly.automatic_parsers import find_candidates
from dynamo_runtime.cli.main import cli
from dynamo_runtime.settings import load_settings
from dynamo_testing.tiny_model import make_tokenizer_folder

from tests.integration.parts import Plain

MODEL = "workers.mock.model"


def check(*settings: str) -> Any:
    """Return ``dynamo check`` of the built-in example with some keys set."""
    options = [word for setting in settings for word in ("--set", f"{MODEL}.{setting}")]
    return CliRunner().invoke(cli, ["check", *options], prog_name="dynamo")


def test_parsers_that_are_installed_can_be_named() -> None:
    result = check("tool_call_parser=hermes", "reasoning_parser=deepseek_r1")

    assert result.exit_code == 0, result.output
    assert "The config is sound." in result.output


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "tool_call_parser=hermess",
            [
                f"{MODEL}.tool_call_parser",
                "no tool parser 'hermess'",
                "installed: auto, ",
                "llama3_json",
                "did you mean 'hermes'?",
            ],
        ),
        (
            "reasoning_parser=aloud",
            [
                f"{MODEL}.reasoning_parser",
                "no reasoning parser 'aloud'",
                "installed: auto, deepseek_r1, ",
                "ours is dynamo-plugin-parsers-standard",
            ],
        ),
        ("tool_call_parser=", [f"{MODEL}.tool_call_parser", "must not be empty"]),
    ],
)
def test_an_unknown_parser_fails_the_start_with_the_known_ones(setting: str, words: list[str]) -> None:
    result = check(setting)

    assert result.exit_code == 2
    for word in words:
        assert word in result.output


def test_every_parser_is_listed_as_a_plugin() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["plugins", "--json"], prog_name="dynamo").output)

    kinds = {(row["kind"], row["name"]) for row in listed["plugins"]}
    assert {("tool_parser", "hermes"), ("tool_parser", "mistral"), ("reasoning_parser", "qwen3")} <= kinds


async def test_a_models_parsers_are_those_that_its_worker_names(house: Any) -> None:
    await house.run(Plain, tool_call_parser="hermes", reasoning_parser="qwen3")

    assert house.model().parsers == Parsers(HermesParser, Qwen3Parser)


async def test_a_model_with_a_missing_parser_is_not_served_and_logged(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = house.worker(Plain, tool_call_parser="morse", reasoning_parser="qwen3")

    await worker.start()
    await house.eventually(lambda: "cannot be loaded" in caplog.text)
    await worker.stop(grace=False)

    assert "there is no tool parser 'morse' (installed: auto, " in caplog.text
    assert not house.models.list()


TEMPLATE = "{{ messages }}<|im_start|><tool_call>{{ call }}</tool_call>{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model's folder with a template of our own in the manner of Qwen 3."""
    make_tokenizer_folder(tmp_path, vocab_size=300)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def candidates(*sets: str) -> Any:
    """Return what `auto` may choose from where everything is installed."""
    loaded = load_settings(None, env={}, sets=sets)
    return find_candidates(loaded.settings, PluginLoader(loaded.plugin_files))


async def test_a_worker_chooses_parsers_by_its_model_and_records_the_reason(house: Any, folder: Path) -> None:
    await house.run(Plain, model_path=str(folder), candidates=candidates())

    facts = house.model().card.runtime_config
    assert house.model().parsers == Parsers(HermesParser, Qwen3Parser)
    assert facts.tool_call_parser_reason == "its template has '<tool_call>' and '</tool_call>'"
    assert facts.reasoning_parser_reason == "its template has '<|im_start|>' and '<tool_call>' and '<think>'"


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "[think]", "close": "[/think]"},
        "tool_calls": {
            "open_pattern": r"\[call:(?P<name>\w+)\]",
            "close": "[/call]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


def describe(folder: Path, template: Any) -> None:
    """Put a `response_template` into a folder."""
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "response_template": template}))


def read_all(parser: ToolCallParser | ReasoningParser, text: str) -> list[ParserDelta]:
    return [*parser.feed(text), *parser.finish()]


async def test_a_folder_that_describes_its_format_goes_before_its_chat_template(house: Any, folder: Path) -> None:
    describe(folder, RESPONSE_TEMPLATE)

    await house.run(Plain, model_path=str(folder), candidates=candidates())

    facts = house.model().card.runtime_config
    assert facts.tool_call_parser == facts.reasoning_parser == "response_template"
    assert facts.tool_call_parser_reason == "its response_template says how it calls tools"
    assert facts.reasoning_parser_reason == "its response_template says how it thinks"
    parsers = house.model().parsers
    thoughts = read_all(parsers.reasoning("<|im_start|>assistant\n[think]"), "Hm.[/think]Yes.")
    assert thoughts == [ReasoningDelta("Hm."), ContentDelta("Yes.")]
    deltas = read_all(parsers.tools([]), '[call:f]{"a": 1}[/call]')
    assert deltas == [ToolCallStart(0, ANY, "f"), ToolCallArguments(0, '{"a": 1}')]


async def test_a_setting_overrules_what_the_folder_describes(house: Any, folder: Path) -> None:
    describe(folder, RESPONSE_TEMPLATE)

    await house.run(Plain, model_path=str(folder), tool_call_parser="hermes", candidates=candidates())

    assert house.model().parsers.tools is HermesParser
    assert house.model().card.runtime_config.reasoning_parser == "response_template"


async def test_a_description_that_cannot_be_followed_leaves_the_choice_to_the_chat_template(
    house: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    describe(folder, {**RESPONSE_TEMPLATE, "start_anchor_pattern": "(a+)+"})

    await house.run(Plain, model_path=str(folder), candidates=candidates())

    assert house.model().parsers.reasoning is Qwen3Parser
    assert "the model's response_template is not used for how it thinks: start_anchor: not one text" in caplog.text


async def test_a_missing_response_template_is_logged_at_model_load(
    house: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = house.worker(Plain, model_path=str(folder), tool_call_parser="response_template")

    await worker.start()
    await house.eventually(lambda: "cannot be loaded" in caplog.text)
    await worker.stop(grace=False)

    assert "the model's tokenizer_config.json has no response_template that says how it calls tools" in caplog.text


def test_check_reports_a_response_template_as_the_source(folder: Path) -> None:
    describe(folder, RESPONSE_TEMPLATE)

    text = check(f"path={folder}").output

    assert re.search(r"tool_call_parser +response_template +its response_template says how it calls tools", text)
    assert re.search(r"reasoning_parser +response_template +its response_template says how it thinks", text)


class Texts(Plain):
    """Gives text."""

    async def start(self, worker_id: int) -> EngineConfig:
        return EngineConfig(model="m", model_input="text")


async def test_a_text_engine_gets_no_parsers(house: Any, folder: Path) -> None:
    await house.run(Texts, model_path=str(folder), candidates=candidates())

    assert house.model().parsers == Parsers()


async def test_a_template_of_its_own_takes_the_place_of_the_folders(house: Any, folder: Path) -> None:
    own = folder / "own.jinja"
    own.write_text("{{ messages }}[TOOL_CALLS]")

    await house.run(Plain, model_path=str(folder), custom_jinja_template=str(own), candidates=candidates())

    assert house.model().card.runtime_config.tool_call_parser == "mistral"


def test_check_reports_the_chosen_parsers_and_reasons(folder: Path) -> None:
    text = check(f"path={folder}", "reasoning_parser=none").output
    assert re.search(r"mock +tool_call_parser +hermes +its template has '<tool_call>' and '</tool_call>'", text)
    assert re.search(r"mock +reasoning_parser +none +it is switched off", text)

    options = ["check", "--json", "--set", f"{MODEL}.path={folder}"]
    graph = json.loads(CliRunner().invoke(cli, options, prog_name="dynamo").output)
    assert [(row["setting"], row["parser"]) for row in graph["parsers"]] == [
        ("tool_call_parser", "hermes"),
        ("reasoning_parser", "qwen3"),
    ]


PARSERS = """
from dynamo_core import ToolCallParser
DYNAMO_API = 1
class Mine(ToolCallParser):
    NAME = "mine"
    recognizes = classmethod(lambda cls, model: "it is mine")
    feed = finish = lambda self, *text: []
"""


def test_parsers_that_the_config_names_for_a_worker_may_fit_the_model_of_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PARSERS)
    file.chmod(0o644)
    config = tmp_path / "config.yaml"
    config.write_text(
        "workers:\n"
        "  one: {model: {name: a, tool_call_parser: ./mine.py:Mine}, engine: {use: mocker}}\n"
        "  two: {model: {name: b}, engine: {use: mocker}}\n"
    )
    loaded = load_settings(config, env={})

    found = find_candidates(loaded.settings, PluginLoader(loaded.plugin_files))

    assert [cls.NAME for cls in found.tools].count("mine") == 1
    assert "hermes" in [cls.NAME for cls in found.tools]
    assert "mine" not in [cls.NAME for cls in found.reasoning]


def test_a_worker_without_the_parser_plugin_logs_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = PluginLoader()
    others = [entry for entry in loader.entries if entry.name != "auto"]
    monkeypatch.setattr(loader, "_entries", others)

    found = find_candidates(load_settings(None, env={}).settings, loader)

    assert found.tools == found.reasoning == ()
    assert "there is no tool parser 'auto'" in found.missing
    assert "ours is dynamo-plugin-parsers-standard" in found.missing
