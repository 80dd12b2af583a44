"""The engine contract as its authors see it: names, defaults, modes, terminals."""

from __future__ import annotations

import dynamo_core
import msgspec
import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    RouterConfigOverride,
    RoutingHints,
    WorkerConfig,
    chunk,
    usage,
)

#: What the seed document S0 names, in Python's spelling.
NAMED = [
    "LLMEngine",
    "EngineConfig",
    "WorkerConfig",
    "GenerateContext",
    "EngineContext",
    "DisaggregationMode",
    "PreprocessedRequest",
    "LLMEngineOutput",
    "FinishReason",
    "PrefillResult",
    "BootstrapInfo",
    "TraceLink",
    "chunk",
    "usage",
    "DynamoError",
    "BackendError",
    "KvEventSource",
    "LoadSource",
    "MetricsScope",
    "start_span",
    "inject_trace_headers_into_map",
    "get_distributed_tracing_context",
]


def test_every_public_name_is_importable_from_the_package() -> None:
    for name in dynamo_core.__all__:
        assert getattr(dynamo_core, name) is not None


@pytest.mark.parametrize("name", NAMED)
def test_names_for_writing_an_engine_are_public(name: str) -> None:
    assert name in dynamo_core.__all__


def test_making_an_engine_needs_three_methods_and_no_constructor_of_the_command_line() -> None:
    assert LLMEngine.__abstractmethods__ == {"start", "generate", "cleanup"}
    assert not hasattr(LLMEngine, "from_args")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("agg", DisaggregationMode.AGGREGATED),
        (" Aggregated ", DisaggregationMode.AGGREGATED),
        ("PREFILL", DisaggregationMode.PREFILL),
        ("decode\n", DisaggregationMode.DECODE),
    ],
)
def test_a_mode_is_read_in_any_case_and_with_blanks(text: str, mode: DisaggregationMode) -> None:
    assert DisaggregationMode.parse(text) is mode


@pytest.mark.parametrize("text", ["both", "", "prefil"])
def test_an_unknown_mode_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(BackendError.InvalidArgument) as caught:
        DisaggregationMode.parse(text)

    assert str(caught.value) == f"unknown disaggregation mode '{text}' (expected one of: agg, prefill, decode)"


def test_an_empty_worker_config_has_the_documented_defaults() -> None:
    config = WorkerConfig()

    assert (config.namespace, config.component, config.endpoint) == ("dynamo", "backend", "generate")
    assert config.endpoint_types == ("chat", "completions")
    assert config.disaggregation_mode is DisaggregationMode.AGGREGATED
    assert config.enable_kv_routing
    assert config.enable_local_indexer
    assert config.runtime == dynamo_core.RuntimeOptions()


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (LLMEngineOutput.stop(), FinishReason.STOP),
        (LLMEngineOutput.length(), FinishReason.LENGTH),
        (LLMEngineOutput.cancelled(), FinishReason.CANCELLED),
        (LLMEngineOutput.error("broken"), FinishReason.ERROR),
    ],
)
def test_a_terminal_is_empty_until_tokens_and_usage_are_set(item: LLMEngineOutput, reason: FinishReason) -> None:
    assert (item.finish_reason, item.token_ids, item.completion_usage) == (reason, [], None)

    whole = item.with_tokens((5, 6)).with_usage(usage(3, 2))

    assert whole is item
    assert whole.token_ids == [5, 6]
    assert whole.completion_usage is not None
    assert whole.completion_usage.total_tokens == 5


def test_an_item_of_one_token_is_no_terminal() -> None:
    assert chunk.token(7) == LLMEngineOutput([7])
    assert chunk.token(7).finish_reason is None


def test_a_reason_that_engines_call_abort_is_cancelled() -> None:
    read = msgspec.msgpack.decode(msgspec.msgpack.encode({"finish_reason": "abort"}), type=LLMEngineOutput)

    assert read.finish_reason is FinishReason.CANCELLED
    assert msgspec.to_builtins(read) == {"finish_reason": "cancelled"}


def test_routing_hints_are_encoded_and_omitted_if_absent() -> None:
    request = PreprocessedRequest(
        token_ids=[1],
        routing=RoutingHints(strict_priority=2, priority_jump=0.5),
        router_config_override=RouterConfigOverride(router_temperature=0.3),
    )

    read = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=PreprocessedRequest)

    assert read == request
    assert "router_config_override" not in msgspec.to_builtins(PreprocessedRequest(token_ids=[1]))


def test_stopping_a_request_stops_its_linked_children() -> None:
    parent, child, late = EngineContext("r"), EngineContext("child"), EngineContext("late")
    ctx = GenerateContext(parent)

    ctx.link_child(child)
    parent.stop_generating()
    ctx.link_child(late)

    assert child.is_stopped()
    assert late.is_stopped()
    assert not child.is_killed()


def test_both_contexts_have_the_same_methods() -> None:
    calls = {name for name in vars(EngineContext) if not name.startswith("_")} - {"coalesce", "root_id"}

    assert calls <= {name for name in dir(GenerateContext) if not name.startswith("_")}
