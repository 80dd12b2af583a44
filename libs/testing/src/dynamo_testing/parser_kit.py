"""The kits for parsers: the same output however a text is cut, and a bounded cost per piece.

The author's whole test file::

    import pytest
    from dynamo_testing.parser_kit import Call, ToolParserFactory, ToolParserKit

    class TestMine(ToolParserKit):
        CALLS = (('Well. <call>f {"a": 1}</call>', ["Well. ", Call("f", {"a": 1})]),)
        UNSOUND = ("<call>f {", "<call></call>")
        OPENINGS = ('<call>f {"a": "',)

        @pytest.fixture
        def make_parser(self) -> ToolParserFactory:
            return MyParser

A parser that tells reasoning from content has `ReasoningParserKit`, whose samples are `Answer`. Checks that need
samples are skipped where the class has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

from dynamo_core.contracts.parsers import ReasoningParser, ToolCallParser

from dynamo_testing.optional_packages import pytest
from dynamo_testing.parser.cost import check_cost
from dynamo_testing.parser.piecewise_parsing import (
    Call,
    Parser,
    Said,
    Thought,
    at_markers,
    cuts,
    parse,
    scraps,
    side_by_side,
    understood,
)

__all__ = [
    "Answer",
    "Call",
    "ReasoningParserFactory",
    "ReasoningParserKit",
    "Thought",
    "ToolParserFactory",
    "ToolParserKit",
]

#: Makes the parser of one choice from the tools of the request. The class itself does.
ToolParserFactory: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], ToolCallParser]
#: Makes the parser of one choice from the prompt. The class itself does.
ReasoningParserFactory: TypeAlias = Callable[[str], ReasoningParser]

#: Text of which no model means any part as markup.
PLAIN = (
    "Hello.",
    " two\n\nlines \n",
    "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f389",
    "a < b, c > d",
    "[1, 2]",
    '{"a": 1}',
    "f(x)",
)
#: What long texts consist of.
FILLERS = ("the quick brown fox ", " \n")
#: Texts made of scraps that are cut in all ways.
SCRAPS = 60


def check_markers(make: Callable[[], Parser], texts: Sequence[str]) -> None:
    """Feed texts whose special tokens come as tokens.

    Raises:
        AssertionError: a text is not understood as the same one that comes without tokens.
    """
    for text in texts:
        parser = make()
        pieces = at_markers(text, parser.MARKERS)
        assert parse(parser, pieces, markers=True) == parse(make(), [text])


def malformed(parser: Parser, pieces: Sequence[str]) -> int:
    """Return how many malformed calls a parser counts in a text."""
    parse(parser, pieces)
    return parser.malformed


class ToolParserKit:
    """All checks of a tool parser. Subclass it as ``Test…``, write the fixture `make_parser` and give samples."""

    #: The tools of the requests.
    TOOLS: ClassVar[Sequence[Mapping[str, Any]]] = tuple(
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")
    )
    #: Texts with calls, and what is in them in order: a plain text is content, a `Thought` reasoning.
    CALLS: ClassVar[Sequence[tuple[str, Sequence[str | Thought | Call]]]] = ()
    #: Texts with broken markup. They are content to the last character.
    UNSOUND: ClassVar[Sequence[str]] = ()
    #: Beginnings of markup after which an answer may go on for long.
    OPENINGS: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def make_parser(self) -> ToolParserFactory:
        """Make a parser from the tools of a request. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_parser` that returns the class of the parser")

    def test_text_without_markup_is_content(self, make_parser: ToolParserFactory) -> None:
        for text in PLAIN:
            assert parse(make_parser(self.TOOLS), [text]) == [text]
        assert parse(make_parser(self.TOOLS), []) == []

    def test_calls_are_found(self, make_parser: ToolParserFactory) -> None:
        if not self.CALLS:
            pytest.skip("CALLS is empty: the kit knows no text with a call")
        for text, expected in self.CALLS:
            assert understood(parse(make_parser(self.TOOLS), [text])) == list(expected)

    def test_unsound_markup_is_content_to_the_last_character(self, make_parser: ToolParserFactory) -> None:
        if not self.UNSOUND:
            pytest.skip("UNSOUND is empty: the kit knows no broken markup")
        for text in self.UNSOUND:
            assert parse(make_parser(self.TOOLS), [text]) == [text]

    def test_any_cut_of_a_text_parses_the_same(self, make_parser: ToolParserFactory) -> None:
        def made(buffered: bool) -> ToolCallParser:
            parser = make_parser(self.TOOLS)
            if buffered:
                parser.buffer_calls()
            return parser

        for buffered in (False, True):
            for text in (*self._samples(), *scraps(self._samples(), count=SCRAPS)):
                whole = parse(made(buffered), [text])
                for pieces in cuts(text):
                    assert parse(made(buffered), pieces) == whole

    def test_special_tokens_give_the_same_as_their_texts(self, make_parser: ToolParserFactory) -> None:
        check_markers(lambda: make_parser(self.TOOLS), [*self._samples(), *scraps(self._samples(), count=SCRAPS)])

    def test_malformed_calls_are_counted(self, make_parser: ToolParserFactory) -> None:
        """Text without markup and sound calls count nothing, and the cuts of a text change no count."""
        for text in (*PLAIN, *(text for text, _ in self.CALLS)):
            assert malformed(make_parser(self.TOOLS), [text]) == 0, f"a call is counted as malformed in {text!r}"
        for text in (*self._samples(), *scraps(self._samples(), count=SCRAPS)):
            assert malformed(make_parser(self.TOOLS), list(text)) == malformed(make_parser(self.TOOLS), [text])

    def test_no_text_raises_or_is_lost(self, make_parser: ToolParserFactory) -> None:
        """A text without any call comes out whole, unless the markup of reasoning may be part of it."""
        for text in scraps(self._samples(), count=20 * SCRAPS):
            parser = make_parser(self.TOOLS)
            parsed = parse(parser, [text])
            if not parser.TELLS_REASONING and not any(isinstance(part, Said) for part in parsed):
                assert parsed == [text]

    def test_parsers_of_two_choices_do_not_mix(self, make_parser: ToolParserFactory) -> None:
        for text in self._samples():
            alone = parse(make_parser(self.TOOLS), [text])
            assert side_by_side(make_parser(self.TOOLS), make_parser(self.TOOLS), text) == (alone, alone)

    def test_a_piece_costs_the_same_however_much_came_before(self, make_parser: ToolParserFactory) -> None:
        for opening in ("", *self.OPENINGS):
            for filler in FILLERS:
                check_cost(make_parser(self.TOOLS), opening, filler)

    def _samples(self) -> list[str]:
        return [*(text for text, _ in self.CALLS), *self.UNSOUND, *self.OPENINGS, *PLAIN]


class Answer(NamedTuple):
    """An answer, its reasoning and its content, and the end of the prompt before it."""

    text: str
    reasoning: str = ""
    content: str = ""
    prompt: str = ""


class ReasoningParserKit:
    """All checks of a reasoning parser. Subclass it as ``Test…``, write the fixture `make_parser` and give samples."""

    #: Answers with reasoning.
    ANSWERS: ClassVar[Sequence[Answer]] = ()
    #: Beginnings of answers after which reasoning may go on for long.
    OPENINGS: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def make_parser(self) -> ReasoningParserFactory:
        """Make a parser from the prompt. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_parser` that returns the class of the parser")

    def test_text_without_markup_is_not_lost(self, make_parser: ReasoningParserFactory) -> None:
        """All of it is content, or, where a model always reasons first, reasoning."""
        for text in PLAIN:
            assert parse(make_parser(""), [text]) in ([text], [Thought(text)])
        assert parse(make_parser(""), []) == []

    def test_reasoning_and_content_are_separated(self, make_parser: ReasoningParserFactory) -> None:
        if not self.ANSWERS:
            pytest.skip("ANSWERS is empty: the kit knows no answer with reasoning")
        for answer in self.ANSWERS:
            parts = parse(make_parser(answer.prompt), [answer.text])
            reasoning = "".join(part.text for part in parts if isinstance(part, Thought))
            content = "".join(part for part in parts if isinstance(part, str))
            assert (reasoning, content) == (answer.reasoning, answer.content)

    def test_a_reasoning_parser_finds_no_calls(self, make_parser: ReasoningParserFactory) -> None:
        for prompt, text in self._asked():
            parts = parse(make_parser(prompt), [text])
            assert not [part for part in parts if isinstance(part, Said)], "calls are for the parser of tools"

    def test_any_cut_of_a_text_parses_the_same(self, make_parser: ReasoningParserFactory) -> None:
        for prompt, text in self._asked():
            whole = parse(make_parser(prompt), [text])
            for pieces in cuts(text):
                assert parse(make_parser(prompt), pieces) == whole

    def test_special_tokens_give_the_same_as_their_texts(self, make_parser: ReasoningParserFactory) -> None:
        for prompt, text in self._asked():
            check_markers(functools.partial(make_parser, prompt), [text])

    def test_no_text_raises(self, make_parser: ReasoningParserFactory) -> None:
        prompts = sorted({prompt for prompt, _ in self._asked()})
        for text in scraps([text for _, text in self._asked()], count=10 * SCRAPS):
            for prompt in prompts:
                parse(make_parser(prompt), [text])

    def test_parsers_of_two_choices_do_not_mix(self, make_parser: ReasoningParserFactory) -> None:
        for prompt, text in self._asked():
            alone = parse(make_parser(prompt), [text])
            assert side_by_side(make_parser(prompt), make_parser(prompt), text) == (alone, alone)

    def test_a_piece_costs_the_same_however_much_came_before(self, make_parser: ReasoningParserFactory) -> None:
        for opening in ("", *self.OPENINGS):
            for filler in FILLERS:
                check_cost(make_parser(""), opening, filler)

    def _asked(self) -> list[tuple[str, str]]:
        """Return prompts and answers."""
        prompts = ["", *(answer.prompt for answer in self.ANSWERS)]
        texts = [*(answer.text for answer in self.ANSWERS), *self.OPENINGS, *PLAIN]
        return [(prompt, text) for prompt in dict.fromkeys(prompts) for text in (*texts, *scraps(texts, count=SCRAPS))]
