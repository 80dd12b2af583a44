"""Reasoning, in the ways of several models and templates."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import ContentDelta, ReasoningDelta, ReasoningParser
from dynamo_plugin_parsers_standard.think import DeepSeekR1Parser, Qwen3Parser, ThinkParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALL: list[type[ReasoningParser]] = [ThinkParser, Qwen3Parser, DeepSeekR1Parser]
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
def test_reasoning_is_what_stands_between_the_tags(
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
def test_deepseek_thinks_first_although_nobody_says_so(
    parse: Any, prompt: str, text: str, expected: list[tuple[str, str]]
) -> None:
    assert parse(DeepSeekR1Parser(prompt), text, [2]) == expected


def test_only_what_may_be_part_of_a_tag_is_held_back() -> None:
    parser = ThinkParser(FREE)

    assert parser.feed("<thi") == []
    assert parser.feed("nk>Hm\n") == [ReasoningDelta("Hm")]
    assert parser.feed("a </") == [ReasoningDelta("\na ")]
    assert parser.feed("b></think>\n\nYes\n") == [ReasoningDelta("</b>"), ContentDelta("Yes\n")]


PARTS = st.sampled_from(["<think>", "</think>", "<", "</th", "think>", "\n", " ", "a", "b\n", "<tool_call>"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(PARTS, max_size=10),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    prompt=st.sampled_from([FREE, OPENED, CLOSED]),
)
@pytest.mark.parametrize("cls", ALL)
def test_the_cuts_of_the_text_change_nothing_and_only_tags_and_space_beside_them_are_lost(
    parse: Any, cls: type[ReasoningParser], parts: list[str], sizes: list[int], prompt: str
) -> None:
    text = "".join(parts)

    parsed = parse(cls(prompt), text, sizes)

    assert parsed == parse(cls(prompt), text)
    assert [kind for kind, _ in parsed] in ([], ["content"], ["reasoning"], ["reasoning", "content"])
    shown = "".join(words for _, words in parsed)
    unopened, unclosed = text.replace("<think>", "", 1), text.replace("</think>", "", 1)
    bare = unopened.replace("</think>", "", 1)
    assert _without_space(shown) in map(_without_space, (text, unopened, unclosed, bare))


def _without_space(text: str) -> str:
    return "".join(text.split())
