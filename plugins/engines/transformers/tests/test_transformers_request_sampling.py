"""What a request may ask of the sampler, and what is refused by name. Needs no library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    GuidedDecodingOptions,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SamplingOptions,
    StopConditions,
)
from dynamo_plugin_engine_transformers.request_sampling import RequestSampling, model_defaults, request_sampling


def sampling(caching: bool = True, defaults: dict[str, float] | None = None, **request: Any) -> RequestSampling:
    asked = PreprocessedRequest(**{"token_ids": [1, 2, 3]} | request)
    return request_sampling(asked, vocabulary=10, defaults=defaults or {}, caching=caching)


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"sampling_options": SamplingOptions(guided_decoding=GuidedDecodingOptions(regex="a"))}, "response_format"),
        ({"sampling_options": SamplingOptions(use_beam_search=True)}, "use_beam_search"),
        ({"sampling_options": SamplingOptions(n=2)}, "n"),
        ({"sampling_options": SamplingOptions(best_of=2)}, "best_of"),
        ({"sampling_options": SamplingOptions(length_penalty=0.5)}, "length_penalty"),
        ({"sampling_options": SamplingOptions(logit_bias={"10": 1.0})}, "logit_bias"),
        ({"sampling_options": SamplingOptions(logit_bias={"-1": 1.0})}, "logit_bias"),
        ({"sampling_options": SamplingOptions(allowed_token_ids=[])}, "allowed_token_ids"),
        ({"sampling_options": SamplingOptions(allowed_token_ids=[10])}, "allowed_token_ids"),
        ({"sampling_options": SamplingOptions(bad_words_token_ids=[[1, 99]])}, "bad_words"),
        ({"output_options": OutputOptions(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"output_options": OutputOptions(logprobs=21)}, "top_logprobs"),
        ({"stop_conditions": StopConditions(max_thinking_tokens=5)}, "max_thinking_tokens"),
        ({"routing": RoutingHints(lora_name="x")}, "lora_name"),
        ({"routing": RoutingHints(cache_salt="x")}, "cache_salt"),
        ({"token_ids": [10]}, "prompt"),
        ({"token_ids": [-1]}, "prompt"),
    ],
    ids=str,
)
def test_unsupported_sampling_options_are_refused_by_name(request_fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BackendError.InvalidArgument, match=f"`{field}` cannot be honoured") as caught:
        sampling(**request_fields)

    assert caught.value.field == field


def test_a_salt_is_no_matter_where_nothing_is_shared() -> None:
    assert sampling(caching=False, routing=RoutingHints(cache_salt="x")).prompt == [1, 2, 3]


def test_generation_config_gives_defaults_and_the_request_overrides_them(tmp_path: Path) -> None:
    said = {"temperature": 0.6, "top_k": 20, "top_p": "odd", "eos_token_id": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    defaults = model_defaults(str(tmp_path))

    silent, outspoken = (
        sampling(defaults=defaults),
        sampling(defaults=defaults, sampling_options=SamplingOptions(temperature=0.0, top_k=-1)),
    )

    assert defaults == {"temperature": 0.6, "top_k": 20}
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 1.0)
    assert (outspoken.temperature, outspoken.top_k) == (0.0, 0)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_missing_or_broken_generation_config_is_ignored(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)

    assert model_defaults(str(tmp_path)) == {}


def test_every_kind_of_stop_token_ends_the_answer_unless_the_end_is_to_be_ignored() -> None:
    stops = StopConditions(stop_token_ids=[1], stop_token_ids_hidden=[2])

    assert sampling(stop_conditions=stops, eos_token_ids=[3]).stop_ids == {1, 2, 3}
    assert sampling(stop_conditions=StopConditions(ignore_eos=True), eos_token_ids=[3]).stop_ids == frozenset()


def test_bans_depend_on_the_produced_tokens() -> None:
    asked = RequestSampling(prompt=[1], stop_ids=frozenset({5}), min_tokens=2, bad_words=[[7], [3, 4]])
    first = asked.banned()
    asked.produced += [9, 3]

    assert first == {5, 7}
    assert asked.banned() == {7, 4}
