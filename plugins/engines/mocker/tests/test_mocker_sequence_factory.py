"""What the mocker says: tokens, ends, usage and log-probabilities, without a scheduler."""

from __future__ import annotations

from math import exp

import pytest
from dynamo_core import (
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo_core.protocol.output import merge_outputs
from dynamo_plugin_engine_mocker.config import MockerConfig, ScriptEntry
from dynamo_plugin_engine_mocker.sequence import Sequence
from dynamo_plugin_engine_mocker.sequence_factory import SequenceFactory
from dynamo_text.byte_tokenizer import EOS, ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

TOKENIZER = ByteTokenizer()
RANDOM = SequenceFactory(MockerConfig(), TOKENIZER)
ECHO = SequenceFactory(MockerConfig(output="echo"), TOKENIZER)

prompts = st.lists(st.integers(0, 255), min_size=1, max_size=200)
seeds = st.none() | st.integers(-(2**70), 2**70)


def step(sequence: Sequence) -> bool:
    """Return what the scheduler does with a sequence in one step; whether it was the last."""
    sequence.produced += 1
    if sequence.produced == sequence.checkpoint:
        sequence.on_checkpoint()
    return sequence.finished


def read(sequence: Sequence, *, every: int = 1) -> list[LLMEngineOutput]:
    """Step a sequence to its end and take after every so many steps."""
    items = []
    last = False
    while not last:
        last = step(sequence)
        if last or sequence.produced % every == 0:
            items.append(sequence.take())
    return items


def answer(answers: SequenceFactory, request: PreprocessedRequest, *, every: int = 1) -> LLMEngineOutput:
    """Return the whole answer as one item."""
    (item,) = merge_outputs(read(answers.sequence(request), every=every))
    return item


def ask(prompt: str = "hello", **stop_conditions: object) -> PreprocessedRequest:
    return PreprocessedRequest(
        token_ids=TOKENIZER.encode(prompt),
        stop_conditions=StopConditions(**stop_conditions),  # type: ignore[arg-type]
    )


@given(prompt=prompts, seed=seeds, length=st.integers(1, 300), cut=st.integers(0, 299), logprobs=st.none() | st.just(2))
def test_an_answer_that_is_cut_anywhere_goes_on_identically_elsewhere(
    prompt: list[int], seed: int | None, length: int, cut: int, logprobs: int | None
) -> None:
    cut = min(cut, length - 1)
    options = {"sampling_options": SamplingOptions(seed=seed), "output_options": OutputOptions(logprobs=logprobs)}
    whole = answer(
        RANDOM,
        PreprocessedRequest(token_ids=prompt, stop_conditions=StopConditions(max_tokens=length), **options),  # type: ignore[arg-type]
    )

    rest = answer(
        RANDOM,
        PreprocessedRequest(
            token_ids=prompt + whole.token_ids[:cut],
            stop_conditions=StopConditions(max_tokens=length - cut),
            **options,  # type: ignore[arg-type]
        ),
    )

    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.log_probs == (whole.log_probs and whole.log_probs[cut:])
    assert rest.top_logprobs == (whole.top_logprobs and whole.top_logprobs[cut:])


@given(
    prompt=prompts,
    length=st.integers(1, 200),
    stops=st.sets(st.integers(32, 126), max_size=4),
    hidden=st.sets(st.integers(32, 126), max_size=3),
    minimum=st.integers(0, 80),
    cut=st.integers(0, 199),
)
def test_stop_ids_and_minimum_hold_across_a_cut(
    prompt: list[int], length: int, stops: set[int], hidden: set[int], minimum: int, cut: int
) -> None:
    def conditions(done: int) -> StopConditions:
        return StopConditions(
            max_tokens=length - done,
            min_tokens=max(minimum - done, 0),
            stop_token_ids=sorted(stops),
            stop_token_ids_hidden=sorted(hidden),
        )

    whole = answer(RANDOM, PreprocessedRequest(token_ids=prompt, stop_conditions=conditions(0)))
    cut = min(cut, len(whole.token_ids) - 1)
    if cut < 0:
        return

    rest = answer(
        RANDOM, PreprocessedRequest(token_ids=prompt + whole.token_ids[:cut], stop_conditions=conditions(cut))
    )

    assert (rest.token_ids, rest.finish_reason) == (whole.token_ids[cut:], whole.finish_reason)
    ends = [place for place, token in enumerate(whole.token_ids) if token in stops | hidden]
    assert ends in ([], [len(whole.token_ids) - 1])
    assert not hidden.intersection(whole.token_ids)
    assert len(whole.token_ids) >= min(minimum, length)


@given(length=st.integers(1, 300), every=st.integers(1, 400))
def test_tokens_taken_late_come_merged_and_only_the_last_item_is_terminal(length: int, every: int) -> None:
    one_by_one = answer(RANDOM, ask(max_tokens=length))

    items = read(RANDOM.sequence(ask(max_tokens=length)), every=every)

    assert [token for item in items for token in item.token_ids] == one_by_one.token_ids
    assert [item.finish_reason for item in items] == [None] * (len(items) - 1) + [FinishReason.LENGTH]
    assert len(items) == -(-length // every)


def test_the_usage_counts_prompt_and_answer() -> None:
    item = answer(RANDOM, ask("hello", max_tokens=7))

    assert item.completion_usage is not None
    assert (item.completion_usage.prompt_tokens, item.completion_usage.completion_tokens) == (5, 7)
    assert item.completion_usage.total_tokens == 12


def test_seeds_give_different_answers_and_no_seed_means_seed_0() -> None:
    def tokens(seed: int | None) -> list[int]:
        request = ask(max_tokens=40)
        request.sampling_options.seed = seed
        return answer(RANDOM, request).token_ids

    assert tokens(None) == tokens(0)
    assert len({tuple(tokens(seed)) for seed in (0, 1, -1, 2**40)}) == 4


def test_a_random_answer_is_printable_and_uses_the_whole_vocabulary() -> None:
    text = TOKENIZER.decode(answer(RANDOM, ask(max_tokens=4000)).token_ids)

    assert {*text} == {chr(code) for code in range(32, 127)}


def test_without_printable_any_token_but_the_end_is_drawn() -> None:
    answers = SequenceFactory(MockerConfig(printable=False), TOKENIZER)

    tokens = answer(answers, ask(max_tokens=8000)).token_ids

    assert {*tokens} == {*range(257)} - {EOS}


@pytest.mark.parametrize(("asked", "given_tokens"), [(None, 16), (3, 3), (9999, 8192 - 5), (0, 0)])
def test_the_length_is_max_tokens_the_default_or_the_rest_of_the_context(asked: int | None, given_tokens: int) -> None:
    item = answer(RANDOM, ask("hello", max_tokens=asked))

    assert len(item.token_ids) == given_tokens
    assert item.finish_reason is FinishReason.LENGTH


def test_an_end_of_sequence_id_ends_the_answer_and_is_left_out() -> None:
    free = answer(RANDOM, ask(max_tokens=50)).token_ids
    request = ask(max_tokens=50)
    request.eos_token_ids = [free[10]]

    item = answer(RANDOM, request)

    assert item.token_ids == free[: free.index(free[10])]
    assert item.finish_reason is FinishReason.EOS
    assert item.stop_reason is None


def test_a_visible_stop_id_is_the_last_token_and_the_stop_reason() -> None:
    free = answer(RANDOM, ask(max_tokens=50)).token_ids

    item = answer(RANDOM, ask(max_tokens=50, stop_token_ids=[free[20]]))

    assert item.token_ids == free[: free.index(free[20]) + 1]
    assert (item.finish_reason, item.stop_reason) == (FinishReason.STOP, free[20])


def test_a_hidden_stop_id_at_once_gives_an_empty_answer() -> None:
    free = answer(RANDOM, ask(max_tokens=50)).token_ids

    item = answer(RANDOM, ask(max_tokens=50, stop_token_ids_hidden=[free[0]]))

    assert item.token_ids == []
    assert item.finish_reason is FinishReason.STOP


def test_ignore_eos_clears_every_stop_id() -> None:
    free = answer(RANDOM, ask(max_tokens=50)).token_ids
    request = ask(max_tokens=50, stop_token_ids=free, stop_token_ids_hidden=free, ignore_eos=True)
    request.eos_token_ids = free

    item = answer(RANDOM, request)

    assert item.token_ids == free
    assert item.finish_reason is FinishReason.LENGTH


def test_a_minimum_with_every_token_a_stop_still_reaches_the_minimum() -> None:
    item = answer(RANDOM, ask(max_tokens=50, min_tokens=9, stop_token_ids=[*range(256)]))

    assert len(item.token_ids) == 10
    assert item.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "text", "reason"),
    [
        ("Grüße, Welt", None, "Grüße, Welt", FinishReason.STOP),
        ("hello", 4, "hell", FinishReason.LENGTH),
        ("hello", 5, "hello", FinishReason.STOP),
    ],
)
def test_echo_repeats_the_prompt_as_far_as_it_may(
    prompt: str, max_tokens: int | None, text: str, reason: FinishReason
) -> None:
    item = answer(ECHO, ask(prompt, max_tokens=max_tokens))

    assert (TOKENIZER.decode(item.token_ids), item.finish_reason) == (text, reason)


