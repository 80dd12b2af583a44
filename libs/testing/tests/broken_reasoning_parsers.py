"""Reasoning parsers that break a promise each, for the kit that must notice."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from dynamo_core import DeltaWriter, ParserDelta, ReasoningDelta, ReasoningParser, ToolCallStart
from dynamo_testing.parser_kit import Answer, ReasoningParserFactory, ReasoningParserKit


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


class _Thoughts(ReasoningParserKit):
    FAILS: ClassVar[tuple[str, ...]] = ()
    ANSWERS = (Answer("*Hm. Yes.", "*Hm.", " Yes."), Answer("Hm. Yes.", "Hm.", " Yes.", prompt="*"))
    OPENINGS = ("*",)
    PARSER: ClassVar[type[ReasoningParser]] = SoundThought

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        return self.PARSER


class TestSoundThought(_Thoughts):
    pass


class TestLosesText(_Thoughts):
    FAILS = ("test_text_without_markup_is_not_lost",)

    class PARSER(SoundThought):
        def feed(self, text: str) -> list[ParserDelta]:
            return super().feed(text.replace("🎉", ""))


class TestForgetsThePrompt(_Thoughts):
    FAILS = ("test_reasoning_and_content_are_told_apart",)

    class PARSER(SoundThought):
        def __init__(self, prompt: str) -> None:
            super().__init__("")


class TestFindsCalls(_Thoughts):
    FAILS = ("test_it_finds_no_calls",)

    class PARSER(SoundThought):
        starred = False

        def feed(self, text: str) -> list[ParserDelta]:
            self.starred = self.starred or "*" in text
            return super().feed(text)

        def finish(self) -> list[ParserDelta]:
            return [ToolCallStart(0, "x", "f")] if self.starred else []


class TestReadsPieces(_Thoughts):
    FAILS = (
        "test_any_cut_of_a_text_gives_the_same",
        "test_parsers_of_two_choices_do_not_mix",
    )

    class PARSER(SoundThought):
        def feed(self, text: str) -> list[ParserDelta]:
            self.inside = None if text.startswith("*") else self.inside
            return super().feed(text)


class TestRaisesAtOdds(_Thoughts):
    FAILS = ("test_no_text_raises",)

    class PARSER(SoundThought):
        def feed(self, text: str) -> list[ParserDelta]:
            if text.count("*") > 2:
                raise ValueError(text)
            return super().feed(text)


class TestIgnoresTokens(_Thoughts):
    FAILS = ("test_special_tokens_give_the_same_as_their_texts",)

    class PARSER(SoundThought):
        MARKERS = ("Yes",)

        def feed_marker(self, marker: str) -> list[ParserDelta]:
            return []


class TestSharesOneState(_Thoughts):
    FAILS = ("test_parsers_of_two_choices_do_not_mix",)

    class PARSER(SoundThought):
        current: ClassVar[Any] = None

        def __init__(self, prompt: str) -> None:
            super().__init__(prompt)
            type(self).current = self

        def feed(self, text: str) -> list[ParserDelta]:
            return super().feed(text) if self.current is self else [ReasoningDelta(text)]


class TestLooksBack(_Thoughts):
    FAILS = ("test_a_piece_costs_the_same_however_much_came_before",)

    class PARSER(SoundThought):
        before = ""

        def feed(self, text: str) -> list[ParserDelta]:
            self.before += text
            return super().feed(text)
