"""Remembered ids are those that the tokenizer gives, whatever the text and the tokenizer."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_text import encode as encode_module
from dynamo_text.byte_tokenizer import ByteTokenizer
from dynamo_text.encode import INLINE, encode_async
from dynamo_text.hf_tokenizer import HFTokenizer
from dynamo_text.load import load_tokenizer
from dynamo_text.prefix_cache import TokenCacheStore
from dynamo_text.split_pattern import ends_words
from dynamo_text.text_splitter import TextSplitter
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

MB = 1 << 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = [
    "the one and the other and one of the two words, it's the user's own word 's 1234 12 1,000\n\n",
    "then another one there; other words there are two or one\n  and more  of them. The User AND I'll",
    "une épée, ÉTÉ né e\u0301t e\u0301 naïve façade über straße 你好 世界 日本語 мир мы 😀 👍🏽",
] * 20

# Three splits as in tokenizers that are in use.
LETTERS_AND_THREE_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s"
)
BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKS_FIRST = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def trained(
    pre_tokenizer: Any,
    normalizer: Any = None,
    *,
    post: Any = None,
    added: list[AddedToken] | None = None,
    bare: bool = False,
    trainer: Any = None,
    **model: Any,
) -> Library:
    """Return a BPE tokenizer whose merges come from `CORPUS`.

    `bare`: without the pre-tokenizer that it was trained with.
    """
    library = Library(models.BPE(**model))
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    special = SPECIAL + (BYTES if model.get("byte_fallback") else [])
    library.train_from_iterator(
        CORPUS,
        trainer
        or trainers.BpeTrainer(
            vocab_size=len(special) + 700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if bare:
        library.pre_tokenizer = None
    if added:
        library.add_tokens(added)
    library.post_processor = post or processors.TemplateProcessing(
        single="<s> $A </s>", pair="$A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return library


def byte_level(pattern: str | None = None, *before: Any, prefix: bool = False) -> Any:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    return pre_tokenizers.Sequence([*before, split, last])


def llama(**more: Any) -> Library:
    """Return a converted SentencePiece tokenizer: no pre-tokenizer, a block before each piece and for each space."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="never")
    return trained(metaspace, normalizer, bare=True, byte_fallback=True, unk_token="<s>", fuse_unk=True, **more)


def gemma(pre_tokenizer: Any) -> Library:
    """Return a tokenizer as newer ones are converted: a block per space, a pre-tokenizer unknown in training."""
    library = trained(
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        normalizers.Replace(" ", "▁"),
        byte_fallback=True,
        unk_token="<s>",
        fuse_unk=True,
    )
    library.pre_tokenizer = pre_tokenizer
    return library


def wordpiece() -> Library:
    library = Library(models.WordPiece(unk_token="<s>"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    library.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return library


def unigram() -> Library:
    library = Library(models.Unigram())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return library


def odd_tokens(**flags: bool) -> list[AddedToken]:
    return [
        AddedToken("one", normalized=False, **flags),
        AddedToken("[mask]", normalized=False, **flags),
        AddedToken("word,", normalized=True, **flags),
    ]


LOWER = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])

