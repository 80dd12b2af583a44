"""Reasoning parsers that break a promise each, for the kit that must notice."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import DeltaWriter, ParserDelta, ReasoningDelta, ReasoningParser, ToolCallStart
from dynamo_testing.parser_kit import Answer, ReasoningParserFactory, ReasoningParserKit

from libs.testing.tests.planted import Planted, put


class SoundThought(ReasoningParser):
    """What comes before the first full stop is reasoning, if the answer begins with an asterisk."""

    def __init__(self, prompt: str) -> None:
        super().__init__(prompt)
        self.inside: bool | None = True if prompt.endswith("*") else None

    def feed(self, text: str) -> list[ParserDelta]:
        out = DeltaWriter()
        for letter in text:
            if self.inside is None:
                self.inside = letter == "*"
            (out.reasoning if self.inside else out.content)(letter)
            self.inside = self.inside and letter != "."
        return out.take()

    def finish(self) -> list[ParserDelta]:
        return []


class _Thoughts(Planted, ReasoningParserKit):
    PART = SoundThought
    ANSWERS = (Answer("*Hm. Yes.", "*Hm.", " Yes."), Answer("Hm. Yes.", "Hm.", " Yes.", prompt="*"))
    OPENINGS = ("*",)

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        return self.PART


class TestSoundThought(_Thoughts):
    pass


TestLosesText = _Thoughts.failing(
    "test_text_without_markup_is_not_lost", feed=lambda real, self, text: real(text.replace("🎉", ""))
)


TestForgetsThePrompt = _Thoughts.failing(
    "test_reasoning_and_content_are_separated", __init__=lambda real, self, prompt: real("")
)


TestFindsCalls = _Thoughts.failing(
    "test_a_reasoning_parser_finds_no_calls",
    starred=False,
    feed=lambda real, self, text: (put(self, starred=self.starred or "*" in text), real(text))[1],
    finish=lambda real, self: [ToolCallStart(0, "x", "f")] if self.starred else [],
)


def _reads_pieces(real: Any, self: Any, text: Any) -> Any:
    self.inside = None if text.startswith("*") else self.inside
    return real(text)


TestReadsPieces = _Thoughts.failing(
    "test_any_cut_of_a_text_parses_the_same", "test_parsers_of_two_choices_do_not_mix", feed=_reads_pieces
)


def _raises_at_odds(real: Any, self: Any, text: Any) -> Any:
    if text.count("*") > 2:
        raise ValueError(text)
    return real(text)


TestRaisesAtOdds = _Thoughts.failing("test_no_text_raises", feed=_raises_at_odds)


TestIgnoresTokens = _Thoughts.failing(
    "test_special_tokens_give_the_same_as_their_texts", MARKERS=("Yes",), feed_marker=lambda real, self, marker: []
)


def _shares_one_state___init__(real: Any, self: Any, prompt: Any) -> Any:
    real(prompt)
    type(self).current = self


TestSharesOneState = _Thoughts.failing(
    "test_parsers_of_two_choices_do_not_mix",
    current=None,
    __init__=_shares_one_state___init__,
    feed=lambda real, self, text: real(text) if self.current is self else [ReasoningDelta(text)],
)


def _looks_back(real: Any, self: Any, text: Any) -> Any:
    self.before += text
    return real(text)


TestLooksBack = _Thoughts.failing("test_a_piece_costs_the_same_however_much_came_before", before="", feed=_looks_back)
