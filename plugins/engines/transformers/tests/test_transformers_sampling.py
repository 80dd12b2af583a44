"""The sampler: what is likely is chosen, what is banned never, and a seed says the same again."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_engine_transformers.request_sampling import RequestSampling
from dynamo_plugin_engine_transformers.sampling import sample

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.full

SCORES = [2.0, 1.0, 0.5, 0.0, -1.0, -9.0]


def rows(*samplings: RequestSampling) -> Any:
    return torch.tensor([SCORES] * len(samplings))


def drawn(times: int, **how: Any) -> list[int]:
    """Return tokens of as many requests, all in one step."""
    samplings = [RequestSampling(prompt=[0], **how) for _ in range(times)]
    made = sample(torch, rows(*samplings), samplings)
    assert [sampling.produced for sampling in samplings] == [[token] for token in made.argmax(dim=-1).tolist()]
    return [sampling.produced[0] for sampling in samplings]


def test_without_chance_the_most_likely_token_is_chosen() -> None:
    assert drawn(3, temperature=0) == [0, 0, 0]


def test_draws_have_the_frequencies_of_the_softmax() -> None:
    torch.manual_seed(1)
    tokens = drawn(20_000, temperature=2.0)

    expected = torch.softmax(torch.tensor(SCORES) / 2, dim=-1).tolist()
    for token, chance in enumerate(expected):
        assert tokens.count(token) / len(tokens) == pytest.approx(chance, abs=0.02)


@pytest.mark.parametrize(
    ("how", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.5}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"allowed": [3, 4]}, {3, 4}),
        ({"bad_words": [[0], [1]], "top_k": 2}, {2, 3}),
        ({"stop_ids": frozenset({0, 1, 2}), "min_tokens": 1, "top_k": 1}, {3}),
        ({"bias": {5: 100.0}}, {5}),
    ],
    ids=str,
)
def test_only_tokens_within_the_options_are_drawn(how: dict[str, Any], possible: set[int]) -> None:
    torch.manual_seed(2)

    assert set(drawn(500, **how)) == possible


def test_requests_of_one_step_do_not_touch_each_other() -> None:
    samplings = [
        RequestSampling(prompt=[0], temperature=0),
        RequestSampling(prompt=[0], bias={5: 100.0}),
        RequestSampling(prompt=[0], temperature=0, allowed=[2]),
        RequestSampling(prompt=[0], top_k=1),
    ]

    sample(torch, rows(*samplings), samplings)

    assert [sampling.produced for sampling in samplings] == [[0], [5], [2], [0]]


def test_a_seed_is_reproducible_in_any_batch_and_after_migration() -> None:
    def say(count: int, sampling: RequestSampling, *others: RequestSampling) -> list[int]:
        for _ in range(count):
            sample(torch, rows(sampling, *others), [sampling, *others])
        return sampling.produced

    whole = say(12, RequestSampling(prompt=[1, 2], seed=7))
    beside = say(
        12, RequestSampling(prompt=[1, 2], seed=7), RequestSampling(prompt=[3]), RequestSampling(prompt=[4], seed=8)
    )
    continued = say(8, RequestSampling(prompt=[1, 2, *whole[:4]], seed=7))
    other = say(12, RequestSampling(prompt=[1, 2], seed=9))

    assert beside == whole
    assert continued == whole[4:]
    assert other != whole


def test_penalties_lower_produced_tokens() -> None:
    presence = RequestSampling(prompt=[5], temperature=0, presence_penalty=1.5, produced=[0])
    frequency = RequestSampling(prompt=[5], temperature=0, frequency_penalty=0.6, produced=[0, 0])
    repetition = RequestSampling(prompt=[0], temperature=0, repetition_penalty=3.0)
    prompt_only = RequestSampling(prompt=[0], temperature=0, presence_penalty=1.5)
    samplings = [presence, frequency, repetition, prompt_only]

    sample(torch, rows(*samplings), samplings)

    # Only the repetition penalty counts the prompt.
    assert [sampling.produced[-1] for sampling in samplings] == [1, 1, 1, 0]


def test_log_probabilities_are_the_models_own_before_any_option() -> None:
    sampling = RequestSampling(prompt=[0], temperature=0, allowed=[1], logprobs=2)
    sample(torch, rows(sampling), [sampling])

    expected = torch.log_softmax(torch.tensor(SCORES), dim=-1).tolist()
    assert sampling.log_probs == [pytest.approx(expected[1])]
    assert [(top.token_id, top.rank) for top in sampling.top_logprobs[0]] == [(0, 1), (1, 2)]
    assert sampling.top_logprobs[0][0].logprob == pytest.approx(expected[0])
