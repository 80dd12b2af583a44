"""The short ways give what the long ways give, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from dynamo_core import (
    CompletionUsage,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    StopConditions,
)
from dynamo_generation.answers.plain_path import PlainPath
from dynamo_generation.answers.render import ChunkRenderer, Identity
from dynamo_generation.choices.choice import Choice, Piece, TokenChoice
from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
from dynamo_plugin_frontend_openai.render_completions import CompletionRenderer
from dynamo_text import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

CHAT = "/v1/chat/completions"
TOKENIZER = ByteTokenizer()
IDENTITY = Identity("chatcmpl-1", 1700000000, "m")
RENDERERS = (ChatRenderer(IDENTITY, 1, TOKENIZER), CompletionRenderer(IDENTITY, [""], TOKENIZER))

# Texts with quotes, controls and characters of several bytes, cut anywhere, and bytes that are no text at all.
TEXTS = st.text(max_size=12).map(lambda text: list(text.encode(errors="replace")))
TOKENS = st.lists(st.one_of(TEXTS, st.lists(st.integers(0, 255), max_size=5)), max_size=8)


class Book:
    """Counts what is shown."""

    def __init__(self) -> None:
        self.tokens = 0

    def output(self, tokens: int) -> None:
        self.tokens += tokens


def choice_for(**stop: Any) -> TokenChoice:
    return TokenChoice(0, PreprocessedRequest(token_ids=[1], stop_conditions=StopConditions(**stop)), TOKENIZER)


def plain_path(choices: Sequence[Choice], renderer: ChunkRenderer = RENDERERS[0], book: Any = None) -> PlainPath | None:
    counted: Any = Book() if book is None else book
    return PlainPath.of(choices, renderer, counted)


@pytest.mark.parametrize("renderer", RENDERERS)
@given(items=TOKENS)
def test_the_fast_path_makes_the_same_chunks_as_the_full_path(renderer: ChunkRenderer, items: list[list[int]]) -> None:
    long, short, book = choice_for(), choice_for(), Book()
    way = plain_path([short], renderer, book)
    assert way is not None

    for tokens in items:
        text = long.feed(LLMEngineOutput(tokens))
        expected = renderer.piece(Piece(long, text, long.scored, None, False))

        assert way.chunk([LLMEngineOutput(tokens)]) == expected

    assert short.completion_tokens == long.completion_tokens == book.tokens == sum(map(len, items))


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [LLMEngineOutput([65]), LLMEngineOutput([66])],
        [LLMEngineOutput([65], FinishReason.LENGTH)],
        [LLMEngineOutput([65], index=1)],
        [LLMEngineOutput([65], delta={"content": "x"})],
        [LLMEngineOutput([65], completion_usage=CompletionUsage())],
        [LLMEngineOutput([65, 7])],
    ],
)
def test_items_beyond_tokens_are_left_to_the_full_path(outputs: list[LLMEngineOutput]) -> None:
    choice, book = choice_for(stop_token_ids_hidden=[7]), Book()
    way = plain_path([choice], book=book)
    assert way is not None

    chunk = way.chunk(outputs)

    assert chunk is None
    assert choice.completion_tokens == book.tokens == 0
    assert choice.feed(LLMEngineOutput([66])) == "B"


@pytest.mark.parametrize(
    "choices",
    [
        [choice_for(stop=["x"])],
        [choice_for(min_tokens=3)],
        [TokenChoice(0, PreprocessedRequest(token_ids=[1], output_options=OutputOptions(logprobs=0)), TOKENIZER)],
        [choice_for(), choice_for()],
        [Choice(0)],
    ],
    ids=["stop string", "least tokens", "scores", "two choices", "text engine"],
)
def test_an_answer_with_extra_output_has_no_fast_path(choices: list[Choice]) -> None:
    assert plain_path(choices) is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_by_hand_equals_that_of_the_library(server: Any, model: Any, stream: bool) -> None:
    def answer(call: Any) -> None:
        call.say("Hel")
        call.finish(text="lo")

    model.script = answer
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}

    raw = await server.post(CHAT, body, x_request_id="mine")
    # One from another origin is marked, which is the library's part.
    by_library = await server.post(CHAT, body, x_request_id="mine", origin="https://elsewhere.example")

    for reply in (raw, by_library):
        assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", reply.headers.pop("date"))
    assert raw.headers.pop("content-length", None) == by_library.headers.pop("content-length", None)
    assert raw.headers == by_library.headers
    assert raw.status == by_library.status == 200
    assert raw.whole
    assert _without_id(raw.body) == _without_id(by_library.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_serves_one_answer_by_hand_after_the_other(server: Any, model: Any, stream: bool) -> None:
    model.script = lambda call: call.finish(text="A")
    connection = await server.connect()
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}

    replies = []
    for _ in range(3):
        connection.send(CHAT, body)
        replies.append(await connection.reply())

    assert [reply.status for reply in replies] == [200] * 3
    assert [_without_id(reply.body) for reply in replies] == [_without_id(replies[0].body)] * 3


async def test_connection_close_is_answered_and_honoured(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="A")
    connection = await server.connect()

    connection.send(CHAT, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}, connection="close")
    reply = await connection.reply()

    assert reply.headers["connection"] == "close"
    assert await connection.ended() == b""


def _without_id(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b"", re.sub(rb"chatcmpl-[0-9a-f-]+", b"", body))