@given(texts=st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=3))
def test_a_scripted_answer_is_the_text(texts: list[str]) -> None:
    texts = [text for text in texts if text.isprintable()] or ["x"]
    script = tuple(ScriptEntry(match=f"<{number}>", text=text) for number, text in enumerate(texts))
    answers = SequenceFactory(MockerConfig(output="script", script=script), TOKENIZER)

    for number, text in enumerate(texts):
        item = answer(answers, ask(f"say <{number}> please"))
        assert TOKENIZER.decode(item.token_ids) == text
        assert item.finish_reason is FinishReason.STOP


def test_the_first_matching_script_entry_counts_and_null_matches_all() -> None:
    script = (ScriptEntry(match="tool", text="call"), ScriptEntry(text="other"), ScriptEntry(text="never"))
    answers = SequenceFactory(MockerConfig(output="script", script=script), TOKENIZER)

    said = [TOKENIZER.decode(answer(answers, ask(prompt)).token_ids) for prompt in ("a tool", "hi")]

    assert said == ["call", "other"]


def test_a_prompt_without_a_script_entry_gets_a_random_answer() -> None:
    answers = SequenceFactory(
        MockerConfig(output="script", script=(ScriptEntry(match="tool", text="call"),)), TOKENIZER
    )

    assert answer(answers, ask("hi")) == answer(RANDOM, ask("hi"))


