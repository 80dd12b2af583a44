"""What a request wishes, as vLLM is told of it."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    GuidedDecodingOptions,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from dynamo_plugin_engine_vllm.sampling import SamplingArgs, sampling_args

AGG, PREFILL, DECODE = DisaggregationMode.AGGREGATED, DisaggregationMode.PREFILL, DisaggregationMode.DECODE


def asked(role: DisaggregationMode = AGG, *, defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingArgs:
    request = PreprocessedRequest(**{"token_ids": [5, 6, 7]} | fields)
    return sampling_args(request, defaults=defaults or {}, context_length=100, role=role)


def guided(**options: Any) -> dict[str, Any] | None:
    return asked(sampling_options=SamplingOptions(guided_decoding=GuidedDecodingOptions(**options))).guided


def test_a_bare_request_may_fill_the_context() -> None:
    assert asked() == SamplingArgs({"max_tokens": 97, "min_tokens": 0, "ignore_eos": False})


def test_every_sampling_option_keeps_its_name_and_value() -> None:
    options: dict[str, Any] = {
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "temperature": 0.4,
        "top_p": 0.5,
        "top_k": 6,
        "min_p": 0.7,
        "seed": 8,
        "allowed_token_ids": [9],
        "n": 2,
    }

    assert asked(sampling_options=SamplingOptions(**options)).params.items() >= options.items()


def test_generation_config_fills_options_absent_from_the_request() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    params = asked(defaults=defaults, sampling_options=SamplingOptions(temperature=0.0)).params

    assert params["temperature"] == 0.0
    assert params["top_p"] == 0.9
    assert params["max_tokens"] == 50


def test_stop_ids_of_every_kind_end_the_answer_and_stop_strings_are_left_to_the_frontend() -> None:
    stop = StopConditions(max_tokens=4, min_tokens=2, stop=["x"], stop_token_ids=[1], stop_token_ids_hidden=[2, 1])
    params = asked(stop_conditions=stop, eos_token_ids=[2, 3]).params

    assert params["stop_token_ids"] == [1, 2, 3]
    assert (params["max_tokens"], params["min_tokens"]) == (4, 2)
    assert "stop" not in params


def test_ignore_eos_leaves_the_limit_only() -> None:
    stop = StopConditions(ignore_eos=True, stop_token_ids_hidden=[2])
    params = asked(stop_conditions=stop, eos_token_ids=[2]).params

    assert params["ignore_eos"] is True
    assert "stop_token_ids" not in params


def test_a_budget_for_thinking_logprobs_and_a_bias_are_passed_on() -> None:
    asking = asked(
        stop_conditions=StopConditions(max_thinking_tokens=9),
        output_options=OutputOptions(logprobs=0),
        sampling_options=SamplingOptions(logit_bias={"17": -100.0}, bad_words_token_ids=[[1, 2]]),
    )

    assert asking.params["thinking_token_budget"] == 9
    assert asking.params["logprobs"] == 0
    assert asking.params["logit_bias"] == {17: -100.0}
    assert asking.bad_words_token_ids == [[1, 2]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json": True}, {"json": "true"}),
        ({"regex": "a+", "whitespace_pattern": " "}, {"regex": "a+", "whitespace_pattern": " "}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"structural_tag": {"type": "t"}}, {"structural_tag": '{"type": "t"}'}),
        ({"backend": "xgrammar", "regex": "a"}, {"regex": "a"}),
        ({}, None),
    ],
)
def test_a_guide_is_passed_on(options: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert guided(**options) == expected


def test_two_guides_at_once_are_refused() -> None:
    with pytest.raises(BackendError.InvalidArgument, match="regex and choice: only one can hold"):
        guided(regex="a", choice=["b"])


def test_a_guide_of_another_backend_than_the_workers_is_refused() -> None:
    options = SamplingOptions(guided_decoding=GuidedDecodingOptions(regex="a", backend="outlines"))
    request = PreprocessedRequest(token_ids=[1], sampling_options=options)

    with pytest.raises(BackendError.InvalidArgument, match=r"guided_decoding\.backend: this worker was started with"):
        sampling_args(request, defaults={}, context_length=9, role=AGG, guided_backend="xgrammar")


def test_a_prefill_worker_makes_one_token_that_cannot_end_the_answer() -> None:
    stop = StopConditions(max_tokens=1, min_tokens=7)
    asking = asked(PREFILL, stop_conditions=stop, eos_token_ids=[2], sampling_options=SamplingOptions(temperature=1.0))

    assert asking == SamplingArgs({"temperature": 0.0, "max_tokens": 1, "min_tokens": 1})


def test_a_decode_worker_keeps_the_clients_options() -> None:
    assert asked(DECODE, stop_conditions=StopConditions(max_tokens=5)).params["max_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": list(range(100))}, "token_ids has 100 tokens"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "use_beam_search"),
        ({"sampling_options": SamplingOptions(length_penalty=0.5)}, "length_penalty"),
        ({"sampling_options": SamplingOptions(n=2, best_of=3)}, "best_of"),
        ({"sampling_options": SamplingOptions(logit_bias={"x": 1.0})}, "logit_bias"),
        ({"output_options": OutputOptions(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"routing": RoutingHints(lora_name="mine")}, "lora_name"),
        ({"extra_args": {"multi_modal_data": {"image": "…"}}}, "multi_modal_data"),
        ({"extra_args": {"prompt_embeds": "…"}}, "prompt_embeds"),
    ],
)
def test_unsupported_options_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BackendError.InvalidArgument, match=named):
        asked(**fields)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_half_a_pair_makes_one_answer(role: DisaggregationMode) -> None:
    with pytest.raises(BackendError.InvalidArgument, match=r"sampling_options\.n"):
        asked(role, sampling_options=SamplingOptions(n=2))