#: What makes each tokenizer, and whether its words' ends are safe places.
MADE: dict[str, tuple[Callable[[], Library], bool]] = {
    "byte level": (lambda: trained(byte_level()), True),
    "byte level with a space in front": (lambda: trained(byte_level(prefix=True)), True),
    "letters and three digits": (lambda: trained(byte_level(LETTERS_AND_THREE_DIGITS), normalizers.NFC()), True),
    "possessive": (lambda: trained(byte_level(POSSESSIVE)), True),
    "a split that asks for the end": (lambda: trained(byte_level(POSSESSIVE + r"|\s++$")), False),
    "by case": (lambda: trained(byte_level(BY_CASE)), True),
    "several splits": (
        lambda: trained(
            byte_level(
                MARKS_FIRST,
                pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
                pre_tokenizers.Split(Regex("[一-龥぀-ゟ゠-ヿ]+"), "isolated"),
            )
        ),
        True,
    ),
    "whitespace": (lambda: trained(pre_tokenizers.Whitespace(), LOWER, unk_token="<s>"), True),
    "digits before byte level": (
        lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level()]), normalizers.NFKC()),
        True,
    ),
    "metaspace always": (lambda: trained(pre_tokenizers.Metaspace(), unk_token="<s>"), True),
    "metaspace first": (lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first"), unk_token="<s>"), True),
    "metaspace never": (lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="never"), unk_token="<s>"), True),
    "metaspace without split": (
        lambda: trained(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), unk_token="<s>"),
        False,  # merges over spaces
    ),
    "llama": (llama, True),
    "llama with merges over spaces": (
        lambda: trained(
            None,
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            byte_fallback=True,
            unk_token="<s>",
        ),
        False,
    ),
    "llama with words as tokens": (lambda: llama(added=odd_tokens()), False),
    "llama with a normalized token": (lambda: llama(added=[AddedToken("<tool>", normalized=True)]), True),
    "gemma": (lambda: gemma(pre_tokenizers.Split(" ", "merged_with_previous")), True),
    "gemma in fixed lengths": (lambda: gemma(pre_tokenizers.FixedLength(3)), False),
    "normalized tokens": (
        lambda: trained(byte_level(), LOWER, added=[AddedToken("<Tool>", normalized=True), *odd_tokens()]),
        True,
    ),
    "tokens that take spaces to the left": (lambda: trained(byte_level(), LOWER, added=odd_tokens(lstrip=True)), True),
    "tokens that take spaces to the right": (lambda: trained(byte_level(), added=odd_tokens(rstrip=True)), False),
    "tokens that are words": (
        lambda: trained(byte_level(), added=[AddedToken("x>", normalized=False), *odd_tokens(single_word=True)]),
        True,
    ),
    "a token of two words": (
        lambda: trained(byte_level(), added=[AddedToken("one and", normalized=False)]),
        False,
    ),
    "tokens that clash": (
        lambda: trained(
            byte_level(),
            added=[
                AddedToken(text, normalized=False)
                for text in ("<|im_start|>the", "|><s>", "</s></s>", "<|", "<<", "other<|im_end|>", "the<")
            ],
        ),
        True,
    ),
    "stripped pieces": (lambda: trained(byte_level(), normalizers.Strip()), False),
    "fixed lengths": (lambda: trained(pre_tokenizers.FixedLength(3), unk_token="<s>"), False),
    "a split that looks ahead": (lambda: trained(byte_level(r"\w+(?=\s+the)|\w+|\W")), False),
    "a split that takes two words": (lambda: trained(byte_level(r"\w+ and|\w+|\W")), False),
    "wordpiece": (wordpiece, True),
    "unigram": (unigram, True),
}


def hf(library: Library, memory: TokenCacheStore | None = None) -> HFTokenizer:
    return HFTokenizer({"tokenizer.json": library.to_str().encode()}, memory)


@cache
def library_of(name: str) -> Library:
    return MADE[name][0]()


