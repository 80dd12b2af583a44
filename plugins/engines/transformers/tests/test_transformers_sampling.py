"""The sampler: what is likely is chosen, what is banned never, and a seed says the same again."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_engine_transformers.sampling import choose
from dynamo_plugin_engine_transformers.wish import Wish

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.full

SCORES = [2.0, 1.0, 0.5, 0.0, -1.0, -9.0]


def rows(*wishes: Wish) -> Any:
    return torch.tensor([SCORES] * len(wishes))


def drawn(times: int, **how: Any) -> list[int]:
    """Tokens of as many requests, all in one step."""
    wishes = [Wish(prompt=[0], **how) for _ in range(times)]
    made = choose(torch, rows(*wishes), wishes)
    assert [wish.produced for wish in wishes] == [[token] for token in made.argmax(dim=-1).tolist()]
    return [wish.produced[0] for wish in wishes]


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
def test_only_what_the_options_leave_is_drawn(how: dict[str, Any], possible: set[int]) -> None:
    torch.manual_seed(2)

    assert set(drawn(500, **how)) == possible


def test_requests_of_one_step_do_not_touch_each_other() -> None:
    wishes = [
        Wish(prompt=[0], temperature=0),
        Wish(prompt=[0], bias={5: 100.0}),
        Wish(prompt=[0], temperature=0, allowed=[2]),
        Wish(prompt=[0], top_k=1),
    ]

    choose(torch, rows(*wishes), wishes)

    assert [wish.produced for wish in wishes] == [[0], [5], [2], [0]]


def test_a_seed_says_the_same_whatever_else_is_in_the_step_and_however_far_the_prompt_has_grown() -> None:
    def say(count: int, wish: Wish, *others: Wish) -> list[int]:
        for _ in range(count):
            choose(torch, rows(wish, *others), [wish, *others])
        return wish.produced

    whole = say(12, Wish(prompt=[1, 2], seed=7))
    beside = say(12, Wish(prompt=[1, 2], seed=7), Wish(prompt=[3]), Wish(prompt=[4], seed=8))
    continued = say(8, Wish(prompt=[1, 2, *whole[:4]], seed=7))
    other = say(12, Wish(prompt=[1, 2], seed=9))

    assert beside == whole
    assert continued == whole[4:]
    assert other != whole


def test_penalties_make_what_was_said_less_likely() -> None:
    presence = Wish(prompt=[5], temperature=0, presence_penalty=1.5, produced=[0])
    frequency = Wish(prompt=[5], temperature=0, frequency_penalty=0.6, produced=[0, 0])
    repetition = Wish(prompt=[0], temperature=0, repetition_penalty=3.0)
    prompt_only = Wish(prompt=[0], temperature=0, presence_penalty=1.5)
    wishes = [presence, frequency, repetition, prompt_only]

    choose(torch, rows(*wishes), wishes)

    # Only the repetition penalty counts the prompt.
    assert [wish.produced[-1] for wish in wishes] == [1, 1, 1, 0]


def test_log_probabilities_are_the_models_own_before_any_option() -> None:
    wish = Wish(prompt=[0], temperature=0, allowed=[1], logprobs=2)
    choose(torch, rows(wish), [wish])

    expected = torch.log_softmax(torch.tensor(SCORES), dim=-1).tolist()
    assert wish.log_probs == [pytest.approx(expected[1])]
    assert [(top.token_id, top.rank) for top in wish.top_logprobs[0]] == [(0, 1), (1, 2)]
    assert wish.top_logprobs[0][0].logprob == pytest.approx(expected[0])
