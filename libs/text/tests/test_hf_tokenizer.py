from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import StreamDecoder
from dynamo_core.errors import ConfigError, InvalidArgument
from dynamo_testing.tiny_model import make_tokenizer_folder
from dynamo_text.hf_tokenizer import HFTokenizer
from dynamo_text.library_stream import LibraryStream
from dynamo_text.token_pieces import PieceStream
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

MakeWords = Callable[[list[str], dict[str, Any] | None], HFTokenizer]

LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
GEMMA = {"type": "Sequence", "decoders": LLAMA["decoders"][:3]}
STRIP_TWO = {
    "type": "Sequence",
    "decoders": [*LLAMA["decoders"][:3], {"type": "Strip", "content": " ", "start": 2, "stop": 0}],
}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁hello", "hello", "▁wor", "ld", "你好", "👩‍🚀", "e\u0301", "▁a▁b", "."]

#: Whole texts that tokenizers find hard: joined emoji, combining marks, CJK, right-to-left, controls.
HARD = [
    "👩‍👩‍👧‍👦 👍🏽",
    "e\u0301a\u0308\u0323",
    "你好，世界。日本語",
    "مرحبا",
    "हिन्दी",
    "\x00\t\r\n\x7f",
    "\ufffd\ufffe",
    "  a   b ",
]


def test_a_file_that_makes_the_library_panic_is_a_broken_file() -> None:
    merges = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "####"}

    with pytest.raises(ConfigError, match=r"^tokenizer\.json cannot be read: the library tokenizers panicked: "):
        HFTokenizer({"tokenizer.json": json.dumps({"version": "1.0", "added_tokens": [], "model": merges}).encode()})


cuts = st.lists(st.integers(0, 1000), max_size=8)


def streamed(stream: StreamDecoder, ids: list[int], cuts: list[int]) -> str:
    """Return the whole text of a stream that gets `ids` in pieces, some of them empty."""
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [[], *(ids[start:end] for start, end in pairwise(edges)), []]
    return "".join([stream.step(piece) for piece in pieces]) + stream.flush()


def one_by_one(stream: StreamDecoder, ids: list[int]) -> str:
    return "".join([stream.step([token_id]) for token_id in ids]) + stream.flush()


@pytest.fixture(scope="module")
def library(tiny_files: dict[str, bytes]) -> Library:
    return Library.from_buffer(tiny_files["tokenizer.json"])


@given(text=st.text() | st.sampled_from(HARD), cuts=cuts)
def test_any_text_comes_back_from_byte_level_ids_however_they_are_cut(
    tiny: HFTokenizer, text: str, cuts: list[int]
) -> None:
    ids = tiny.encode(text, add_special_tokens=False)

    assert streamed(tiny.stream(), ids, cuts) == text
    assert tiny.decode(ids) == text


@given(ids=st.lists(st.integers(0, 4100)), cuts=cuts, skip=st.booleans())
def test_byte_level_streaming_equals_the_librarys_decode(
    tiny: HFTokenizer, library: Library, ids: list[int], cuts: list[int], skip: bool
) -> None:
    expected = library.decode(ids, skip_special_tokens=skip)

    assert streamed(tiny.stream(skip_special_tokens=skip), ids, cuts) == expected
    assert tiny.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text() | st.sampled_from(HARD), add=st.booleans())
def test_ids_are_those_of_the_library(tiny: HFTokenizer, library: Library, text: str, add: bool) -> None:
    assert tiny.encode(text, add_special_tokens=add) == library.encode(text, add_special_tokens=add).ids


def test_a_byte_level_stream_holds_back_an_incomplete_character_and_ends_it_as_decode_does(
    tiny: HFTokenizer, library: Library
) -> None:
    vocabulary = library.get_vocab()
    whole = [vocabulary[_byte_level(byte)] for byte in "\U0001fabf".encode()]
    stream = tiny.stream()

    held = [stream.step([token_id]) for token_id in whole[:3]]

    assert held == ["", "", ""]
    assert stream.flush() == library.decode(whole[:3]) == "\ufffd"
    assert one_by_one(tiny.stream(), whole) == "\U0001fabf"