@cache
def pair(name: str, piece: int) -> tuple[HFTokenizer, HFTokenizer]:
    """Return the tokenizer that cuts no text, and one that remembers texts of over `piece` characters."""
    library = library_of(name)
    plain, cached = hf(library), hf(library, TokenCacheStore(MB // 4))
    plain._pieces.splitter = TextSplitter()
    cached._pieces.splitter.piece = piece
    return plain, cached


FRAGMENTS = [
    *("the", "one", "and", "other", "word", "words,", "a", "z", "The", "AND", "it's", "'s", "'S", "ſ", "K", "İ", "ς"),
    *(" ", " ", " ", "  ", "   ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "▁", "Ġ", "_", ".", ",", "<", "|"),
    *(
        "12",
        "1234",
        "½",
        "é",
        "e\u0301",
        "\u0301",
        "\u0308",
        "ñ",
        "你好",
        "日",
        "мир",
        "ты",
        "한",
        "😀",
        "👩\u200d🚀",
        "\x00",
        "\ufffd",
    ),
    *(
        *SPECIAL,
        "<|im_start|>user\n",
        "<|im_",
        "end|>",
        "<Tool>",
        "<tool>",
        "x>",
        "onex>",
        "[mask]",
        "<0x41>",
        "<<",
        "</s></s></s>",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)
made = pytest.mark.parametrize("name", MADE)


@made
@given(text=texts, piece=st.sampled_from([1, 5, 20]), special=st.booleans())
def test_ids_are_the_same_with_and_without_a_memory(name: str, text: str, piece: int, special: bool) -> None:
    plain, cached = pair(name, piece)
    expected = plain.encode(text, add_special_tokens=special)

    # For the first time, from its pieces, and as a whole.
    for _ in range(3):
        assert cached.encode(text, add_special_tokens=special) == expected


@made
@given(begin=texts, ends=st.lists(texts, min_size=2, max_size=4))
def test_texts_that_begin_alike_get_their_own_ids(name: str, begin: str, ends: list[str]) -> None:
    plain, cached = pair(name, 5)

    for end in ends:
        assert cached.encode(begin + end) == plain.encode(begin + end)


@made
def test_a_real_conversation_gets_the_same_ids(name: str) -> None:
    plain, cached = pair(name, 64)
    text = ""
    for turn in range(12):
        text += f"<|im_start|>user\n{CORPUS[turn % 3]}<|im_end|>\n<|im_start|>assistant\n{CORPUS[0]} the {turn}"
        assert cached.encode(text) == plain.encode(text)


@made
def test_words_are_cut_apart_only_where_that_is_known_to_be_safe(name: str) -> None:
    _, cached = pair(name, 1)

    pieces = cached._pieces.splitter.pieces("one and the other")

    assert (len(pieces) > 1) is MADE[name][1]


@pytest.mark.parametrize("name", ["byte level", "metaspace first", "llama", "fixed lengths", "stripped pieces"])
def test_every_tokenizer_is_cut_before_special_tokens(name: str) -> None:
    _, cached = pair(name, 1)

    pieces = cached._pieces.splitter.pieces("A<|im_start|>B<|im_end|>")

    assert pieces == ["A", "<|im_start|>B", "<|im_end|>"]


def test_a_special_token_that_others_hold_or_overlap_is_not_a_place_to_cut() -> None:
    _, cached = pair("tokens that clash", 1)

    pieces = cached._pieces.splitter.pieces("A<|im_start|>the<|im_end|>A<s>A</s>A")

    assert pieces == ["A<|im_start|>the<|im_end|>A<s>A</s>A"]


def test_spare_tokens_are_not_looked_for() -> None:
    added = [AddedToken(text, normalized=False) for text in ("<spare_1>", "<used>")]
    cached = hf(trained(byte_level(), added=added), TokenCacheStore(MB))
    cached._pieces.splitter.piece = 1

    assert cached._pieces.splitter.pieces("A<spare_1>A<used>A") == ["A<spare_1>A", "<used>A"]


# Splitting patterns


@pytest.mark.parametrize(
    ("pattern", "space", "expected"),
    [
        (LETTERS_AND_THREE_DIGITS, " ", True),
        (BY_CASE, " ", True),
        (MARKS_FIRST, " ", True),
        (POSSESSIVE, " ", True),
        (POSSESSIVE + r"|\s++$", " ", None),
        (r"\p{N}{1,3}", " ", False),
        (r"[一-龥぀-ゟ゠-ヿ]+", " ", False),
        (r"\w+|[^\w\s]+", " ", True),
        (r"\p{Lu}+|\s", " ", False),  # small letters are between the matches
        (r"\p{L}\p{L}+|\s", " ", False),  # one letter alone is
        (r"\p{L}?+\p{L}|\s", " ", False),  # what is possessive does not give back
        (r"\p{L}+(?!\p{L})| ", " ", False),
        (r"\p{L}+\s?", " ", None),
        (r"(?: ?\p{L}+)+", " ", None),
        (r"\S+(?!\S)", " ", False),
        (r"\S+(?!\s)", " ", None),
        (r"\p{L}+(?=\s)|\s", " ", None),
        (r"(?<=a)b|\p{L}+", " ", None),
        (r"\b\w+\b", " ", None),
        (r"\p{L}*", " ", None),
        (r"(\p{L})\1", " ", None),
        (r"[a-m]|[n-z]", " ", False),
        (r"[a-z]+|[^a-z]+", " ", True),
        (r"[^b-z]+", " ", None),
        (r"[\p{L}&&[a-c]]+", " ", None),
        (r"\p{Unheard}+", " ", None),
        (r"[^\s\p{L}]+|\p{L}+", "▁", True),
        (r"\S+", "▁", None),
        (r"(?i:[A-Z])+ ?", " ", None),
        (r"\p{L}{1,2}+|\s", " ", True),
        (r"\p{L}{2}|\s", " ", False),
        (r"\p{L}{2}?|\s", " ", None),  # "twice, or not at all" to some, "lazily twice" to others
        ("(", " ", None),
        ("[]a]", " ", None),
        ("a{,2}", " ", None),
    ],
)
def test_a_splitting_pattern_is_analyzed_at_word_ends(pattern: str, space: str, expected: bool | None) -> None:
    assert ends_words(pattern, space) is expected


_chars = st.sampled_from(
    [
        *"ab -'.1\n",
        r"\s",
        r"\S",
        r"\w",
        r"\p{L}",
        r"\P{L}",
        r"\p{Lu}",
        r"[^\s\p{L}]",
        r"[^a-z]",
        "[a-c ]",
        r"\p{N}",
        "(?i:A)",
    ]
)
_atoms = st.recursive(
    _chars,
    lambda parts: (
        st.lists(parts, min_size=1, max_size=3).map(lambda some: "(?:" + "|".join(some) + ")")
        | st.lists(parts, min_size=1, max_size=2).map(lambda some: "(?:" + "".join(some) + ")")
        | st.tuples(
            parts.map("(?:{})".format),
            st.sampled_from(["?", "*", "+", "?+", "*+", "++", "+?", "{1,2}", "{2}", "{1,3}+"]),
        ).map("".join)
    ),
    max_leaves=6,
)
_steps = _atoms | st.sampled_from([r"(?!\S)", "(?!a)"])
_patterns = st.lists(st.lists(_steps, min_size=1, max_size=3).map("".join), min_size=1, max_size=4).map("|".join)


_parts = st.text("abzA 1.'\n-é", max_size=12)


@given(pattern=_patterns, left=_parts, letter=st.sampled_from("abz"), right=_parts)
def test_the_analysis_of_any_pattern_agrees_with_the_library(pattern: str, left: str, letter: str, right: str) -> None:
    says = ends_words(pattern, " ")
    if says is None:
        return
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    before, after = left + letter, " " + right

    def edges(part: str, offset: int = 0) -> set[int]:
        return {offset + edge for _, offsets in split.pre_tokenize_str(part) for edge in offsets}

    whole = edges(before + after)

    assert whole | {len(before)} == edges(before) | edges(after, len(before))
    assert not says or len(before) in whole


# Memory


def test_a_callers_change_of_its_ids_does_not_reach_the_cache(tiny_files: dict[str, bytes]) -> None:
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(MB))
    for text in ("short", "a long text " * 500):
        expected = HFTokenizer(tiny_files).encode(text)

        tokenizer.encode(text).clear()
        tokenizer.encode(text).append(7)

        assert tokenizer.encode(text) == expected


def test_two_models_never_share_ids(tiny_files: dict[str, bytes]) -> None:
    memory = TokenCacheStore(MB)
    shifted = json.loads(tiny_files["tokenizer.json"])
    vocabulary: dict[str, int] = shifted["model"]["vocab"]
    shifted["model"]["vocab"] = {token: index if index < 4 else 4003 - index for token, index in vocabulary.items()}
    files = {**tiny_files, "tokenizer.json": json.dumps(shifted).encode()}
    one, other = HFTokenizer(tiny_files, memory), HFTokenizer(files, memory)
    text = "words and more words " * 200

    assert one.encode(text) == HFTokenizer(tiny_files).encode(text)
    assert other.encode(text) == HFTokenizer(files).encode(text) != one.encode(text)


def test_special_tokens_are_part_of_the_cache_key(tiny_files: dict[str, bytes]) -> None:
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(MB))
    bos = tokenizer.bos_token_id

    for text in ("short", "a long text " * 500):
        for _ in range(2):
            assert tokenizer.encode(text) == [bos, *tokenizer.encode(text, add_special_tokens=False)]


@given(sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2000), st.integers(0, 50)), max_size=80))
def test_the_memory_holds_the_last_used_and_never_more_than_its_limit(sizes: list[tuple[int, int, int]]) -> None:
    levels: list[float] = []
    memory = TokenCacheStore(8000, level=levels.append)
    owner = memory.owner()
    last: dict[str, tuple[int, ...]] = {}

    for number, length, count in sizes:
        text, ids = f"{number:02}" + "x" * length, tuple(range(count))
        known = memory.get(owner, text) is not None
        if known or memory.put(owner, text, ids) <= 2000:
            last.pop(text, None)
            last[text] = memory.get(owner, text) or ()
        assert memory.size <= 8000
        assert memory.size == sum(size for _, size in memory._entries.values())
        assert list(memory._entries) == [(owner, kept) for kept in last][-len(memory._entries) :]
    assert not levels or levels[-1] == memory.size


