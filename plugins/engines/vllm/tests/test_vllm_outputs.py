"""What vLLM gives out, as items of a stream."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from dynamo_core import BackendError, FinishReason, OutputOptions, PrefillResult, PreprocessedRequest, TopLogprob
from dynamo_plugin_engine_vllm import handoff
from dynamo_plugin_engine_vllm.outputs import MIN_LOGPROB, OutputConverter


def completion(tokens: list[int], reason: str | None = None, **more: Any) -> SimpleNamespace:
    told = {"index": 0, "logprobs": None, "cumulative_logprob": None, "stop_reason": None}
    return SimpleNamespace(**told | {"token_ids": tokens, "finish_reason": reason} | more)


def output(*completions: SimpleNamespace, cached: int | None = 0) -> SimpleNamespace:
    return SimpleNamespace(outputs=list(completions), num_cached_tokens=cached)


def answer(logprobs: int | None = None, **options: Any) -> OutputConverter:
    request = PreprocessedRequest(
        token_ids=[1, 2, 3], eos_token_ids=[99], output_options=OutputOptions(logprobs=logprobs)
    )
    return OutputConverter(request, **options)


def test_new_tokens_are_items_and_the_last_has_reason_and_usage() -> None:
    reading = answer()

    [first] = reading.items(output(completion([10, 11])))
    [last] = reading.items(output(completion([12], "length"), cached=2))

    assert (first.token_ids, first.finish_reason) == ([10, 11], None)
    assert (last.token_ids, last.finish_reason) == ([12], FinishReason.LENGTH)
    assert last.completion_usage is not None
    counts = last.completion_usage
    assert (counts.prompt_tokens, counts.completion_tokens, counts.total_tokens, counts.cached_tokens) == (3, 3, 6, 2)


def test_cached_tokens_are_reported_with_the_first_item() -> None:
    reading = answer()

    items = [*reading.items(output(completion([10, 11]), cached=2)), *reading.items(output(completion([12]), cached=2))]

    assert [item.completion_usage is not None for item in items] == [True, False]
    counts = items[0].completion_usage
    assert counts is not None
    assert (counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens) == (3, 2, 2)


def test_an_empty_output_makes_no_item() -> None:
    assert answer().items(output(completion([]))) == []


@pytest.mark.parametrize(
    ("told", "reason", "stop_reason"),
    [
        (completion([99], "stop"), FinishReason.EOS, None),
        (completion([99], "stop", stop_reason=99), FinishReason.EOS, None),
        (completion([7], "stop", stop_reason=7), FinishReason.STOP, 7),
        (completion([7], "repetition"), FinishReason.STOP, None),
        (completion([], "abort"), FinishReason.CANCELLED, None),
    ],
)
def test_reasons_have_our_names(told: SimpleNamespace, reason: FinishReason, stop_reason: int | None) -> None:
    [item] = answer().items(output(told))

    assert (item.finish_reason, item.stop_reason) == (reason, stop_reason)


def test_a_request_that_vllm_gave_up_is_an_error_after_which_another_worker_is_asked() -> None:
    with pytest.raises(BackendError.Disconnected, match="error"):
        answer().items(output(completion([], "error")))


def test_several_choices_are_counted_apart() -> None:
    reading = answer()

    reading.items(output(completion([10]), completion([20, 21], index=1)))
    items = reading.items(output(completion([11], "length"), completion([22], "length", index=1)))

    assert [(item.index, item.completion_usage.completion_tokens) for item in items if item.completion_usage] == [
        (0, 2),
        (1, 3),
    ]


def test_alternatives_are_the_likeliest_in_order_and_the_chosen_token_has_its_own_number() -> None:
    position = {
        5: SimpleNamespace(logprob=-4.0, rank=3),
        6: SimpleNamespace(logprob=-0.5, rank=1),
        7: SimpleNamespace(logprob=-math.inf, rank=2),
    }
    told = completion([5], logprobs=[position], cumulative_logprob=-4.0)

    [item] = answer(logprobs=2).items(output(told))

    assert item.log_probs == [-4.0]
    assert item.top_logprobs == [[TopLogprob(6, -0.5, 1), TopLogprob(7, MIN_LOGPROB, 2)]]
    assert item.cum_log_probs == -4.0


def test_with_no_alternatives_asked_for_only_the_chosen_tokens_have_numbers() -> None:
    told = completion([5], logprobs=[{5: SimpleNamespace(logprob=-1.0, rank=1)}])

    [item] = answer(logprobs=0).items(output(told))

    assert (item.log_probs, item.top_logprobs) == ([-1.0], [[]])


def test_a_stopped_request_reports_its_usage() -> None:
    reading = answer()
    reading.items(output(completion([10, 11])))

    item = reading.cancelled()

    assert item.finish_reason is FinishReason.CANCELLED
    assert item.completion_usage is not None
    assert item.completion_usage.completion_tokens == 2


def test_a_decode_worker_reports_the_prefill_workers_cached_tokens() -> None:
    result = PrefillResult(disaggregated_params={}, prompt_tokens_details={"cached_tokens": 64})
    request = PreprocessedRequest(token_ids=[1], prefill_result=result)
    reading = OutputConverter(request, handoff.cached_tokens(request))

    [item] = reading.items(output(completion([2], "length"), cached=128))

    assert item.completion_usage is not None
    assert item.completion_usage.cached_tokens == 64


def test_a_handoff_comes_back_as_it_was_given() -> None:
    params = {"remote_block_ids": ([1, 2],), "remote_port": 5600, "remote_engine_id": "x"}
    # Over the wire, as it goes between workers.
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(handoff.outgoing(params)))
    result = PrefillResult(disaggregated_params=travelled)

    taken = handoff.incoming(PreprocessedRequest(token_ids=[1], prefill_result=result))

    assert taken == {"remote_block_ids": [[1, 2]], "remote_port": 5600, "remote_engine_id": "x"}


def test_an_empty_handoff_is_accepted() -> None:
    result = PrefillResult(disaggregated_params=handoff.outgoing(None))

    assert handoff.incoming(PreprocessedRequest(token_ids=[1], prefill_result=result)) is None


@pytest.mark.parametrize(
    "result", [None, PrefillResult(disaggregated_params={}), PrefillResult(disaggregated_params=3)]
)
def test_a_decode_worker_refuses_a_foreign_prefill_result(result: PrefillResult | None) -> None:
    with pytest.raises(BackendError.InvalidArgument, match="prefill_result"):
        handoff.incoming(PreprocessedRequest(token_ids=[1], prefill_result=result))
