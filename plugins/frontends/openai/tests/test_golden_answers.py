"""Whole answers to the byte, and streams with scores, as they were before scores were rendered as they arrive.

`golden_answers.json` was written by the version before; ids and times are left out of the comparison.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import CompletionUsage, FinishReason, LLMEngineOutput, TopLogprob

GOLDEN: dict[str, str] = json.loads(Path(__file__).with_name("golden_answers.json").read_text())

CHAT, COMPLETE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
#: Numbers whose shortest forms differ from what other encoders write.
NUMBERS = (-0.5, 0.0, -1e-07, -123456.789, -2.0000000000000004, float("-inf"), -3e22, -1.5e300)
TALK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def scored(tokens: bytes, width: int = 2, start: int = 0, **fields: Any) -> LLMEngineOutput:
    """Return tokens with `width` alternatives each; one of them has the text of another."""
    numbers = [NUMBERS[(start + at) % len(NUMBERS)] for at in range(len(tokens))]
    tops = [
        [
            TopLogprob((token + 64 * rank) % 256, NUMBERS[(start + at + rank) % len(NUMBERS)], rank)
            for rank in range(width)
        ]
        for at, token in enumerate(tokens)
    ]
    return LLMEngineOutput(list(tokens), log_probs=numbers, top_logprobs=tops, **fields)


def speak(*outputs: LLMEngineOutput, reason: FinishReason | None = FinishReason.STOP) -> Callable[[Any], None]:
    def script(call: Any) -> None:
        for output in outputs:
            call.put(output)
        if reason is not None:
            call.put(LLMEngineOutput(finish_reason=reason))
        call.complete()

    return script


def slowly(*outputs: LLMEngineOutput) -> Callable[[Any], None]:
    """Return one item after the other, so that none is merged with the next."""

    def script(call: Any) -> None:
        left = [*outputs, LLMEngineOutput(finish_reason=FinishReason.STOP)]

        def put() -> None:
            call.put(left.pop(0))
            if left:
                asyncio.get_running_loop().call_later(0.03, put)
            else:
                call.complete()

        put()

    return script


WHOLE = speak(scored(b"Hello ", 3), scored("wörld 😀!".encode(), 4, 2), scored(b'"\\\n\x00\x7f', 1, 5), reason=None)
BROKEN = speak(scored(b"a\xff\xf0\x9f", 2), scored(b"", 0), scored(b"\x98\x80b\xe2", 2, 3), reason=FinishReason.LENGTH)
SOME = speak(LLMEngineOutput(list(b"ab")), scored(b"cd", 2), LLMEngineOutput([101], log_probs=[-1.0]))
NONE = speak(LLMEngineOutput(list(b"no scores")))
NOTHING = speak()
STOPPED = speak(scored(b"one ST", 2), scored(b"OP two", 2))
PIECES = slowly(
    scored(b"Hello ", 3), LLMEngineOutput(list(b"un")), scored("wörld 😀!".encode(), 4, 2), scored(b"\xf0", 1)
)
USAGE = speak(
    scored(b"x", 1),
    LLMEngineOutput(completion_usage=CompletionUsage(prompt_tokens=2, completion_tokens=1, total_tokens=3)),
)
CASES: dict[str, tuple[str, dict[str, Any], Callable[[Any], None]]] = {
    f"{kind} {name}": (path, {**body, **more}, script)
    for kind, path, body in (
        ("chat", CHAT, {**TALK, "logprobs": True, "top_logprobs": 4}),
        ("completion", COMPLETE, {"model": "m", "prompt": "Hi", "logprobs": 4}),
    )
    for name, more, script in (
        ("whole", {}, WHOLE),
        ("broken characters", {}, BROKEN),
        ("some scores", {}, SOME),
        ("no scores", {}, NONE),
        ("nothing", {}, NOTHING),
        ("a stop string", {"stop": ["STOP"]}, STOPPED),
        ("several choices", {"n": 3}, WHOLE),
        ("in pieces", {"stop": ["never", "!?"]}, PIECES),
        ("in pieces, streamed", {"stop": ["never", "!?"], "stream": True}, PIECES),
        ("usage", {}, USAGE),
        ("annotations", {"nvext": {"annotations": ["token_ids", "formatted_prompt"]}}, WHOLE),
        ("a stream", {"stream": True}, WHOLE),
        ("a stream of broken characters", {"stream": True}, BROKEN),
    )
} | {
    "chat without scores": (CHAT, TALK, WHOLE),
    "completion without scores": (COMPLETE, {"model": "m", "prompt": "Hi"}, WHOLE),
    "completion with echo": (COMPLETE, {"model": "m", "prompt": ["Hi", "Ho"], "echo": True}, WHOLE),
    "completion with the best of": (COMPLETE, {"model": "m", "prompt": "Hi", "best_of": 3, "logprobs": 1}, WHOLE),
    "completion with the best unscored": (COMPLETE, {"model": "m", "prompt": "Hi", "best_of": 2}, WHOLE),
    "message": (MESSAGES, {**TALK, "max_tokens": 50}, WHOLE),
    "response": (RESPONSES, {"model": "m", "input": "Hi"}, WHOLE),
}

TEXTS: list[dict[str, Any]] = [
    {"content": [{"token": "a", "logprob": -1.0, "more": [1, None]}], "refusal": None},
    {"content": None},
    {"content": [{"token": "é", "logprob": -1e-9}]},
]
LISTS: list[dict[str, Any]] = [
    {"tokens": ["a"], "token_logprobs": [-1.0]},
    {"tokens": ["b"], "text_offset": [1]},
    {"token_logprobs": None},
]


def of_texts(scores: list[dict[str, Any]]) -> Callable[[Any], None]:
    return speak(
        LLMEngineOutput(text="a", text_logprobs=scores[0]),
        LLMEngineOutput(delta={"content": "b", "reasoning_content": "c"}, text_logprobs=scores[1]),
        LLMEngineOutput(text="", text_logprobs=scores[2]),
        LLMEngineOutput(text="d"),
    )


TEXT_CASES = {
    "chat of a text engine": (CHAT, {**TALK, "logprobs": True}, of_texts(TEXTS)),
    "completion of a text engine": (COMPLETE, {"model": "m", "prompt": "Hi", "logprobs": 1}, of_texts(LISTS)),
    "completion of a text engine, streamed": (
        COMPLETE,
        {"model": "m", "prompt": "Hi", "logprobs": 1, "stream": True},
        of_texts(LISTS),
    ),
    "chat of a text engine, unasked": (CHAT, {**TALK, "stream": True}, of_texts(TEXTS)),
    "chat of a text engine, streamed": (CHAT, {**TALK, "logprobs": True, "stream": True}, of_texts(TEXTS)),
}


def without_identity(body: bytes) -> str:
    text = re.sub(r"\b(chatcmpl-|cmpl-|msg_|resp_)[0-9a-f-]{36}", r"\1ID", body.decode())
    return re.sub(r'"(created|created_at)":\d+', r'"\1":0', text)


@pytest.mark.parametrize("name", CASES)
async def test_an_answer_has_the_bytes_that_it_had(server: Any, model: Any, name: str) -> None:
    path, body, script = CASES[name]
    model.script = script

    reply = await server.post(path, body)

    assert reply.status == 200, reply.body
    assert without_identity(reply.body) == GOLDEN[name]


@pytest.mark.parametrize("name", TEXT_CASES)
async def test_an_answer_of_an_engine_that_takes_text_has_the_bytes_that_it_had(cold_server: Any, name: str) -> None:
    path, body, script = TEXT_CASES[name]
    cold_server.add_model(model_input="text", capabilities=[]).script = script
    await cold_server.start()

    reply = await cold_server.post(path, body)

    assert reply.status == 200, reply.body
    assert without_identity(reply.body) == GOLDEN[name]
