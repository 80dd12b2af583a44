"""What a client is told it used: what was counted here, and what engines report where that can be true."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from dynamo_core import CompletionUsage, FinishReason

PROMPT = len("user: Hi\nassistant: ")


def usage(completion: int = 0, *, prompt: int = 0, cached: int | None = None) -> CompletionUsage:
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)


def saying(text: str, *counts: CompletionUsage) -> Any:
    """Answer, each with the next of the counts on its terminal."""
    left = list(counts)

    def script(call: Any) -> None:
        call.say(text, finish_reason=FinishReason.STOP, completion_usage=left.pop(0))
        call.complete()

    return script


async def told(server: Any, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Return the usage of an answer."""
    if not stream:
        usage: dict[str, Any] = (await server.chat(**fields)).json()["usage"]
        return usage
    reply = await server.chat(stream=True, stream_options={"include_usage": True}, **fields)
    last: dict[str, Any] = reply.events[-2]["usage"]
    return last


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_several_choices_share_is_cached_once(server: Any, model: Any, stream: bool) -> None:
    model.script = saying("x", usage(1, prompt=PROMPT, cached=16), usage(1, prompt=PROMPT, cached=12))

    answer = await told(server, stream=stream, n=2)

    # What one of them had to compute was not cached.
    assert answer["prompt_tokens_details"] == {"cached_tokens": 12}
    await server.record()
    assert server.metrics.registry.get_sample_value("dynamo_frontend_cached_tokens_sum", {"model": "m"}) == 12


async def test_cached_tokens_of_several_prompts_add_up(server: Any, model: Any) -> None:
    model.script = saying("x", *(usage(1, prompt=2, cached=cached) for cached in (2, 1, 1, 2)))

    answer = (await server.complete(prompt=["Hi", "Yo"], n=2)).json()["usage"]

    assert (answer["prompt_tokens"], answer["prompt_tokens_details"]) == (4, {"cached_tokens": 2})


@pytest.mark.parametrize("stream", [True, False])
async def test_a_plausible_engine_count_is_reported(server: Any, model: Any, stream: bool) -> None:
    # Such as tokens that ended the answer and are not sent.
    model.script = saying("abc", usage(4, prompt=PROMPT))

    answer = await told(server, stream=stream, max_tokens=9)

    assert answer == {"prompt_tokens": PROMPT, "completion_tokens": 4, "total_tokens": PROMPT + 4}


@pytest.mark.parametrize("stop", [{"stop": "b"}, {"stop_token_ids": [ord("b")]}], ids=["string", "token"])
async def test_the_engines_count_is_of_no_use_where_the_answer_ended_here(server: Any, model: Any, stop: Any) -> None:
    model.script = saying("abcdef", usage(6, prompt=PROMPT))

    assert (await told(server, stream=False, **stop))["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("reported", "fault"),
    [
        (usage(2), "2 completion tokens where 3 came"),
        (usage(-1), "-1 completion tokens where 3 came"),
        (usage(10), "10 completion tokens where at most 9 were asked for"),
        (usage(3, prompt=PROMPT + 1), f"{PROMPT + 1} prompt tokens where {PROMPT} were sent"),
        (usage(3, cached=PROMPT + 1), f"{PROMPT + 1} cached tokens of a prompt of {PROMPT}"),
        (usage(3, cached=-1), f"-1 cached tokens of a prompt of {PROMPT}"),
    ],
)
async def test_impossible_engine_counts_are_dropped_with_one_warning_per_worker(
    server: Any, model: Any, caplog: pytest.LogCaptureFixture, reported: CompletionUsage, fault: str
) -> None:
    model.script = saying("abc", reported, reported)

    with caplog.at_level(logging.WARNING):
        answers = [await told(server, stream=False, max_tokens=9) for _ in range(2)]

    own = {"prompt_tokens": PROMPT, "completion_tokens": 3, "total_tokens": PROMPT + 3}
    for answer in answers:
        cached = answer.pop("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]
        assert answer == own
        assert 0 <= cached <= PROMPT
    [warning] = [record.getMessage() for record in caplog.records if "completion_usage" in record.getMessage()]
    assert fault in warning
    assert "worker 0000000000000007" in warning


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_tokens_are_reported_after_a_stop_string(server: Any, model: Any, stream: bool) -> None:
    def script(call: Any) -> None:
        call.say("a", completion_usage=usage(1, prompt=PROMPT, cached=12))
        call.say("bc")

    model.script = script

    answer = await told(server, stream=stream, stop="b")

    assert answer["prompt_tokens_details"] == {"cached_tokens": 12}
    assert answer["completion_tokens"] == 2
