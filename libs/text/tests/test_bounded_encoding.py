"""Long texts: a bound on their tokens that is never too high, and encoding in parts that stops where it must."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_text import piecewise_encoding
from dynamo_text.encode import encode_async
from dynamo_text.encode_limit import EncodeLimit, TextTooLong
from dynamo_text.hf_tokenizer import HFTokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from libs.text.tests.test_prefix_cache import (
    FRAGMENTS,
    LETTERS_AND_THREE_DIGITS,
    LOWER,
    MADE,
    byte_level,
    hf,
    library_of,
    llama,
    made,
    texts,
    trained,
)

MB = 1 << 20


@cache
def large_vocabulary() -> Library:
    """Return a byte-level tokenizer of over 100,000 entries, with runs of 128 spaces as large vocabularies have."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    tokens = dict.fromkeys(["<s>", *alphabet])

    def add(left: str, right: str) -> None:
        if left + right not in tokens:
            tokens[left + right] = None
            merges.append((left, right))

    for char, power in product("Ġ-", range(7)):
        add(char * 2**power, char * 2**power)
    for left, right in product(alphabet, alphabet):
        add(left, right)
    pairs = [left + right for left, right in product("abcdefghijklmnopqrs", repeat=2)]
    for left, right in product(pairs, pairs):
        if len(tokens) > 110_000:
            break
        add(left, right)
    library = Library(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = byte_level(LETTERS_AND_THREE_DIGITS)
    return library


#: Tokenizers of the three kinds that most models have.
KINDS: dict[str, Callable[[], Library]] = {
    "byte level": lambda: trained(byte_level()),
    "SentencePiece-like": llama,
    "large vocabulary": large_vocabulary,
}
# It takes seconds to make the last one.
kinds = pytest.mark.parametrize(
    "kind", ["byte level", "SentencePiece-like", pytest.param("large vocabulary", marks=pytest.mark.full)]
)


@cache
def of_kind(kind: str) -> tuple[Library, HFTokenizer]:
    library = KINDS[kind]()
    return library, hf(library)


@cache
def both(name: str) -> tuple[Library, HFTokenizer]:
    library = library_of(name)
    return library, hf(library)


class Seen:
    """What a tokenizer hands to its library from here on."""

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.texts: list[str] = []
        self._encode = tokenizer._encode_many
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        tokenizer._pieces._encode = self

    def __call__(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        self.texts += texts
        self.begun.set()
        assert self.gate.wait(10)
        return self._encode(texts, add_special_tokens)

    @property
    def characters(self) -> int:
        return sum(map(len, self.texts))


_parts = st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"])
sentences = st.lists(st.sampled_from(["the", "one", "word,", "12", "\n", "<|im_end|>", "épée"])).map(" ".join)
runs = st.builds(lambda part, count: part * count, _parts, st.integers(1, 200))


# The bound


@made
@given(text=texts | runs)
def test_a_text_has_at_least_as_many_tokens_as_its_bound(name: str, text: str) -> None:
    library, tokenizer = both(name)
    bound = tokenizer.token_bound

    if bound is not None:
        assert bound.at_least(bound.weight(text)) <= len(library.encode(text, add_special_tokens=False).ids)


@kinds
@example(text=" " * 384)
@example(text=" another" * 20)
@given(text=texts | runs)
def test_the_bound_holds_for_every_usual_kind(kind: str, text: str) -> None:
    library, tokenizer = of_kind(kind)
    bound = tokenizer.token_bound

    assert bound is not None
    assert bound.at_least(bound.weight(text)) <= len(library.encode(text, add_special_tokens=False).ids)


def words() -> Library:
    """Return a tokenizer to which any word but a letter is one unknown token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library = Library(models.WordLevel({char: number for number, char in enumerate(["<s>", *alphabet])}, "<s>"))
    library.pre_tokenizer = byte_level()
    return library


def replaced(pattern: Any, content: str) -> Library:
    return trained(byte_level(), normalizers.Replace(pattern, content))


@pytest.mark.parametrize(
    "make",
    [
        MADE["wordpiece"][0],
        MADE["unigram"][0],
        MADE["whitespace"][0],
        MADE["stripped pieces"][0],
        words,
        lambda: trained(None, unk_token="<s>", fuse_unk=True),
        lambda: trained(None),  # leaves out what it does not know
        lambda: replaced(Regex(" +"), " "),
        lambda: replaced("a", ""),
        lambda: trained(byte_level(), normalizers.BertNormalizer()),
        lambda: trained(byte_level(), normalizers.NFKC(), added=[AddedToken("x", normalized=True, rstrip=True)]),
        lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), byte_level()])),
    ],
)
def test_a_tokenizer_that_drops_or_fuses_text_has_no_bound(make: Callable[[], Library]) -> None:
    assert hf(make()).token_bound is None


def test_white_space_that_a_token_takes_with_it_does_not_count() -> None:
    library = trained(byte_level(), added=[AddedToken("<t>", normalized=False, lstrip=True, rstrip=True)])
    bound = hf(library).token_bound
    text = " \u3000\n" * 10_000 + "<t>" + " " * 10_000

    assert len(library.encode(text, add_special_tokens=False).ids) == 1
    assert bound is not None
    assert bound.at_least(bound.weight(text)) == 1
    # Where no such token stands, all of it does.
    assert bound.at_least(bound.weight(" " * 10_000)) > 100


def test_composed_characters_stay_within_the_bounds_bytes() -> None:
    bound = hf(trained(byte_level(), LOWER)).token_bound
    assert bound is not None
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    # Syllables of Hangul are composed by rule.
    composed = [char for char in characters if unicodedata.decomposition(char) or "가" <= char <= "힣"]
    decomposed = (4 * len(unicodedata.normalize("NFD", char)) / len(char.encode()) for char in composed)

    assert max(decomposed) * 4 <= bound.shrink
    assert all(unicodedata.normalize("NFKD", char) for char in composed)
    assert all(char.lower() for char in characters)


# Encoding in parts


@made
@given(text=texts | sentences, special=st.booleans())
def test_ids_of_parts_are_those_of_the_whole(name: str, text: str, special: bool) -> None:
    library, tokenizer = both(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piecewise_encoding, "BATCH", 8)
        patch.setattr(tokenizer._pieces.splitter, "piece", 1)
        ids = tokenizer.encode_within(text, EncodeLimit(10_000), add_special_tokens=special)

    assert ids == library.encode(text, add_special_tokens=special).ids


@kinds
def test_a_text_may_have_as_many_tokens_as_the_limit_and_no_more(kind: str) -> None:
    library, tokenizer = of_kind(kind)
    text = "the one and the other\n" * 8000 + "  12 " * 3000
    ids = library.encode(text, add_special_tokens=False).ids

    assert tokenizer.encode_within(text, EncodeLimit(len(ids)), add_special_tokens=False) == ids
    with pytest.raises(TextTooLong):
        tokenizer.encode_within(text, EncodeLimit(len(ids) - 1), add_special_tokens=False)


@pytest.mark.parametrize("name", ["wordpiece", "unigram", "byte level"])
def test_a_text_is_encoded_up_to_its_limit_however_long_it_is(name: str) -> None:
    tokenizer = hf(library_of(name))
    seen = Seen(tokenizer)
    # Without the bound, as where a tokenizer has none.
    tokenizer._pieces.bound = None
    read = []
    for size in (2 * MB, 4 * MB):
        with pytest.raises(TextTooLong):
            tokenizer.encode_within("the one and " * (size // 12), EncodeLimit(1000))
        read.append(seen.characters)
        seen.texts.clear()

    assert read[0] == read[1] < 2 * piecewise_encoding.BATCH


@pytest.mark.parametrize("name", ["byte level", "llama", "wordpiece", "unigram"])
def test_a_word_of_megabytes_is_refused_before_encoding(name: str) -> None:
    tokenizer = hf(library_of(name))
    seen = Seen(tokenizer)

    for char in ("a", " ", "\n", "7", "😀", "語"):
        with pytest.raises(TextTooLong):
            tokenizer.encode_within(char * (8 * MB), EncodeLimit(8000))

    assert not seen.texts


async def test_a_text_that_is_not_wanted_any_more_is_not_encoded_further() -> None:
    tokenizer = hf(library_of("byte level"))
    seen = Seen(tokenizer)
    seen.gate.clear()
    task = asyncio.create_task(encode_async(tokenizer, "the one and " * MB, limit=EncodeLimit(100 * MB)))
    assert await asyncio.to_thread(seen.begun.wait, 10)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    begun = len(seen.texts)
    seen.gate.set()
    # The one thread there is may do this only when it has done with the other.
    for _ in range(4):
        await encode_async(hf(library_of("byte level")), "the one and " * 1000)

    assert len(seen.texts) == begun


def test_a_late_lone_surrogate_is_reported_with_its_position() -> None:
    with pytest.raises(InvalidArgument, match=r"U\+D800 at character 240000"):
        hf(library_of("byte level")).encode("the one and " * 20_000 + "\ud800")


@made
@given(text=texts | sentences, most=st.integers(1, 30))
def test_the_beginning_of_a_text_has_its_first_tokens(name: str, text: str, most: int) -> None:
    library, tokenizer = both(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer._pieces.splitter, "piece", 1)
        begun = tokenizer.beginning(text, EncodeLimit(most))

    ids, expected = (library.encode(each, add_special_tokens=False).ids[:most] for each in (begun, text))
    assert text.startswith(begun)
    assert ids == expected
