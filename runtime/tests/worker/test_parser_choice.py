"""Which parsers a worker puts on its card, by the settings and the files of its model."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from dynamo_core import ModelText, ParserDelta, ReasoningParser, ToolCallParser, WorkerConfig
from dynamo_runtime.worker.parser_choice import Candidates, choose_parsers, log_choice, model_text


class _Knowing(ToolCallParser):
    """Knows a model by a word in its template."""

    WORD: str

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        return f"it says {cls.WORD}" if cls.WORD in model.template else None

    def feed(self, text: str) -> list[ParserDelta]:
        return []

    def finish(self) -> list[ParserDelta]:
        return []


class Red(_Knowing):
    NAME, WORD = "red", "RED"


class Blue(_Knowing):
    NAME, WORD = "blue", "BLUE"


class Described(_Knowing):
    NAME, WORD = "described", "DESCRIBED"
    DESCRIBED = True


class Broken(_Knowing):
    NAME = "broken"

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        raise ZeroDivisionError


class Thinking(ReasoningParser):
    NAME = "thinking"

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        return "it has a token" if "<t>" in model.special_tokens else None

    def feed(self, text: str) -> list[ParserDelta]:
        return []

    def finish(self) -> list[ParserDelta]:
        return []


ALL = Candidates((Broken, Red, Blue, Described), (Thinking,))


def files(template: str = "", **more: Any) -> dict[str, bytes]:
    tokenizer = {"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 1, "content": "<t>", "special": True}]}
    made = {"tokenizer.json": tokenizer, "tokenizer_config.json": {"chat_template": template}, **more}
    return {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in made.items()}


def test_the_one_parser_that_fits_is_chosen_with_its_reason() -> None:
    choice = choose_parsers(WorkerConfig(), files("BLUE"), ALL)

    assert choice.tools[:2] == ("blue", "it says BLUE")
    assert choice.reasoning[:2] == ("thinking", "it has a token")


def test_none_is_chosen_where_none_fits_or_several_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    assert choose_parsers(WorkerConfig(), files("GREEN"), ALL).tools[:2] == (None, "none fits its template")
    assert choose_parsers(WorkerConfig(), {}, ALL).tools[:2] == (None, "the model has no chat template")

    several = choose_parsers(WorkerConfig(), files("RED BLUE"), ALL)
    log_choice("w", several)

    assert several.tools[:2] == (None, "more than one fits: red, blue")
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "red (it says RED), blue (it says BLUE)" in warning
    assert "set workers.w.model.tool_call_parser to one of them, or to none" in warning
    assert "worker w: the parser of reasoning is thinking: it has a token" in caplog.text


def test_a_format_that_the_folder_describes_goes_before_those_that_are_known_by_signs() -> None:
    choice = choose_parsers(WorkerConfig(), files("RED BLUE DESCRIBED"), ALL)

    assert choice.tools == ("described", "it says DESCRIBED", {})


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [(None, (None, "it is switched off")), ("none", (None, "it is switched off")), ("red", ("red", "it is named"))],
)
def test_a_setting_overrules_the_files(setting: str | None, chosen: tuple[str | None, str]) -> None:
    choice = choose_parsers(WorkerConfig(tool_call_parser=setting), files("BLUE"), ALL)

    assert choice.tools[:2] == chosen


def test_missing_candidates_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    log_choice("w", choose_parsers(WorkerConfig(), files("BLUE"), Candidates(missing="install it")))

    assert [record.getMessage() for record in caplog.records] == ["worker w: its answers are not parsed: install it"]


def test_a_text_engine_gets_no_parser_unless_named() -> None:
    config = WorkerConfig(tool_call_parser="red")

    choice = choose_parsers(config, files("BLUE"), ALL, parsed=False)

    assert choice.tools.name == "red"
    assert choice.reasoning[:2] == (None, "the engine gives text")


@pytest.mark.parametrize(
    ("more", "template"),
    [
        ({"chat_template.jinja": b"file \xff"}, "file \ufffd"),
        ({"chat_template.jinja": b"file", "tool_use.jinja": b"tools"}, "file\ntools"),
        ({"tool_use.jinja": b"tools"}, "settings\ntools"),
        (
            {"tokenizer_config.json": {"chat_template": [{"template": "a"}, {"template": "b"}, 5]}},
            "a\nb",
        ),
        ({"tokenizer_config.json": {}, "chat_template.json": {"chat_template": "c"}}, "c"),
        ({"tokenizer_config.json": b"\xff{", "config.json": b"[]"}, ""),
        ({"tokenizer.json": b"\xff{"}, "settings"),
    ],
)
def test_the_template_is_the_one_that_is_used(more: dict[str, Any], template: str) -> None:
    assert model_text(files("settings", **more)).template == template


def test_parsers_get_the_model_files_and_unreadable_ones_are_skipped() -> None:
    text = model_text(files("x", **{"config.json": {"model_type": "m"}}))
    assert text == ModelText("x", frozenset({"<t>"}), {"chat_template": "x"}, {"model_type": "m"})

    broken = model_text({"tokenizer.json": b"{", "config.json": b"5", "tokenizer_config.json": b"["})
    assert broken == ModelText("", frozenset(), {}, {})
