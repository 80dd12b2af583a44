"""Parsers are named by workers, checked before the start, and loaded where answers are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from dynamo_core import Parsers
from dynamo_core.cli.main import cli
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.think import Qwen3Parser

from tests.integration.parts import Plain

MODEL = "workers.mock.model"


def check(*settings: str) -> Any:
    """``dynamo check`` of the built-in example with some keys set."""
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
                "installed: hermes, llama3_json, mistral, pythonic",
                "did you mean 'hermes'?",
            ],
        ),
        (
            "reasoning_parser=aloud",
            [
                f"{MODEL}.reasoning_parser",
                "no reasoning parser 'aloud'",
                "installed: deepseek_r1, qwen3, think",
                "ours is dynamo-plugin-parsers-standard",
            ],
        ),
        ("tool_call_parser=", [f"{MODEL}.tool_call_parser", "must not be empty"]),
    ],
)
def test_a_parser_that_nobody_offers_stops_the_start_with_those_that_are_there(setting: str, words: list[str]) -> None:
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


async def test_a_model_whose_parser_is_not_installed_is_not_served_and_the_log_says_why(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = house.worker(Plain, tool_call_parser="morse", reasoning_parser="qwen3")

    await worker.start()
    await house.eventually(lambda: "cannot be loaded" in caplog.text)
    await worker.stop(grace=False)

    assert "there is no tool parser 'morse' (installed: hermes, llama3_json, mistral, pythonic)" in caplog.text
    assert not house.models.list()
