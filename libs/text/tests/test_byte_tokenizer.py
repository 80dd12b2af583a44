from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_text.byte_tokenizer import BOS, EOS, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

TOKENIZER = ByteTokenizer()

ids_with_strangers = st.lists(st.integers(-3, 300) | st.sampled_from([2**31, 2**64]))


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """Return `ids` in pieces, some of them empty."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [[], *(ids[start:end] for start, end in pairwise(edges)), []]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)

    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(ids_with_strangers, st.lists(st.integers(0, 1000)), st.booleans())
def test_streaming_any_cut_equals_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    stream = TOKENIZER.stream(skip_special_tokens=skip)

    texts = [stream.step(chunk) for chunk in chunked(ids, cuts)]

    assert "".join(texts) + stream.flush() == TOKENIZER.decode(ids, skip_special_tokens=skip)


def test_no_text_becomes_a_special_id() -> None:
    ids = TOKENIZER.encode("<s></s>", add_special_tokens=True)

    assert not {BOS, EOS} & set(ids)


def test_special_ids_are_left_out_unless_they_are_wanted() -> None:
    ids = [BOS, *b"hi", EOS]

    assert TOKENIZER.decode(ids) == "hi"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<s>hi</s>"


def test_a_character_is_given_only_when_it_is_whole() -> None:
    stream = TOKENIZER.stream()

    given = [stream.step([byte]) for byte in "a😀".encode()]

    assert given == ["a", "", "", "", "😀"]


def test_a_character_cut_off_at_the_end_becomes_one_replacement_character() -> None:
    stream = TOKENIZER.stream()

    given = stream.step(list("好".encode()[:2]))

    assert given == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidArgument, match=r"U\+D800 at character 2"):
        TOKENIZER.encode("ab\ud800")


def test_ids_may_come_as_an_array_of_wider_numbers() -> None:
    ids = array("I", [*b"hi"])

    assert TOKENIZER.decode(ids) == TOKENIZER.stream().step(ids) == "hi"


def test_a_text_longer_than_one_slice_is_encoded_whole() -> None:
    text = "0123456789é" * 60_000

    assert TOKENIZER.encode(text) == list(text.encode())


def test_token_bytes_covers_bytes_special_and_unknown_ids() -> None:
    assert TOKENIZER.token_bytes(0xE9) == b"\xe9"
    assert TOKENIZER.token_bytes(EOS) == b"</s>"
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size) == b""
    assert TOKENIZER.token_bytes(-1) == b""


def test_a_special_token_that_is_kept_shows_and_the_other_does_not() -> None:
    assert ByteTokenizer().stream(keep=frozenset({EOS})).step([BOS, 97, EOS]) == "a</s>"
    assert ByteTokenizer().stream(skip_special_tokens=False, keep=frozenset({EOS})).step([BOS, 97]) == "<s>a"