def test_a_text_that_would_fill_the_memory_leaves_most_of_it(tiny_files: dict[str, bytes]) -> None:
    memory = TokenCacheStore(400_000)
    tokenizer = HFTokenizer(tiny_files, memory)
    tokenizer.encode("remember me")
    hits = memory.hits

    tokenizer.encode(" ".join(f"number{number} and other words" for number in range(20_000)))
    tokenizer.encode("remember me")

    assert memory.hits == hits + 1
    assert 0 < memory.size <= 110_000


def test_pieces_that_are_used_again_stay(tiny_files: dict[str, bytes]) -> None:
    some = [" ".join(f"{first}{number} word" for number in range(900)) for first in "abcde"]
    one = TokenCacheStore(MB)
    HFTokenizer(tiny_files, one).encode(some[0])
    # One more than there is room for, as the one that comes again is kept whole too.
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(one.size * 11 // 2))

    for at in (0, 1, 2, 3, 0, 4):
        tokenizer.encode(some[at])

    left = [work.left for text in some if (work := tokenizer.begin(text)) is not None]
    assert left[1] > 0
    assert left[0] == left[2] == left[3] == left[4] == 0


@pytest.mark.parametrize("special", [False, True])
def test_a_repeated_long_text_is_one_lookup(tiny_files: dict[str, bytes], special: bool) -> None:
    memory = TokenCacheStore(MB)
    tokenizer = HFTokenizer(tiny_files, memory)
    text = "these are words that stay " * 400
    expected = HFTokenizer(tiny_files).encode(text, add_special_tokens=special)
    looked: list[int] = []

    for _ in range(4):
        before = memory.hits + memory.misses
        assert tokenizer.encode(text, add_special_tokens=special) == expected
        looked.append(memory.hits + memory.misses - before)

    assert looked[0] == looked[1] > 8
    assert looked[2:] == [1, 1]


def test_a_text_found_whole_is_a_new_list_each_time(tiny_files: dict[str, bytes]) -> None:
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(MB))
    text = "these are words that stay " * 400
    for _ in range(3):
        expected = tokenizer.encode(text)

    tokenizer.encode(text).clear()

    assert tokenizer.encode(text) == expected


