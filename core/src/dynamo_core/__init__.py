"""Contracts, hooks and runtime of an LLM serving framework in which every stage is a plugin.

The names below are the public API for plugin authors. They are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_core.contracts.admission import Admission, Permit, Principal
    from dynamo_core.contracts.bridge import EngineLike
    from dynamo_core.contracts.call import Endpoint, Handler, ServedContext, Sink, Source
    from dynamo_core.contracts.config import PluginConfig, SettingsMismatch
    from dynamo_core.contracts.context import EngineContext, GenerateContext
    from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
    from dynamo_core.contracts.engine import (
        EMBED,
        MULTI_CHOICE,
        PROGRESS,
        DisaggregationMode,
        EngineConfig,
        KvEventSource,
        LLMEngine,
        LoadSource,
        RuntimeOptions,
        WorkerConfig,
        invalid_argument,
    )
    from dynamo_core.contracts.events import EventPlane, Publisher
    from dynamo_core.contracts.frontend import Frontend, FrontendServices, HttpRoute
    from dynamo_core.contracts.metrics import MetricsScope
    from dynamo_core.contracts.parsers import (
        ContentDelta,
        DeltaWriter,
        ParserDelta,
        Parsers,
        ReasoningDelta,
        ReasoningParser,
        ToolCallArguments,
        ToolCallParser,
        ToolCallStart,
    )
    from dynamo_core.contracts.plugin import DYNAMO_API, Plugin
    from dynamo_core.contracts.router import Route, Router, RouterServices, RoutingRequest
    from dynamo_core.contracts.transport import Served, Transport
    from dynamo_core.errors import BackendError, DynamoError, HttpFault, Problem
    from dynamo_core.hookspecs import hookimpl
    from dynamo_core.protocol.annotated import Annotated
    from dynamo_core.protocol.events import ActiveLoad, KvBlock, KvCleared, KvEvent, KvRemoved, KvStored
    from dynamo_core.protocol.output import CompletionUsage, FinishReason, LLMEngineOutput, TopLogprob, chunk, usage
    from dynamo_core.protocol.request import (
        BootstrapInfo,
        EmbedOutput,
        EmbedRequest,
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
    from dynamo_core.resources import AsyncResource
    from dynamo_core.runtime.args import CommonArgs, from_args
    from dynamo_core.runtime.run import engine_main, run
    from dynamo_core.telemetry.spans import start_span
    from dynamo_core.telemetry.tracing import get_distributed_tracing_context, inject_trace_headers_into_map

_HOME = {
    "Admission": "contracts.admission",
    "Permit": "contracts.admission",
    "Principal": "contracts.admission",
    "EngineLike": "contracts.bridge",
    "Endpoint": "contracts.call",
    "Handler": "contracts.call",
    "ServedContext": "contracts.call",
    "Sink": "contracts.call",
    "Source": "contracts.call",
    "PluginConfig": "contracts.config",
    "SettingsMismatch": "contracts.config",
    "EngineContext": "contracts.context",
    "GenerateContext": "contracts.context",
    "Discovery": "contracts.discovery",
    "Lease": "contracts.discovery",
    "WatchEvent": "contracts.discovery",
    "WatchKind": "contracts.discovery",
    "DisaggregationMode": "contracts.engine",
    "EMBED": "contracts.engine",
    "EngineConfig": "contracts.engine",
    "KvEventSource": "contracts.engine",
    "LLMEngine": "contracts.engine",
    "LoadSource": "contracts.engine",
    "MULTI_CHOICE": "contracts.engine",
    "PROGRESS": "contracts.engine",
    "RuntimeOptions": "contracts.engine",
    "WorkerConfig": "contracts.engine",
    "invalid_argument": "contracts.engine",
    "EventPlane": "contracts.events",
    "Publisher": "contracts.events",
    "Frontend": "contracts.frontend",
    "FrontendServices": "contracts.frontend",
    "HttpRoute": "contracts.frontend",
    "MetricsScope": "contracts.metrics",
    "ContentDelta": "contracts.parsers",
    "DeltaWriter": "contracts.parsers",
    "ParserDelta": "contracts.parsers",
    "Parsers": "contracts.parsers",
    "ReasoningDelta": "contracts.parsers",
    "ReasoningParser": "contracts.parsers",
    "ToolCallArguments": "contracts.parsers",
    "ToolCallParser": "contracts.parsers",
    "ToolCallStart": "contracts.parsers",
    "DYNAMO_API": "contracts.plugin",
    "Plugin": "contracts.plugin",
    "Route": "contracts.router",
    "Router": "contracts.router",
    "RouterServices": "contracts.router",
    "RoutingRequest": "contracts.router",
    "Served": "contracts.transport",
    "Transport": "contracts.transport",
    "BackendError": "errors",
    "DynamoError": "errors",
    "HttpFault": "errors",
    "Problem": "errors",
    "hookimpl": "hookspecs",
    "Annotated": "protocol.annotated",
    "ActiveLoad": "protocol.events",
    "KvBlock": "protocol.events",
    "KvCleared": "protocol.events",
    "KvEvent": "protocol.events",
    "KvRemoved": "protocol.events",
    "KvStored": "protocol.events",
    "CompletionUsage": "protocol.output",
    "FinishReason": "protocol.output",
    "LLMEngineOutput": "protocol.output",
    "TopLogprob": "protocol.output",
    "chunk": "protocol.output",
    "usage": "protocol.output",
    "BootstrapInfo": "protocol.request",
    "EmbedOutput": "protocol.request",
    "EmbedRequest": "protocol.request",
    "GuidedDecodingOptions": "protocol.request",
    "OutputOptions": "protocol.request",
    "PrefillResult": "protocol.request",
    "PreprocessedRequest": "protocol.request",
    "RouterConfigOverride": "protocol.request",
    "RoutingHints": "protocol.request",
    "SamplingOptions": "protocol.request",
    "StopConditions": "protocol.request",
    "TraceLink": "protocol.request",
    "AsyncResource": "resources",
    "CommonArgs": "runtime.args",
    "from_args": "runtime.args",
    "engine_main": "runtime.run",
    "run": "runtime.run",
    "start_span": "telemetry.spans",
    "get_distributed_tracing_context": "telemetry.tracing",
    "inject_trace_headers_into_map": "telemetry.tracing",
}

__all__ = [
    "DYNAMO_API",
    "EMBED",
    "MULTI_CHOICE",
    "PROGRESS",
    "ActiveLoad",
    "Admission",
    "Annotated",
    "AsyncResource",
    "BackendError",
    "BootstrapInfo",
    "CommonArgs",
    "CompletionUsage",
    "ContentDelta",
    "DeltaWriter",
    "DisaggregationMode",
    "Discovery",
    "DynamoError",
    "EmbedOutput",
    "EmbedRequest",
    "Endpoint",
    "EngineConfig",
    "EngineContext",
    "EngineLike",
    "EventPlane",
    "FinishReason",
    "Frontend",
    "FrontendServices",
    "GenerateContext",
    "GuidedDecodingOptions",
    "Handler",
    "HttpFault",
    "HttpRoute",
    "KvBlock",
    "KvCleared",
    "KvEvent",
    "KvEventSource",
    "KvRemoved",
    "KvStored",
    "LLMEngine",
    "LLMEngineOutput",
    "Lease",
    "LoadSource",
    "MetricsScope",
    "OutputOptions",
    "ParserDelta",
    "Parsers",
    "Permit",
    "Plugin",
    "PluginConfig",
    "PrefillResult",
    "PreprocessedRequest",
    "Principal",
    "Problem",
    "Publisher",
    "ReasoningDelta",
    "ReasoningParser",
    "Route",
    "Router",
    "RouterConfigOverride",
    "RouterServices",
    "RoutingHints",
    "RoutingRequest",
    "RuntimeOptions",
    "SamplingOptions",
    "Served",
    "ServedContext",
    "SettingsMismatch",
    "Sink",
    "Source",
    "StopConditions",
    "ToolCallArguments",
    "ToolCallParser",
    "ToolCallStart",
    "TopLogprob",
    "TraceLink",
    "Transport",
    "WatchEvent",
    "WatchKind",
    "WorkerConfig",
    "chunk",
    "engine_main",
    "from_args",
    "get_distributed_tracing_context",
    "hookimpl",
    "inject_trace_headers_into_map",
    "invalid_argument",
    "run",
    "start_span",
    "usage",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