def _byte_level(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    return chr(byte) if byte in printable else chr(256 + others.index(byte))


def test_ids_outside_the_vocabulary_are_left_out(tiny: HFTokenizer) -> None:
    ids = [-1, *tiny.encode("hi", add_special_tokens=False), tiny.vocab_size, 2**40]

    assert tiny.decode(ids) == "hi"
    assert one_by_one(tiny.stream(), ids) == "hi"
    assert tiny.token_bytes(-1) == tiny.token_bytes(2**40) == b""


def test_token_bytes_of_a_text_join_to_the_text(tiny: HFTokenizer) -> None:
    ids = tiny.encode("héllo 你好 🫠", add_special_tokens=False)

    assert b"".join(map(tiny.token_bytes, ids)).decode() == "héllo 你好 🫠"
    assert tiny.token_bytes(tiny.eos_token_ids[0]) == b"<|im_end|>"


def test_an_added_token_outside_the_byte_alphabet_is_literal(tiny_files: dict[str, bytes], library: Library) -> None:
    more = Library.from_str(library.to_str())
    more.add_tokens(["two words", "日"])
    tokenizer = HFTokenizer({**tiny_files, "tokenizer.json": more.to_str().encode()})

    ids = tokenizer.encode("a two words 日b", add_special_tokens=False)

    assert more.token_to_id("two words") in ids
    assert one_by_one(tokenizer.stream(), ids) == tokenizer.decode(ids) == more.decode(ids) == "a two words 日b"


def test_special_tokens_show_only_where_they_are_wanted(tiny: HFTokenizer) -> None:
    ids = tiny.encode("<|im_start|>user")

    assert tiny.decode(ids) == "user"
    assert tiny.decode(ids, skip_special_tokens=False) == "<|begin|><|im_start|>user"


# Vocabularies of the SentencePiece family


@given(
    ids=st.lists(st.integers(0, len(WORDS) + 1), max_size=12),
    cuts=cuts,
    decoder=st.sampled_from([LLAMA, GEMMA, STRIP_TWO, METASPACE, {**METASPACE, "prepend_scheme": "never"}]),
    skip=st.booleans(),
)
@example(ids=[1, 5, 5], cuts=[1], decoder=METASPACE, skip=True)
@example(ids=[99, 4, 5], cuts=[1, 2], decoder=METASPACE, skip=False)
@example(ids=[1, 3, 3, 5], cuts=[1, 2, 3], decoder=STRIP_TWO, skip=True)
@example(ids=[6, 5], cuts=[1], decoder=LLAMA, skip=True)
def test_sentencepiece_streaming_equals_the_librarys_decode(
    make_word_tokenizer: MakeWords, ids: list[int], cuts: list[int], decoder: dict[str, Any], skip: bool
) -> None:
    tokenizer = make_word_tokenizer(WORDS, decoder)
    expected = tokenizer._library.decode(ids, skip_special_tokens=skip)

    assert streamed(tokenizer.stream(skip_special_tokens=skip), ids, cuts) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text() | st.sampled_from(HARD), cuts=cuts)
def test_a_text_in_byte_tokens_comes_back_however_they_are_cut(
    make_word_tokenizer: MakeWords, text: str, cuts: list[int]
) -> None:
    tokenizer = make_word_tokenizer([*WORDS, *BYTE_TOKENS], GEMMA)
    ids = [len(WORDS) + byte for byte in text.encode()]

    assert tokenizer._library.decode(ids) == text
    assert streamed(tokenizer.stream(), ids, cuts) == text
    assert tokenizer.token_bytes(len(WORDS) + 0xE4) == b"\xe4"