@given(alternatives=st.integers(0, 400), length=st.integers(1, 100), seed=seeds)
def test_logprobs_are_a_consistent_distribution_with_the_chosen_token_first(
    alternatives: int, length: int, seed: int | None
) -> None:
    request = ask(max_tokens=length)
    request.sampling_options.seed = seed
    request.output_options.logprobs = alternatives

    item = answer(RANDOM, request)

    assert item.log_probs is not None
    assert item.top_logprobs is not None
    assert len(item.log_probs) == len(item.top_logprobs) == length
    for token, logprob, top in zip(item.token_ids, item.log_probs, item.top_logprobs, strict=True):
        assert len(top) == min(alternatives, 95)
        if top:
            assert (top[0].token_id, top[0].logprob) == (token, logprob)
        assert [entry.rank for entry in top] == [*range(1, len(top) + 1)]
        assert len({entry.token_id for entry in top}) == len(top)
        assert [entry.logprob for entry in top] == sorted((entry.logprob for entry in top), reverse=True)
        assert sum(exp(entry.logprob) for entry in top) <= 1
        assert logprob < 0


def test_without_logprobs_there_are_none() -> None:
    item = answer(RANDOM, ask(max_tokens=3))

    assert item.log_probs is None
    assert item.top_logprobs is None
