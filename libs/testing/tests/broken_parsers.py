"""Tool parsers that break a promise each, for the kit that must notice."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_core import DeltaWriter, ParserDelta, ToolCallParser
from dynamo_testing.parser_kit import (
    Call,
    ToolParserFactory,
    ToolParserKit,
)

from libs.testing.tests.planted import Planted, adding, own

OPEN, CLOSE = "<call>", "</call>"


class SlowParser(ToolCallParser):
    """Sound, but for the cost: it keeps all text, and reads it at the end."""

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.text = ""

    def feed(self, text: str) -> list[ParserDelta]:
        self.text += text
        return []

    def finish(self) -> list[ParserDelta]:
        return self.read(self.text)

    def read(self, text: str) -> list[ParserDelta]:
        out = DeltaWriter()
        at = 0
        while (start := text.find(OPEN, at)) >= 0 and (end := text.find(CLOSE, start)) >= 0:
            name, _, arguments = text[start + len(OPEN) : end].partition(" ")
            out.content(text[at:start])
            if name.isidentifier() and is_object(arguments):
                out.begin_call(name)
                out.arguments(arguments)
            else:
                self.unsound(out, text[start : end + len(CLOSE)])
            at = end + len(CLOSE)
        out.content(text[at:])
        return out.take()

    def unsound(self, out: DeltaWriter, text: str) -> None:
        out.content(text)


class SoundParser(SlowParser):
    """The same with parts in a list."""

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.parts: list[str] = []

    def feed(self, text: str) -> list[ParserDelta]:
        self.parts.append(text)
        return []

    def finish(self) -> list[ParserDelta]:
        return self.read("".join(self.parts))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


class _Tools(Planted, ToolParserKit):
    PART = SoundParser
    CALLS = ((f'Well. {OPEN}f {{"a": 1}}{CLOSE} So.', ["Well. ", Call("f", {"a": 1}), " So."]),)
    UNSOUND = (f"{OPEN}f{CLOSE}", f"{OPEN}f {{", f"{OPEN}{CLOSE}", "<cal")
    OPENINGS = (f'{OPEN}f {{"a": "',)

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        return self.PART


class TestSound(_Tools):
    pass


TestKeepsTheText = _Tools.failing("test_a_piece_costs_the_same_however_much_came_before", part=SlowParser)


# Space around an answer is lost.

TestTrims = _Tools.failing(
    "test_text_without_markup_is_content",
    "test_no_text_raises_or_is_lost",
    read=lambda real, self, text: real(text.rstrip("\n") if OPEN not in text else text),
)


TestOtherArguments = _Tools.failing(
    "test_calls_are_found",
    read=lambda real, self, text: real(text.replace(f'{OPEN}f {{"a": 1}}{CLOSE}', f'{OPEN}f {{"b": 1}}{CLOSE}')),
)


TestDropsUnsoundMarkup = _Tools.failing(
    "test_unsound_markup_is_content_to_the_last_character",
    "test_no_text_raises_or_is_lost",
    unsound=lambda real, self, out, text: None,
)


# Markup that is cut is not found.

TestReadsPieceByPiece = _Tools.failing(
    "test_any_cut_of_a_text_parses_the_same",
    "test_parsers_of_two_choices_do_not_mix",
    feed=lambda real, self, text: self.read(text),
    finish=lambda real, self: [],
)


def _raises(real: Any, self: Any, out: Any, text: Any) -> Any:
    raise ValueError(text)


TestRaises = _Tools.failing(
    "test_unsound_markup_is_content_to_the_last_character",
    "test_any_cut_of_a_text_parses_the_same",
    "test_special_tokens_give_the_same_as_their_texts",
    "test_malformed_calls_are_counted",
    "test_no_text_raises_or_is_lost",
    "test_parsers_of_two_choices_do_not_mix",
    unsound=_raises,
)


# Markup that comes as a special token is lost.

TestIgnoresTokens = _Tools.failing(
    "test_special_tokens_give_the_same_as_their_texts", MARKERS=(OPEN,), feed_marker=lambda real, self, marker: []
)


# What it counts depends on the cuts of the text.


TestCountsPieces = _Tools.failing("test_malformed_calls_are_counted", feed=adding("malformed"))


# The parts of all parsers lie in one list.


TestSharesState = _Tools.failing(
    "test_parsers_of_two_choices_do_not_mix",
    shared=[],
    __init__=own(parts=lambda self: self.shared),
    finish=lambda real, self: (real(), self.shared.clear())[0],
)