@given(ids=st.lists(st.integers(0, len(WORDS) + 255), max_size=12), cuts=cuts, skip=st.booleans())
def test_broken_byte_token_streaming_equals_our_decode(
    make_word_tokenizer: MakeWords, ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = make_word_tokenizer([*WORDS, *BYTE_TOKENS], LLAMA)

    assert streamed(tokenizer.stream(skip_special_tokens=skip), ids, cuts) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


def test_a_whole_character_survives_a_broken_one_after_it(make_word_tokenizer: MakeWords) -> None:
    tokenizer = make_word_tokenizer([*WORDS, *BYTE_TOKENS], LLAMA)
    ids = [len(WORDS) + byte for byte in "😀".encode() + b"\xe4\xbd"]

    assert one_by_one(tokenizer.stream(), ids) == tokenizer.decode(ids) == "😀\ufffd"


# Decoders that do not work token by token


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        WORDPIECE,
        {"type": "BPEDecoder", "suffix": "</w>"},
        {
            "type": "Sequence",
            "decoders": [*LLAMA["decoders"][:3], {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
        },
        {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
    ],
)
def test_other_decoders_are_left_to_the_library(make_word_tokenizer: MakeWords, decoder: dict[str, Any] | None) -> None:
    tokenizer = make_word_tokenizer(WORDS, decoder)

    assert isinstance(tokenizer.stream(), LibraryStream)


@given(ids=st.lists(st.integers(0, 11), max_size=12), cuts=cuts, skip=st.booleans())
@example(ids=[3, 4, 9], cuts=[], skip=True)
@example(ids=[9, 9, 4, 10], cuts=[], skip=True)
def test_wordpiece_streaming_equals_the_librarys_decode(
    make_word_tokenizer: MakeWords, ids: list[int], cuts: list[int], skip: bool
) -> None:
    vocabulary = ["[UNK]", "<s>", "</s>", "hello", "##ing", "你", "##é", ".", "'s", "##\ufffd", "\ufffd"]
    tokenizer = make_word_tokenizer(vocabulary, WORDPIECE)
    expected = tokenizer._library.decode(ids, skip_special_tokens=skip)

    assert streamed(tokenizer.stream(skip_special_tokens=skip), ids, cuts) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text(), cut=st.integers(0, 20), cuts=cuts)
def test_the_library_stream_equals_token_wise_decoding(tiny: HFTokenizer, text: str, cut: int, cuts: list[int]) -> None:
    ids = tiny.encode(text, add_special_tokens=False)
    ids = ids[: max(0, len(ids) - cut)]

    given = streamed(LibraryStream(tiny._library, tiny._is_text), ids, cuts)

    assert given == tiny.decode(ids)


def test_a_library_stream_that_loses_its_prefix_goes_on_without_losing_text(make_word_tokenizer: MakeWords) -> None:
    # An "a" at the end is decoded as "b", so the text of the first token is not the beginning of what comes later.
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "Fuse"}, {"type": "Replace", "pattern": {"Regex": "a$"}, "content": "b"}],
    }
    tokenizer = make_word_tokenizer(["<unk>", "xa", "c", "d"], decoder)

    given = one_by_one(tokenizer.stream(), [1, 2, 3])

    assert given == "xbcd"


def test_thousands_of_skipped_tokens_do_not_pile_up_in_a_library_stream(make_word_tokenizer: MakeWords) -> None:
    tokenizer = make_word_tokenizer(WORDS, WORDPIECE)
    stream = tokenizer.stream()

    assert stream.step([2] * 100_000) == ""
    assert isinstance(stream, LibraryStream)
    assert not stream._pending


@given(ids=st.lists(st.integers(0, 20), max_size=12), cuts=cuts, keep=st.frozensets(st.integers(0, 3)))
@pytest.mark.parametrize(
    "decoder", [LLAMA, STRIP_TWO, METASPACE, WORDPIECE], ids=["llama", "strip", "metaspace", "library"]
)
def test_special_tokens_that_are_kept_are_those_that_show_and_the_others_do_not(
    make_word_tokenizer: MakeWords, ids: list[int], cuts: list[int], keep: frozenset[int], decoder: dict[str, Any]
) -> None:
    tokenizer = make_word_tokenizer(WORDS, decoder)
    shown = [token_id for token_id in ids if token_id not in tokenizer._special or token_id in keep]

    text = streamed(tokenizer.stream(keep=keep), ids, cuts)

    assert text == streamed(tokenizer.stream(skip_special_tokens=False), shown, cuts)
    everything = streamed(tokenizer.stream(skip_special_tokens=False, keep=keep), ids, cuts)
    assert everything == streamed(tokenizer.stream(skip_special_tokens=False), ids, cuts)