def test_a_text_is_kept_whole_only_once_it_has_come_again(tiny_files: dict[str, bytes]) -> None:
    memory = TokenCacheStore(MB)
    tokenizer = HFTokenizer(tiny_files, memory)
    text = "these are words that stay " * 400

    tokenizer.encode(text)
    pieces = memory.size
    tokenizer.encode(text + "and go on")
    assert memory.size < pieces * 1.2

    tokenizer.encode(text)
    assert memory.size > pieces * 1.5


def test_a_conversation_is_tokenized_from_where_it_went_on(tiny_files: dict[str, bytes]) -> None:
    counted = {"hits": 0.0, "misses": 0.0}

    def count(name: str) -> Callable[[float], None]:
        def add(amount: float) -> None:
            counted[name] += amount

        return add

    memory = TokenCacheStore(MB, hit=count("hits"), miss=count("misses"))
    tokenizer = HFTokenizer(tiny_files, memory)
    said = "<|im_start|>user\n" + "these are words that stay " * 400

    tokenizer.encode(said)
    first = memory.misses
    work = tokenizer.begin(said + "and more<|im_end|>\n<|im_start|>assistant\n")

    assert first > 8
    assert memory.hits == first - 1  # the last piece goes on
    assert work is not None
    assert work.left < 600
    assert counted == {"hits": memory.hits, "misses": memory.misses}


def test_a_lone_surrogate_is_reported_by_its_position_in_the_whole_text(tiny_files: dict[str, bytes]) -> None:
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(MB))
    text = "these are words that stay " * 400
    tokenizer.encode(text)

    with pytest.raises(InvalidArgument, match=f"at character {len(text)}"):
        tokenizer.encode(text + "\ud800")
    with pytest.raises(InvalidArgument, match="at character 1"):
        tokenizer.encode("a\ud800")


def test_a_model_that_draws_lots_is_not_remembered() -> None:
    library = trained(byte_level())
    library.model.dropout = 0.5
    memory = TokenCacheStore(MB)
    tokenizer = hf(library, memory)

    tokenizer.encode("the other words")

    assert tokenizer.begin("the other words") is None
    assert memory.size == 0


