from __future__ import annotations

from itertools import pairwise

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_text.byte_tokenizer import EOS, ByteTokenizer
from dynamo_text.detokenizer import Detokenizer
from dynamo_text.hf_tokenizer import HFTokenizer
from hypothesis import given
from hypothesis import strategies as st

BYTES = ByteTokenizer()

#: Few letters, so that stop strings are found, nearly found, and overlap.
texts = st.text("aé", max_size=30) | st.text("abé😀", max_size=30)
stop_lists = st.lists(st.text("aé", min_size=1, max_size=5) | st.text("abé😀", min_size=1, max_size=5), max_size=4)
cut_lists = st.lists(st.integers(0, 1000), max_size=10)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return what a client sees of a whole text: up to the stop string that is complete first, longest first."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(edges)]


@given(texts, stop_lists, st.booleans(), cut_lists)
def test_any_cut_equals_a_stop_search_in_the_whole_text(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    detokenizer = Detokenizer(BYTES.stream(), stops, include)

    given = "".join([detokenizer.feed(chunk) for chunk in chunks(BYTES.encode(text), cuts)]) + detokenizer.finish()

    assert (given, detokenizer.stopped) == reference(text, stops, include)


@given(text=texts, stops=stop_lists, include=st.booleans(), cuts=cut_lists)
def test_any_cut_equals_the_whole_with_a_trained_tokenizer(
    tiny: HFTokenizer, text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    detokenizer = Detokenizer(tiny.stream(), stops, include)
    ids = tiny.encode(text, add_special_tokens=False)

    given = "".join([detokenizer.feed(chunk) for chunk in chunks(ids, cuts)]) + detokenizer.finish()

    assert (given, detokenizer.stopped) == reference(text, stops, include)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES.stream(), stops)
    given = ""

    for end, char in enumerate(text, start=1):
        given += detokenizer.feed(list(char.encode()))
        if detokenizer.stopped is not None:
            break

        sofar = text[:end]
        held = sofar[len(given) :]
        hopeful = [n for n in range(1, end + 1) if any(len(s) > n and s.startswith(sofar[-n:]) for s in stops)]
        assert sofar == given + held
        assert len(held) == max(hopeful, default=0)


@given(texts, stop_lists, cut_lists)
def test_the_token_that_completes_the_stop_string_is_counted_as_used(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(BYTES.stream(), stops)
    used = 0

    for chunk in chunks(BYTES.encode(text), cuts):
        detokenizer.feed(chunk)
        if detokenizer.stopped is not None:
            used += detokenizer.stop_token_index
            break
        used += len(chunk)

    upto, stop = reference(text, stops, True)
    assert detokenizer.stopped == stop
    assert used == len(upto.encode())


def test_a_stop_string_split_over_two_feeds_is_found() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["STOP"])

    given = [detokenizer.feed(list(b"one ST")), detokenizer.feed(list(b"OP two")), detokenizer.finish()]

    assert given == ["one ", "", ""]
    assert detokenizer.stopped == "STOP"
    assert detokenizer.stop_token_index == 2


def test_a_false_stop_prefix_is_released_as_soon_as_known() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["STOP"])

    given = [detokenizer.feed(list(piece)) for piece in (b"ST", b"ST", b"ART")]

    assert given == ["", "ST", "START"]


def test_a_stop_string_that_begins_again_within_itself_is_found() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["aabaaa"])

    given = [detokenizer.feed([byte]) for byte in b"aabaabaaa!"]

    assert "".join(given) == "aab"
    assert detokenizer.stopped == "aabaaa"


def test_held_back_text_is_released_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["STOP"])

    assert detokenizer.feed(list(b"a STO")) == "a "
    assert detokenizer.finish() == "STO"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped is None


def test_no_text_follows_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["."], include_stop=True)

    assert detokenizer.feed(list(b"a.b")) == "a."
    assert detokenizer.feed(list(b"c.d")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.stop_token_index == 2


def test_an_incomplete_character_at_the_end_can_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES.stream(), ["\ufffd"])

    assert detokenizer.feed([*b"a", 0xE4]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "\ufffd"
    assert detokenizer.stop_token_index == 0


def test_text_without_stop_strings_passes_through() -> None:
    detokenizer = Detokenizer(BYTES.stream())

    assert detokenizer.feed([*b"ab", 0xC3]) == "ab"
    assert detokenizer.feed([0xA9, EOS]) == "é"
    assert detokenizer.feed([0xC3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.stopped is None


def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Detokenizer(BYTES.stream(), ["a", ""])

    assert caught.value.field == "stop"
