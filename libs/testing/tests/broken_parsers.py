"""Tool parsers that break a promise each, for the kit that must notice."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest
from dynamo_core import DeltaWriter, ParserDelta, ToolCallParser
from dynamo_testing.parser_kit import (
    Call,
    ToolParserFactory,
    ToolParserKit,
)

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


class _Tools(ToolParserKit):
    FAILS: ClassVar[tuple[str, ...]] = ()
    CALLS = ((f'Well. {OPEN}f {{"a": 1}}{CLOSE} So.', ["Well. ", Call("f", {"a": 1}), " So."]),)
    UNSOUND = (f"{OPEN}f{CLOSE}", f"{OPEN}f {{", f"{OPEN}{CLOSE}", "<cal")
    OPENINGS = (f'{OPEN}f {{"a": "',)
    PARSER: ClassVar[type[ToolCallParser]] = SoundParser

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        return self.PARSER


class TestSound(_Tools):
    pass


class TestKeepsTheText(_Tools):
    FAILS = ("test_a_piece_costs_the_same_however_much_came_before",)
    PARSER = SlowParser


class TestTrims(_Tools):
    """Space around an answer is lost."""

    FAILS = (
        "test_text_without_markup_is_content",
        "test_no_text_raises_or_is_lost",
    )

    class PARSER(SoundParser):
        def read(self, text: str) -> list[ParserDelta]:
            return super().read(text.rstrip("\n") if OPEN not in text else text)


class TestOtherArguments(_Tools):
    FAILS = ("test_calls_are_found",)

    class PARSER(SoundParser):
        def read(self, text: str) -> list[ParserDelta]:
            return super().read(text.replace(f'{OPEN}f {{"a": 1}}{CLOSE}', f'{OPEN}f {{"b": 1}}{CLOSE}'))


class TestDropsUnsoundMarkup(_Tools):
    FAILS = (
        "test_unsound_markup_is_content_to_the_last_character",
        "test_no_text_raises_or_is_lost",
    )

    class PARSER(SoundParser):
        def unsound(self, out: DeltaWriter, text: str) -> None:
            pass


class TestReadsPieceByPiece(_Tools):
    """Markup that is cut is not found."""

    FAILS = ("test_any_cut_of_a_text_gives_the_same", "test_parsers_of_two_choices_do_not_mix")

    class PARSER(SoundParser):
        def feed(self, text: str) -> list[ParserDelta]:
            return self.read(text)

        def finish(self) -> list[ParserDelta]:
            return []


class TestRaises(_Tools):
    FAILS = (
        "test_unsound_markup_is_content_to_the_last_character",
        "test_any_cut_of_a_text_gives_the_same",
        "test_special_tokens_give_the_same_as_their_texts",
        "test_malformed_calls_are_counted",
        "test_no_text_raises_or_is_lost",
        "test_parsers_of_two_choices_do_not_mix",
    )

    class PARSER(SoundParser):
        def unsound(self, out: DeltaWriter, text: str) -> None:
            raise ValueError(text)


class TestIgnoresTokens(_Tools):
    """Markup that comes as a special token is lost."""

    FAILS = ("test_special_tokens_give_the_same_as_their_texts",)

    class PARSER(SoundParser):
        MARKERS = (OPEN,)

        def feed_marker(self, marker: str) -> list[ParserDelta]:
            return []


class TestCountsPieces(_Tools):
    """What it counts depends on the cuts of the text."""

    FAILS = ("test_malformed_calls_are_counted",)

    class PARSER(SoundParser):
        def feed(self, text: str) -> list[ParserDelta]:
            self.malformed += 1
            return super().feed(text)


class TestSharesState(_Tools):
    """The parts of all parsers lie in one list."""

    FAILS = ("test_parsers_of_two_choices_do_not_mix",)

    class PARSER(SoundParser):
        shared: ClassVar[list[str]] = []

        def __init__(self, tools: Any) -> None:
            super().__init__(tools)
            self.parts = self.shared

        def finish(self) -> list[ParserDelta]:
            deltas = super().finish()
            self.shared.clear()
            return deltas