@pytest.mark.parametrize(
    "post",
    [
        processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
        processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing("<s> $A", "$A $B", [("<s>", 0)])]),
        processors.TemplateProcessing("$A <s> $A", "$A $B", [("<s>", 0)]),
        processors.Sequence(
            [
                processors.TemplateProcessing("<s> $A", "$A $B", [("<s>", 0)]),
                processors.TemplateProcessing("$A </s>", "$A $B", [("</s>", 1)]),
            ]
        ),
        processors.ByteLevel(),
    ],
)
def test_ids_around_a_text_are_those_of_the_tokenizer(post: Any) -> None:
    library = trained(byte_level(), post=post)
    text = "one and the other " * 200
    cached = hf(library, TokenCacheStore(MB))

    for _ in range(2):
        assert cached.encode(text) == hf(library).encode(text)
        assert cached.encode("one") == hf(library).encode("one")


def test_threads_that_share_a_memory_get_the_right_ids(tiny_files: dict[str, bytes]) -> None:
    memory = TokenCacheStore(60_000)  # so small that what one thread reads another pushes out
    plain, tokenizer = HFTokenizer(tiny_files), HFTokenizer(tiny_files, memory)
    some = [f"{number} and some words " * (number * 9) for number in range(1, 40)]
    expected = [plain.encode(text) for text in some]

    with ThreadPoolExecutor(4) as threads:
        rounds = [threads.submit(lambda: [tokenizer.encode(text) for text in some]) for _ in range(12)]
        results = [each.result(60) for each in rounds]

    assert all(result == expected for result in results)
    assert memory.size == sum(size for _, size in memory._entries.values()) <= 60_000


# On the event loop


class Watched(HFTokenizer):
    """Tells in which threads something was tokenized."""

    def __init__(self, files: dict[str, bytes], memory: TokenCacheStore) -> None:
        self.threads: list[int] = []
        super().__init__(files, memory)

    def _encode_many(self, texts: Any, add_special_tokens: bool) -> list[list[int]]:
        self.threads.append(threading.get_ident())
        return super()._encode_many(texts, add_special_tokens)


async def test_a_long_text_is_tokenized_in_a_thread_once_and_then_answered_at_once(
    tiny_files: dict[str, bytes],
) -> None:
    tokenizer = Watched(tiny_files, TokenCacheStore(MB))
    text = "these are words that stay " * 400
    here = threading.get_ident()

    first = await encode_async(tokenizer, text)
    pending = asyncio.ensure_future(encode_async(tokenizer, text))
    await asyncio.sleep(0)

    assert pending.done()
    assert await pending == first == HFTokenizer(tiny_files).encode(text)
    assert len(tokenizer.threads) == 1
    assert tokenizer.threads[0] != here


async def test_the_new_end_of_a_long_text_is_tokenized_at_once(tiny_files: dict[str, bytes]) -> None:
    tokenizer = Watched(tiny_files, TokenCacheStore(MB))
    text = "these are words that stay " * 400
    await encode_async(tokenizer, text)

    ids = await encode_async(tokenizer, text + "and an end")

    assert ids == HFTokenizer(tiny_files).encode(text + "and an end")
    assert tokenizer.threads[1:] == [threading.get_ident()]


async def test_a_text_too_long_to_be_looked_up_at_once_leaves_the_event_loop(
    tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "LOOK_UP", INLINE)
    tokenizer = Watched(tiny_files, TokenCacheStore(MB))
    text = "these are words that stay " * 400
    await encode_async(tokenizer, text)

    pending = asyncio.ensure_future(encode_async(tokenizer, text))
    await asyncio.sleep(0)

    assert not pending.done()
    assert await pending == HFTokenizer(tiny_files).encode(text)
    assert len(tokenizer.threads) == 1


def test_the_byte_tokenizer_needs_no_memory() -> None:
    memory = TokenCacheStore(MB)
    tokenizer = load_tokenizer("bytes", {}, memory)

    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.encode("a" * 5000) == [97] * 5000
    assert memory.size == 0


def test_pieces_of_a_text_are_the_text(tiny_files: dict[str, bytes]) -> None:
    tokenizer = HFTokenizer(tiny_files, TokenCacheStore(MB))
    text = "<|im_start|>user\n" + "these are words that stay " * 400 + "<|im_end|>"

    pieces = tokenizer._pieces.splitter.pieces(text)

    assert "".join(pieces) == text
    assert all(512 <= len(piece) < 600 for piece in pieces[:-1])
    assert all(before[-1].isalpha() and after[0] in " <" for before, after in pairwise(pieces))