def test_token_wise_decoding_is_used_for_byte_level_tokenizers(tiny: HFTokenizer) -> None:
    assert isinstance(tiny.stream(), PieceStream)


# Special ids and files


def with_file(files: dict[str, bytes], name: str, content: Any) -> dict[str, bytes]:
    return {**files, name: json.dumps(content).encode()}


def test_end_ids_are_gathered_from_all_files_without_doubles(tiny: HFTokenizer) -> None:
    assert tiny.bos_token_id == 0
    assert tiny.eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("generation_config.json", {"eos_token_id": 7}, (7,)),
        ("generation_config.json", {"eos_token_id": [7, 8, 7]}, (7, 8)),
        ("config.json", {"eos_token_id": 9}, (9,)),
        ("config.json", {"text_config": {"eos_token_id": [5]}}, (5,)),
        ("tokenizer_config.json", {"eos_token": "<|end|>"}, (2,)),
        ("tokenizer_config.json", {"eos_token": {"content": "<|end|>"}}, (2,)),
        ("special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}}, (1,)),
        ("config.json", {"eos_token_id": None}, ()),
        ("config.json", {"eos_token_id": [10**9, -1, True, "x"]}, ()),
    ],
)
def test_each_file_may_name_the_end_ids(
    tiny_files: dict[str, bytes], name: str, content: Any, expected: tuple[int, ...]
) -> None:
    only = {"tokenizer.json": tiny_files["tokenizer.json"]}

    assert HFTokenizer(with_file(only, name, content)).eos_token_ids == expected


def test_truncation_in_the_file_is_disabled(tiny_files: dict[str, bytes], library: Library) -> None:
    library.enable_truncation(max_length=3)
    files = {**tiny_files, "tokenizer.json": library.to_str().encode()}
    library.no_truncation()

    ids = HFTokenizer(files).encode("one two three four five six seven")

    assert len(ids) > 3


def test_a_lone_surrogate_is_refused(tiny: HFTokenizer) -> None:
    with pytest.raises(InvalidArgument, match=r"lone surrogate U\+DFFF at character 0"):
        tiny.encode("\udfff")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has no tokenizer\.json"),
        ({"tokenizer.json": b"{"}, r"tokenizer\.json cannot be read"),
        ({"tokenizer.json": b"\xff\xfe"}, r"tokenizer\.json cannot be read"),
        ({"tokenizer.json": b'{"model": 1}'}, r"tokenizer\.json cannot be read"),
    ],
)
def test_a_missing_or_broken_tokenizer_file_is_one_line(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HFTokenizer(files)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]"])
def test_a_broken_companion_file_is_named(tiny_files: dict[str, bytes], content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^generation_config\.json "):
        HFTokenizer({**tiny_files, "generation_config.json": content})


def test_a_missing_library_error_has_the_remedy(tiny_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_library(name: str, *args: Any, **options: Any) -> Any:
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_library)

    with pytest.raises(ConfigError, match=r"pip install 'dynamo-text\[hf\]'"):
        HFTokenizer(tiny_files)


def test_the_tiny_model_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = make_tokenizer_folder(tmp_path / "a", seed=1), make_tokenizer_folder(tmp_path / "b", seed=1)

    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (first, second)]

    assert contents[0] == contents[1]
    assert json.loads(contents[0]["config.json"])["vocab_size"] == 4000


def test_the_tiny_model_has_a_chat_template_that_renders(tiny_files: dict[str, bytes], tiny: HFTokenizer) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = json.loads(tiny_files["tokenizer_config.json"])["chat_template"]
    template = ImmutableSandboxedEnvironment().from_string(source)

    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)

    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.encode(text, add_special_tokens=False).count(tiny.eos_token_ids[0]) == 1
