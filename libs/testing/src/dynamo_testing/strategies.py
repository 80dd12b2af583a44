"""Requests and outputs of every shape, for tests with hypothesis."""

from __future__ import annotations

from typing import Any

from dynamo_core.protocol.output import CompletionUsage, FinishReason, LLMEngineOutput, TopLogprob
from dynamo_core.protocol.request import (
    BootstrapInfo,
    GuidedDecodingOptions,
    OutputOptions,
    PrefillResult,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    SamplingOptions,
    StopConditions,
    TraceLink,
)
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

#: Token ids of any vocabulary there is.
token_ids = st.integers(0, 2**31 - 1)
integers = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**31 - 1)
#: Without NaN, which is equal to nothing; engines do report minus infinity as a log-probability.
floats = st.floats(allow_nan=False)
texts = st.text(max_size=20)


def maybe(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Return a value, or None."""
    return st.none() | values


def lists(values: SearchStrategy[Any], size: int = 4) -> SearchStrategy[list[Any]]:
    """Return short lists."""
    return st.lists(values, max_size=size)


#: What JSON can say, as it is found in the engine's own fields.
json_values: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | integers | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: lists(inner, 3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(texts, json_values, max_size=3)

trace_links = st.builds(
    TraceLink,
    trace_id=st.text("0123456789abcdef", min_size=32, max_size=32),
    span_id=st.text("0123456789abcdef", min_size=16, max_size=16),
)

guided_decoding = st.builds(
    GuidedDecodingOptions,
    json=json_values,
    regex=maybe(texts),
    choice=maybe(lists(texts)),
    grammar=maybe(texts),
    structural_tag=json_values,
)

sampling_options = st.builds(
    SamplingOptions,
    n=maybe(st.integers(1, 8)),
    temperature=maybe(floats),
    top_p=maybe(floats),
    top_k=maybe(st.integers(-1, 1000)),
    seed=maybe(integers),
    use_beam_search=maybe(st.booleans()),
    guided_decoding=maybe(guided_decoding),
    logit_bias=maybe(st.dictionaries(texts, floats, max_size=3)),
    bad_words_token_ids=maybe(lists(lists(token_ids))),
)

stop_conditions = st.builds(
    StopConditions,
    max_tokens=maybe(counts),
    stop=maybe(lists(texts)),
    stop_token_ids=maybe(lists(token_ids)),
    stop_token_ids_hidden=maybe(lists(token_ids)),
    min_tokens=maybe(counts),
    ignore_eos=st.booleans(),
)

routing_hints = st.builds(
    RoutingHints,
    backend_instance_id=maybe(st.integers(0, 2**63 - 1)),
    dp_rank=maybe(st.integers(0, 64)),
    lora_name=maybe(texts),
    cache_salt=maybe(texts),
    priority=maybe(integers),
    allowed_worker_ids=maybe(lists(st.integers(0, 2**63 - 1))),
    strict_priority=maybe(counts),
    priority_jump=maybe(floats),
)

#: `PreprocessedRequest` with any of its fields set.
requests: SearchStrategy[PreprocessedRequest] = st.builds(
    PreprocessedRequest,
    model=texts,
    token_ids=lists(token_ids, 50),
    stop_conditions=stop_conditions,
    sampling_options=sampling_options,
    output_options=st.builds(OutputOptions, logprobs=maybe(counts), skip_special_tokens=maybe(st.booleans())),
    eos_token_ids=lists(token_ids),
    mdc_sum=maybe(texts),
    annotations=lists(texts),
    routing=maybe(routing_hints),
    prefill_result=maybe(
        st.builds(PrefillResult, disaggregated_params=json_values, prompt_tokens_details=maybe(json_objects))
    ),
    bootstrap_info=maybe(
        st.builds(BootstrapInfo, bootstrap_host=texts, bootstrap_port=counts, bootstrap_room=st.integers(0, 2**63 - 1))
    ),
    migration_link=maybe(trace_links),
    body=json_values,
    extra_args=maybe(json_objects),
    is_probe=st.booleans(),
    router_config_override=maybe(
        st.builds(RouterConfigOverride, router_temperature=maybe(floats), assume_kv_reuse=maybe(st.booleans()))
    ),
)

top_logprobs = st.builds(TopLogprob, token_id=token_ids, logprob=floats, rank=counts)

#: `LLMEngineOutput` with any of its fields set.
outputs: SearchStrategy[LLMEngineOutput] = st.builds(
    LLMEngineOutput,
    token_ids=lists(token_ids),
    finish_reason=maybe(st.sampled_from(FinishReason)),
    index=st.integers(0, 3),
    text=maybe(texts),
    log_probs=maybe(lists(floats)),
    top_logprobs=maybe(lists(lists(top_logprobs, 2))),
    cum_log_probs=maybe(floats),
    stop_reason=maybe(texts | integers),
    error_message=maybe(texts),
    completion_usage=maybe(
        st.builds(
            CompletionUsage,
            prompt_tokens=counts,
            completion_tokens=counts,
            total_tokens=counts,
            cached_tokens=maybe(counts),
        )
    ),
    disaggregated_params=json_values,
    worker_trace_link=maybe(trace_links),
    delta=maybe(json_objects),
)
