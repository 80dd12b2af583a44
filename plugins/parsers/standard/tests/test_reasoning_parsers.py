"""Reasoning, in the ways of several models and templates."""

from __future__ import annotations

import random
from typing import Any

import pytest
from dynamo_core import ContentDelta, ReasoningDelta, ReasoningParser
from dynamo_plugin_parsers_standard import dynamo_register_reasoning_parsers
from dynamo_plugin_parsers_standard.think_tags import (
    DeepSeekR1Parser,
    Gemma4ThinkParser,
    GraniteParser,
    Qwen3Parser,
    ThinkParser,
)

from plugins.parsers.standard.tests.conftest import joined, pieces_of

ALL: list[type[ThinkParser]] = [cls for cls in dynamo_register_reasoning_parsers() if issubclass(cls, ThinkParser)]
FREE, OPENED, CLOSED = "user: Hi\n", "user: Hi\n<think>\n", "user: Hi\n<think>\n\n</think>\n\n"


def reasoning(text: str) -> tuple[str, str]:
    return ("reasoning", text)


def content(text: str) -> tuple[str, str]:
    return ("content", text)


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (FREE, "<think>\nHm.\n\nSo?\n</think>\n\nYes.\n", [reasoning("Hm.\n\nSo?"), content("Yes.\n")]),
        (FREE, "\n <think>Hm</think>Yes", [reasoning("Hm"), content("Yes")]),
        (FREE, "<think>\n\n</think>\n\nYes", [content("Yes")]),
        (FREE, "<think>Hm </think> Yes", [reasoning("Hm "), content(" Yes")]),
        (FREE, "<think>Hm\n", [reasoning("Hm\n")]),
        (FREE, "<think>Hm</thi", [reasoning("Hm</thi")]),
        (FREE, "Yes <think>no</think>", [content("Yes <think>no</think>")]),
        (FREE, "<thi", [content("<thi")]),
        (FREE, " \n", [content(" \n")]),
        (OPENED, "\nHm\n</think>\n\nYes", [reasoning("Hm"), content("Yes")]),
        (OPENED, "<think>\nHm</think>Yes", [reasoning("Hm"), content("Yes")]),
        (OPENED, "Hm</think>Yes</think>", [reasoning("Hm"), content("Yes</think>")]),
        (OPENED, "Hm", [reasoning("Hm")]),
        (OPENED, "\n  </think>", [reasoning("  ")]),
        (CLOSED, "Yes", [content("Yes")]),
        (CLOSED, "<think>Hm</think>", [content("<think>Hm</think>")]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("cls", [ThinkParser, Qwen3Parser])
def test_reasoning_is_the_text_between_the_tags(
    parse: Any, cls: type[ReasoningParser], prompt: str, text: str, expected: list[tuple[str, str]], size: int
) -> None:
    assert parse(cls(prompt), text, [size]) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (FREE, "Hm</think>Yes", [reasoning("Hm"), content("Yes")]),
        (FREE, "\nHm", [reasoning("Hm")]),
        (FREE, "<think>Hm</think>Yes", [reasoning("Hm"), content("Yes")]),
        (OPENED, "Hm</think>Yes", [reasoning("Hm"), content("Yes")]),
        (CLOSED, "Yes", [content("Yes")]),
    ],
)
def test_deepseek_r1_reasons_first_without_an_opening_tag(
    parse: Any, prompt: str, text: str, expected: list[tuple[str, str]]
) -> None:
    assert parse(DeepSeekR1Parser(prompt), text, [2]) == expected


def test_only_possible_tag_text_is_held_back() -> None:
    parser = ThinkParser(FREE)

    assert parser.feed("<thi") == []
    assert parser.feed("nk>Hm\n") == [ReasoningDelta("Hm")]
    assert parser.feed("a </") == [ReasoningDelta("\na ")]
    assert parser.feed("b></think>\n\nYes\n") == [ReasoningDelta("</b>"), ContentDelta("Yes\n")]


#: Formats with the tag that opens reasoning and the one that closes it, in both of their ways if there are two.
PAIRS = [(cls, *pair) for cls in ALL for pair in cls.FORMAT.pairs]
ENDS = [(cls, end) for cls in ALL for end in cls.FORMAT.ends]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("cls", "opening", "closing"), PAIRS)
def test_every_format_is_opened_by_the_answer_or_the_prompt_and_closed_by_either(
    parse: Any, cls: type[ThinkParser], opening: str, closing: str, size: int
) -> None:
    expected = [reasoning("Hm"), content("Yes")]

    assert parse(cls("Hi\n"), f"{opening}\nHm\n{closing}\n\nYes", [size]) == expected
    assert parse(cls(f"Hi\n{opening}\n"), f"Hm{closing}Yes", [size]) == expected
    assert parse(cls(f"Hi\n{opening}\n{closing}\n\n"), "Yes", [size]) == [content("Yes")]
    assert parse(cls("Hi\n"), f"{opening}Hm", [size]) == [reasoning("Hm")]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(("cls", "end"), ENDS)
def test_a_call_ends_reasoning_that_is_not_closed(parse: Any, cls: type[ThinkParser], end: str, size: int) -> None:
    opening, closing = cls.FORMAT.pairs[0]

    assert parse(cls(""), f"{opening}Hm\n{end}call", [size]) == [reasoning("Hm"), content(f"{end}call")]
    assert parse(cls(opening), f"{end}call", [size]) == [content(f"{end}call")]
    closed = parse(cls(""), f"{opening}Hm{closing}{end}call", [size])
    assert closed == [reasoning("Hm"), content(f"{end}call")]


