"""Chunks become items: text as text, everything else as deltas, the usage on the last terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_core import BackendError, FinishReason, LLMEngineOutput
from dynamo_plugin_engine_upstream.response import ResponseReader, ServerError
from hypothesis import given
from hypothesis import strategies as st


def read(*chunks: dict[str, Any], choices: int = 1) -> list[LLMEngineOutput]:
    answer = ResponseReader(choices)
    return [item for chunk in chunks for item in answer.read(json.dumps(chunk).encode())] + answer.end()


def choice(finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "finish_reason": finish} | more]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def test_reasoning_text_and_calls_come_in_this_order_and_the_role_and_nothing_are_left_out() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    delta = {"role": "assistant", "tool_calls": [call], "content": "so", "reasoning": "hm", "refusal": None}

    *items, last = read(choice(delta=delta), choice("tool_calls", delta={"content": "", "tool_calls": []}), USAGE)

    assert [(item.text, item.delta) for item in items] == [
        (None, {"reasoning_content": "hm"}),
        ("so", None),
        (None, {"tool_calls": [call]}),
    ]
    assert last.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("reason", ["stop", "length", "content_filter"])
def test_the_reason_of_the_server_is_kept_and_the_usage_is_its_own(reason: str) -> None:
    (last,) = read(choice(reason, delta={}, stop_reason="###"), USAGE)

    assert last.finish_reason is FinishReason(reason)
    assert last.stop_reason == "###"
    assert last.completion_usage is not None
    assert (last.completion_usage.prompt_tokens, last.completion_usage.completion_tokens) == (3, 2)


def test_completions_have_text_and_their_logprobs_go_with_it() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [0]}

    item, _ = read(choice(text="a", logprobs=logprobs), choice("stop", text=""))

    assert (item.text, item.text_logprobs) == ("a", logprobs)


def test_logprobs_of_a_token_without_text_are_not_lost() -> None:
    item, _ = read(choice(delta={"content": ""}, logprobs={"content": [{"token": ""}]}), choice("stop", delta={}))

    assert item.text == ""
    assert item.text_logprobs == {"content": [{"token": ""}]}


@given(st.lists(st.sampled_from([0, 1, 2]), max_size=20), st.permutations([0, 1, 2]))
def test_each_choice_has_one_terminal_and_the_usage_is_counted_once(said: list[int], ends: list[int]) -> None:
    chunks = [choice(index=index, delta={"content": "x"}) for index in said]
    items = read(*chunks, *(choice("stop", index=index, delta={}) for index in ends), USAGE, choices=3)

    terminals = [item for item in items if item.finish_reason is not None]
    assert [item.index for item in terminals] == ends
    assert items[-1] is terminals[-1]
    assert [item.completion_usage is not None for item in terminals] == [False, False, True]
    assert [item.index for item in items if item.text] == said


def test_usage_in_every_chunk_is_passed_on_with_it() -> None:
    first, last = read(choice(delta={"content": "a"}) | {"usage": USAGE["usage"]}, choice("stop", delta={}))

    assert first.completion_usage is not None
    assert last.completion_usage is not None


def test_usage_in_every_chunk_of_several_choices_is_counted_once() -> None:
    usage = {"usage": USAGE["usage"]}
    chunks = [choice(index=index, delta={"content": "a"}) | usage for index in (0, 1)]
    ends = [choice("stop", index=index, delta={}) | usage for index in (0, 1)]

    items = read(*chunks, *ends, choices=2)

    assert [item.completion_usage is not None for item in items] == [False, False, False, True]


def test_an_ended_choice_may_be_repeated_without_content_while_others_go_on() -> None:
    empty = choice(index=1, delta={"content": ""})

    items = read(choice("stop", index=1, delta={}), empty, choice("stop", delta={}), choices=2)

    assert [item.index for item in items] == [1, 0]


def test_a_done_choice_without_a_finish_reason_has_stopped() -> None:
    answer = ResponseReader(2)
    items = answer.read(json.dumps(choice(delta={"content": "whole"})).encode())
    items += answer.read(json.dumps(choice("length", index=1, delta={"content": "cut"})).encode())
    items += answer.read(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}')
    items += answer.end(done=True)

    reasons = {item.index: item.finish_reason for item in items if item.finish_reason is not None}
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
    assert items[-1].finish_reason is not None
    assert items[-1].completion_usage is not None
    assert answer.complete


def test_a_done_answer_with_a_missing_choice_is_incomplete() -> None:
    answer = ResponseReader(2)
    answer.read(json.dumps(choice(delta={"content": "whole"})).encode())

    with pytest.raises(BackendError.StreamIncomplete, match="before the answer was complete"):
        answer.end(done=True)


@pytest.mark.parametrize("data", [b"{", b"7", b'{"choices":[{"index":9,"delta":{}}]}', b'{"choices":[3]}'])
def test_a_malformed_chunk_ends_the_answer(data: bytes) -> None:
    with pytest.raises(BackendError.StreamIncomplete):
        ResponseReader(1).read(data)


def test_text_after_the_end_of_a_choice_is_refused_and_an_empty_repetition_is_not() -> None:
    answer = ResponseReader(1)
    answer.read(json.dumps(choice("stop", delta={})).encode())

    assert answer.read(json.dumps(choice(delta={"content": ""})).encode()) == []
    with pytest.raises(BackendError.StreamIncomplete, match="was not asked for"):
        answer.read(json.dumps(choice(delta={"content": "more"})).encode())


def test_an_error_chunk_is_raised_with_its_message() -> None:
    with pytest.raises(ServerError) as caught:
        ResponseReader(1).read(b'{"error": {"message": "no", "code": 429}}')

    assert caught.value.error == {"message": "no", "code": 429}
