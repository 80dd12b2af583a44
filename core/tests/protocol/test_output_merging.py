from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

from dynamo_core.protocol.output import FinishReason, LLMEngineOutput, TopLogprob, chunk, merge_outputs, usage
from hypothesis import given
from hypothesis import strategies as st


@st.composite
def streams(draw: st.DrawFn) -> list[LLMEngineOutput]:
    """Return valid streams: one to three choices, each with one terminal, last.

    Log-probabilities for all tokens or none.
    """
    with_logprobs = draw(st.booleans())
    with_text = draw(st.booleans())
    choices = draw(st.integers(1, 3))
    open_choices = list(range(choices))
    items: list[LLMEngineOutput] = []
    while open_choices:
        index = draw(st.sampled_from(open_choices))
        tokens = draw(st.lists(st.integers(0, 9), max_size=3))
        item = LLMEngineOutput(tokens, index=index)
        if with_logprobs:
            item.log_probs = [-float(token) for token in tokens]
            item.top_logprobs = [[TopLogprob(token, -float(token), 1)] for token in tokens]
            item.cum_log_probs = draw(st.floats(-9, 0))
        if with_text:
            item.text = draw(st.none() | st.text("ab", max_size=3))
        if draw(st.integers(0, 5)) == 0:
            item.delta = {"content": "x"}
        if draw(st.integers(0, 5)) == 0:
            item.text_logprobs = {"content": [len(items)]}
        if draw(st.integers(0, 5)) == 0:
            item.disaggregated_params = {"n": len(items)}
        if draw(st.integers(0, 3)) == 0:
            item.finish_reason = draw(st.sampled_from(FinishReason))
            item.stop_reason = draw(st.none() | st.just("STOP") | st.just(7))
            item.error_message = draw(st.none() | st.just("broke"))
            item.completion_usage = usage(1, len(items))
            open_choices.remove(index)
        items.append(item)
    return items


def merged_in_parts(items: list[LLMEngineOutput], cuts: list[int]) -> list[LLMEngineOutput]:
    edges = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [item for start, end in pairwise(edges) for item in merge_outputs(items[start:end])]


def told(items: list[LLMEngineOutput]) -> dict[int, object]:
    """Return all that a client learns from a stream, by choice."""
    result: dict[int, object] = {}
    for index in sorted({item.index for item in items}):
        own = [item for item in items if item.index == index]
        result[index] = (
            [token for item in own for token in item.token_ids],
            "".join(item.text or "" for item in own),
            [value for item in own for value in item.log_probs or ()],
            [value for item in own for value in item.top_logprobs or ()],
            [item.delta for item in own if item.delta is not None],
            [(item.text, item.text_logprobs) for item in own if item.text_logprobs is not None],
            next((item.cum_log_probs for item in reversed(own) if item.cum_log_probs is not None), None),
            next((item.disaggregated_params for item in reversed(own) if item.disaggregated_params), None),
            [item.finish_reason for item in own if item.finish_reason is not None],
            [item.stop_reason for item in own if item.stop_reason is not None],
            [item.error_message for item in own if item.error_message is not None],
            [item.completion_usage for item in own if item.completion_usage is not None],
        )
    return result


@given(streams(), st.lists(st.integers(0, 100), max_size=5))
def test_merging_any_split_keeps_the_content_and_the_input(items: list[LLMEngineOutput], cuts: list[int]) -> None:
    before = deepcopy(items)

    merged = merged_in_parts(items, cuts)

    assert told(merged) == told(before)
    assert items == before
    assert len(merged) <= len(items)


@given(streams(), st.lists(st.integers(0, 100), max_size=5))
def test_the_terminal_of_each_choice_stays_its_last_item(items: list[LLMEngineOutput], cuts: list[int]) -> None:
    merged = merged_in_parts(items, cuts)

    for index in {item.index for item in items}:
        own = [item.finish_reason for item in merged if item.index == index]
        assert own[-1] is not None
        assert own[:-1] == [None] * (len(own) - 1)


@given(streams())
def test_merging_twice_changes_nothing(items: list[LLMEngineOutput]) -> None:
    merged = merge_outputs(items)

    assert merge_outputs(merged) == merged


def test_a_run_of_one_choice_becomes_one_item() -> None:
    items = [*(chunk.token(token) for token in range(100)), LLMEngineOutput.stop().with_usage(usage(3, 100))]

    merged = merge_outputs(items)

    assert len(merged) == 1
    assert merged[0].token_ids == list(range(100))
    assert merged[0].finish_reason is FinishReason.STOP


def test_fields_of_an_early_item_are_kept() -> None:
    items = [LLMEngineOutput([1], stop_reason="X", error_message="careful"), chunk.token(2), chunk.token(3)]

    [merged] = merge_outputs(items)

    assert (merged.stop_reason, merged.error_message) == ("X", "careful")


def test_items_after_a_terminal_are_left_for_the_validator_to_find() -> None:
    items = [LLMEngineOutput.stop(), chunk.token(1)]

    assert merge_outputs(items) == items


def test_merging_no_items_gives_none() -> None:
    assert merge_outputs([]) == []