@pytest.mark.parametrize(("cls", "end"), ENDS)
def test_spelled_call_markup_does_not_end_reasoning_if_it_is_a_token(cls: type[ThinkParser], end: str) -> None:
    opening, _ = cls.FORMAT.pairs[0]
    parser = cls("")
    parser.has_marker_tokens(frozenset({end}))

    deltas = [*parser.feed(f"{opening}I could write {end} <"), *parser.feed_marker(end), *parser.feed("call")]

    assert joined([*deltas, *parser.finish()]) == [reasoning(f"I could write {end} <"), content(f"{end}call")]


@pytest.mark.parametrize(
    ("prompt", "head", "expected"),
    [
        ("", "", [content("<tool_call>x")]),
        ("", " \n", [content(" \n<tool_call>x")]),
        ("<think>", "", [content("<tool_call>x")]),
        ("<think>", " ", [reasoning(" "), content("<tool_call>x")]),
        ("", "<think>\n", [content("<tool_call>x")]),
        ("", "<think>Hm\n", [reasoning("Hm"), content("<tool_call>x")]),
        ("", "<think>Hm</th", [reasoning("Hm</th"), content("<tool_call>x")]),
        ("", "<think>Hm</think>\n", [reasoning("Hm"), content("<tool_call>x")]),
        ("", "<think>Hm</think>So ", [reasoning("Hm"), content("So <tool_call>x")]),
        ("<think></think>", "So ", [content("So <tool_call>x")]),
    ],
)
def test_a_token_that_begins_a_call_ends_reasoning_wherever_it_comes(
    prompt: str, head: str, expected: list[tuple[str, str]]
) -> None:
    parser = Qwen3Parser(prompt)
    parser.has_marker_tokens(frozenset({"<tool_call>", "<think>"}))

    deltas = [*parser.feed(head), *parser.feed_marker("<tool_call>"), *parser.feed("x"), *parser.finish()]

    assert joined(deltas) == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>Hm</think>\n<response>Yes</response>", [reasoning("Hm"), content("Yes")]),
        ("<think>Hm</think>\n<response>Yes</resp", [reasoning("Hm"), content("Yes</resp")]),
        ("<think>Hm</think>\n<responsive>", [reasoning("Hm"), content("<responsive>")]),
        ("<think>Hm</think><resp", [reasoning("Hm"), content("<resp")]),
        ("<think>Here is my response: no</think>Yes", [reasoning("Here is my response: no"), content("Yes")]),
        ("Here is my thought", [content("Here is my thought")]),
        ("<response>Yes", [content("<response>Yes")]),
    ],
)
def test_granite_wraps_its_response_after_thoughts(
    parse: Any, text: str, expected: list[tuple[str, str]], size: int
) -> None:
    assert parse(GraniteParser(""), text, [size]) == expected


def test_the_name_of_a_channel_of_gemma_is_no_part_of_the_thoughts_and_its_tokens_are_known() -> None:
    parser = Gemma4ThinkParser("")

    deltas = [*parser.feed_marker("<|channel>"), *parser.feed("thou"), *parser.feed("ght\nHm")]
    deltas += [*parser.feed_marker("<channel|>"), *parser.feed("Yes"), *parser.finish()]

    assert joined(deltas) == [reasoning("Hm"), content("Yes")]


WORDS = ["<", "</th", "think>", "\n", " ", "a", "b\n", "Here is my ", "[", "◁", "｜"]


def mixed(rng: random.Random, cls: type[ThinkParser]) -> tuple[str, str]:
    """Return a prompt, and a text of a format's tags, parts of them and other words in any order."""
    form = cls.FORMAT
    tags = [*(tag for pair in form.pairs for tag in pair), *form.ends, *(form.around or ())]
    words = [rng.choice(tags if rng.random() < 0.6 else WORDS) for _ in range(rng.randrange(10))]
    text = "".join(word[: rng.randint(1, len(word))] if rng.random() < 0.3 else word for word in words)
    opening, closing = rng.choice(form.pairs)
    return rng.choice(["Hi\n", f"Hi\n{opening}\n", f"Hi\n{opening}\n{closing}\n"]), text


def assert_nothing_is_lost(cls: type[ThinkParser], prompt: str, text: str, sizes: list[int]) -> None:
    """Assert that cuts change nothing, reasoning precedes content, and only tags and space beside them are hidden."""
    parser, whole = cls(prompt), cls(prompt)
    deltas = [delta for piece in pieces_of(text, sizes) for delta in parser.feed(piece)]
    parsed = joined([*deltas, *parser.finish()])

    assert parsed == joined([*whole.feed(text), *whole.finish()]), (text, sizes)
    assert [kind for kind, *_ in parsed] in ([], ["content"], ["reasoning"], ["reasoning", "content"])
    form = cls.FORMAT
    hidden = {"".join(tag.split()) for pair in (*form.pairs, form.around or ()) for tag in pair}
    shown = "".join("".join(words for _, words in parsed).split())
    assert _is_without(shown, "".join(text.split()), hidden), (prompt, text)


def _is_without(shown: str, text: str, tags: set[str]) -> bool:
    """Return whether a text is another one from which some tags are gone."""
    seen, left = set(), [(0, 0)]
    while left:
        at, came = left.pop()
        if (at, came) == (len(text), len(shown)):
            return True
        if (at, came) in seen:
            continue
        seen.add((at, came))
        if at < len(text) and came < len(shown) and text[at] == shown[came]:
            left.append((at + 1, came + 1))
        left += [(at + len(tag), came) for tag in tags if text.startswith(tag, at)]
    return False


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.full)])
def test_any_cut_loses_only_tags_and_adjacent_space(cls: type[ThinkParser], count: int) -> None:
    rng = random.Random(cls.NAME)
    for _ in range(count):
        assert_nothing_is_lost(cls, *mixed(rng, cls), [rng.randint(1, 9) for _ in range(3)])
