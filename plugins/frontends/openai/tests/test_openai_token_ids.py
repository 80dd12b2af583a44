"""`return_token_ids`: the tokens of prompts and answers beside their text, as vLLM has it."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import FinishReason, LLMEngineOutput, Parsers
from dynamo_plugin_parsers_standard.json_formats import HermesParser

END = 257
PROMPT = list(b"user: Hi\nassistant: ")
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def saying(*pieces: bytes, end: bool = True) -> Any:
    """Return answers with tokens, piece by piece, and a token that ends it and has no text."""

    def script(call: Any) -> None:
        for piece in pieces:
            call.put(LLMEngineOutput(list(piece)))
        call.put(LLMEngineOutput([END] if end else [], FinishReason.EOS if end else FinishReason.LENGTH))
        call.complete()

    return script


def streamed(reply: Any, index: int = 0) -> list[int]:
    """Return the tokens of a choice, all chunks together; each chunk must have some, or say that it has none."""
    tokens: list[int] = []
    for event in reply.events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == index:
                tokens += choice["token_ids"]
    return tokens


async def test_a_chat_answer_has_its_tokens_and_those_of_the_prompt(server: Any, model: Any) -> None:
    model.script = saying(b"He", b"llo")

    answer = (await server.chat(return_token_ids=True)).json()

    assert answer["prompt_token_ids"] == PROMPT
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*b"Hello", END]]


async def test_a_chat_stream_has_the_prompts_tokens_in_its_first_chunk_and_others_in_each(
    server: Any, model: Any
) -> None:
    # A character of several tokens: some items show no text.
    model.script = saying(b"a", "é".encode()[:1], "é".encode()[1:])

    reply = await server.chat(stream=True, return_token_ids=True, stream_options={"include_usage": True})

    first, *others = reply.events
    assert first["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in str(event) for event in others)
    assert streamed(reply) == [*"aé".encode(), END]
    assert reply.text() == "aé"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_choices_of_a_completion_have_their_own_prompts(server: Any, model: Any, stream: bool) -> None:
    model.script = saying(b"x", b"y")

    reply = await server.complete(prompt=["Hi", "You"], n=2, return_token_ids=True, stream=stream)

    prompts = [list(b"Hi"), list(b"Hi"), list(b"You"), list(b"You")]
    if not stream:
        choices = reply.json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        assert [choice["token_ids"] for choice in choices] == [[*b"xy", END]] * 4
        return
    for index, prompt in enumerate(prompts):
        assert streamed(reply, index) == [*b"xy", END]
        own = [event["choices"][0] for event in reply.events[:-1] if event["choices"][0]["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [prompt] + [None] * (len(own) - 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{"stop": "lo"}, {"logprobs": True}, {"tools": TOOLS}], ids=str)
async def test_tokens_are_those_that_count(server: Any, model: Any, stream: bool, fields: dict[str, Any]) -> None:
    model.parsers = Parsers(tools=HermesParser)
    said = CALL.encode() if "tools" in fields else b"Hello you"
    rest = said[2:]
    model.puts(
        LLMEngineOutput(list(said[:2]), log_probs=[-1.0] * 2, top_logprobs=[[]] * 2),
        LLMEngineOutput(list(rest), FinishReason.LENGTH, log_probs=[-1.0] * len(rest)),
    )

    reply = await server.chat(return_token_ids=True, stream=stream, **fields)

    tokens = streamed(reply) if stream else reply.json()["choices"][0]["token_ids"]
    assert tokens == list(b"Hello" if "stop" in fields else said)
    if not stream:
        assert reply.json()["usage"]["completion_tokens"] == len(tokens)


@pytest.mark.parametrize("fields", [{}, {"return_token_ids": False}, {"return_token_ids": None}])
@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_are_not_there_unless_asked_for(server: Any, model: Any, stream: bool, fields: Any) -> None:
    model.script = saying(b"a")

    for reply in (await server.chat(stream=stream, **fields), await server.complete(stream=stream, **fields)):
        assert b"token_ids" not in reply.body
