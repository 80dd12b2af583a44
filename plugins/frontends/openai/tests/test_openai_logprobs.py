"""Log-probabilities stand beside the text they belong to, however the engine cuts its answer into items."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from dynamo_core import (
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    Tokenizer,
    TopLogprob,
)
from dynamo_generation.answers.render import Collected, Identity
from dynamo_generation.choices.choice import Piece, TokenChoice
from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
from dynamo_plugin_frontend_openai.render_completions import CompletionRenderer
from dynamo_testing.tiny_model import END_OF_TURN, START_OF_TURN, make_tokenizer_folder
from dynamo_text import load_tokenizer
from dynamo_text.byte_tokenizer import BOS, EOS, ByteTokenizer
from dynamo_text.hf_tokenizer import HFTokenizer
from hypothesis import given
from hypothesis import strategies as st

IDENTITY = Identity("id", 1, "m")


@dataclass
class Asked:
    """What of a request matters here."""

    stop: list[str] = field(default_factory=list)
    skip: bool | None = None
    include_stop: bool = False
    min_tokens: int | None = None
    hidden: tuple[int, ...] = ()

    def request(self) -> PreprocessedRequest:
        return PreprocessedRequest(
            token_ids=[1],
            stop_conditions=StopConditions(
                stop=self.stop or None, min_tokens=self.min_tokens, stop_token_ids_hidden=list(self.hidden) or None
            ),
            sampling_options=SamplingOptions(include_stop_str_in_output=self.include_stop),
            output_options=OutputOptions(logprobs=1, skip_special_tokens=self.skip),
        )


def items(token_ids: Sequence[int], cuts: Sequence[int], *, named: bool = True) -> list[LLMEngineOutput]:
    """Return the answer of an engine in pieces of these sizes; the last, if `named`, says why it ends."""
    sizes, at, made = list(cuts), 0, []
    while at < len(token_ids):
        part = list(token_ids[at : at + (sizes.pop(0) if sizes else 4)])
        scores = [-0.1 - (at + offset) for offset in range(len(part))]
        tops = [[TopLogprob(token, score, 1)] for token, score in zip(part, scores, strict=True)]
        made.append(LLMEngineOutput(part, log_probs=scores, top_logprobs=tops))
        at += len(part)
    if named:
        made.append(LLMEngineOutput(finish_reason=FinishReason.LENGTH))
    return made


def pieces(asked: Asked, outputs: Sequence[LLMEngineOutput], tokenizer: Tokenizer) -> list[Piece]:
    """Return what a choice makes of the items."""
    choice = TokenChoice(0, asked.request(), tokenizer)
    made = [
        Piece(choice, choice.feed(output), choice.scored, None, choice.finish_reason is not None)
        for output in outputs
        if choice.finish_reason is None
    ]
    if choice.finish_reason is None:
        made.append(Piece(choice, choice.end(), choice.scored, None, True))
    return made


def told(made: Sequence[Piece]) -> tuple[str, list[tuple[int, float, int]]]:
    """Return the whole text, and every told token with its score and its offset."""
    text = "".join(piece.text for piece in made)
    tokens = [
        entry
        for piece in made
        if piece.scored is not None
        for entry in zip(piece.scored.token_ids, piece.scored.log_probs, piece.scored.offsets, strict=True)
    ]
    return text, tokens


def characters(data: bytes) -> int:
    """Return how many characters these bytes make for certain."""
    return len(codecs.getincrementaldecoder("utf-8")("replace").decode(data))


#: Letters, parts of characters, bytes that are no text, and tokens that are not shown.
BYTES = st.lists(st.sampled_from([*b"ab", *"é".encode(), *"😀".encode(), 0xFF, BOS]) | st.integers(0, 255), max_size=25)
STOPS = st.lists(st.sampled_from(["a", "ab", "bab", "é", "b😀", "\ufffd", "aé"]), max_size=2)


@given(
    token_ids=BYTES,
    cuts=st.lists(st.integers(1, 5), max_size=20),
    stop=STOPS,
    skip=st.sampled_from([None, True, False]),
    include_stop=st.booleans(),
    min_tokens=st.sampled_from([None, 3]),
    named=st.booleans(),
)
def test_scores_keep_step_with_the_text_however_it_is_cut(
    token_ids: list[int],
    cuts: list[int],
    stop: list[str],
    skip: bool | None,
    include_stop: bool,
    min_tokens: int | None,
    named: bool,
) -> None:
    tokenizer = ByteTokenizer()
    asked = Asked(stop, skip, include_stop, min_tokens)

    made = pieces(asked, items(token_ids, cuts, named=named), tokenizer)

    text, tokens = told(made)
    assert (text, tokens) == told(pieces(asked, items(token_ids, [1] * len(token_ids)), tokenizer))
    shown = [tokenizer.token_bytes(token) for token, _, _ in tokens]
    whole = b"".join(shown).decode(errors="replace")
    # Where a broken character ends only shows with the token after it, which then counts as beginning there.
    assert whole == text or (stop and "\ufffd" in text and whole.startswith(text))
    assert [offset for _, _, offset in tokens] == [characters(b"".join(shown[:at])) for at in range(len(shown))]
    given_so_far = 0
    for piece in made:
        given_so_far += len(piece.text)
        if piece.scored is not None and not piece.last:
            assert max(piece.scored.offsets) < given_so_far


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("model"), vocab_size=900)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer = load_tokenizer("hf", files)
    assert isinstance(tokenizer, HFTokenizer)
    return tokenizer


TEXTS = st.lists(
    st.sampled_from(["ba", "ke ", "你好", "日本", "👍🏽", "é", " x", "мир", START_OF_TURN, END_OF_TURN]), max_size=9
)


@given(
    parts=TEXTS,
    cuts=st.lists(st.integers(1, 6), max_size=15),
    stop=st.lists(st.sampled_from(["a", "ke", "好", "ра", "e 你", "👍"]), max_size=2),
    include_stop=st.booleans(),
    skip=st.booleans(),
)
def test_scores_keep_step_with_the_text_of_a_trained_vocabulary(
    trained: HFTokenizer, parts: list[str], cuts: list[int], stop: list[str], include_stop: bool, skip: bool
) -> None:
    token_ids = trained.encode("".join(parts), add_special_tokens=False)
    asked = Asked(stop, skip, include_stop)

    text, tokens = told(pieces(asked, items(token_ids, cuts), trained))

    assert (text, tokens) == told(pieces(asked, items(token_ids, [1] * len(token_ids)), trained))
    shown = [trained.token_bytes(token) for token, _, _ in tokens]
    whole = b"".join(shown).decode(errors="replace")
    offsets = [offset for _, _, offset in tokens]
    # A stop string may begin within a token; that one is told whole.
    assert whole.startswith(text)
    assert all(offset < len(text) for offset in offsets)
    assert offsets == [characters(b"".join(shown[:at])) for at in range(len(shown))]
    if not stop:
        assert whole == text


def test_a_token_waits_until_it_is_certain_that_its_text_is_no_stop_string() -> None:
    first, second, third, _ = pieces(Asked(["bcd"]), items(b"abcxy", [2, 1, 2]), ByteTokenizer())

    assert (first.text, first.scored and first.scored.token_ids) == ("a", [97])
    assert (second.text, second.scored) == ("", None)
    assert (third.text, third.scored and list(third.scored.offsets)) == ("bcxy", [1, 2, 3, 4])


def test_logprobs_omit_tokens_of_a_hidden_stop_string() -> None:
    def tokens(include: bool) -> bytes:
        return bytes(
            token for token, _, _ in told(pieces(Asked(["bc"], include_stop=include), made, ByteTokenizer()))[1]
        )

    made = items(b"abcd", [1, 1, 1, 1])

    assert tokens(False) == b"a"
    assert tokens(True) == b"abc"


def test_logprobs_omit_end_and_hidden_tokens() -> None:
    made = items([97, BOS, 98, EOS, 99], [5])

    assert [entry[0] for entry in told(pieces(Asked(hidden=(EOS,)), made, ByteTokenizer()))[1]] == [97, 98]
    shown = told(pieces(Asked(skip=False), made, ByteTokenizer()))
    assert shown[0] == "a<s>b</s>c"
    assert [entry[2] for entry in shown[1]] == [0, 1, 4, 5, 9]


def test_items_without_scores_are_left_out_and_count_all_the_same() -> None:
    outputs = [LLMEngineOutput([97, 98]), *items(b"c", [1])]

    assert told(pieces(Asked(), outputs, ByteTokenizer())) == ("abc", [(99, -0.1, 2)])


@given(token_ids=BYTES, cuts=st.lists(st.integers(1, 5), max_size=20), stop=STOPS)
def test_a_whole_answer_is_its_stream_put_together(token_ids: list[int], cuts: list[int], stop: list[str]) -> None:
    tokenizer = ByteTokenizer()
    for renderer in (
        ChatRenderer(IDENTITY, 1, tokenizer, logprobs=True),
        CompletionRenderer(IDENTITY, [""], tokenizer, logprobs=True),
    ):
        made = pieces(Asked(stop), items(token_ids, cuts), tokenizer)
        collected = Collected(made[-1].choice)
        stream = b""
        for piece in made:
            stream += renderer.piece(piece)
            renderer.add(collected, piece)
        whole = json.loads(b"".join(renderer.body([collected], {}, None)))["choices"][0]

        chunks = [json.loads(item[6:])["choices"][0] for item in stream.split(b"\n\n") if item]
        scores = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
        if "message" in whole:
            assert "".join(chunk["delta"]["content"] for chunk in chunks) == whole["message"]["content"]
        else:
            assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        joined = {name: [entry for part in scores for entry in part[name] or ()] for name in (scores or [{}])[0]}
        expected = {name: value or [] for name, value in (whole["logprobs"] or {}).items()}
        assert joined == expected


async def test_a_token_that_is_part_of_a_character_is_shown_by_its_bytes(server: Any, model: Any) -> None:
    def script(call: Any) -> None:
        first, second = "é".encode()
        tops = [[TopLogprob(first, -0.5, 1), TopLogprob(0xE2, -2.0, 2)], [TopLogprob(second, -0.5, 1)]]
        call.put(LLMEngineOutput([first, second], log_probs=[-0.5, -0.5], top_logprobs=tops))
        call.finish()

    model.script = script

    text = (await server.complete(logprobs=2)).json()["choices"][0]
    chat = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]

    assert text["text"] == "é"
    assert text["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert text["logprobs"]["text_offset"] == [0, 0]
    # Two alternatives that are no text on their own stay two.
    assert text["logprobs"]["top_logprobs"][0] == {"bytes:\\xc3": -0.5, "bytes:\\xe2": -2.0}
    assert [entry["bytes"] for entry in chat["logprobs"]["content"]] == [[0xC3], [0xA9]]
