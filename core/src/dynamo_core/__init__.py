"""Contracts, hooks and runtime of an LLM serving framework in which every stage is a plugin.

The names below are the public API for plugin authors. They are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_core.contracts.admission import Admission, Permit, Principal
    from dynamo_core.contracts.call import Endpoint, Handler, ServedContext, Sink, Source
    from dynamo_core.contracts.config import PluginConfig
    from dynamo_core.contracts.context import EngineContext, GenerateContext
    from dynamo_core.contracts.discovery import Discovery, Lease, WatchEvent, WatchKind
    from dynamo_core.contracts.engine import (
        DisaggregationMode,
        EngineConfig,
        LLMEngine,
        WorkerConfig,
        invalid_argument,
    )
    from dynamo_core.contracts.events import EventPlane, Publisher
    from dynamo_core.contracts.frontend import Frontend, FrontendServices, HttpRoute
    from dynamo_core.contracts.plugin import DYNAMO_API, Plugin
    from dynamo_core.contracts.router import Route, Router, RouterServices, RoutingRequest
    from dynamo_core.contracts.transport import Served, Transport
    from dynamo_core.errors import BackendError, DynamoError
    from dynamo_core.hookspecs.markers import hookimpl
    from dynamo_core.protocol.annotated import Annotated
    from dynamo_core.protocol.output import (
        CompletionUsage,
        FinishReason,
        LLMEngineOutput,
        TopLogprob,
        chunk,
        usage,
    )
    from dynamo_core.protocol.request import (
        BootstrapInfo,
        EmbedOutput,
        EmbedRequest,
        PrefillResult,
        PreprocessedRequest,
        SamplingOptions,
        StopConditions,
        TraceLink,
    )

_HOME = {
    "Admission": "contracts.admission",
    "Permit": "contracts.admission",
    "Principal": "contracts.admission",
    "Endpoint": "contracts.call",
    "Handler": "contracts.call",
    "ServedContext": "contracts.call",
    "Sink": "contracts.call",
    "Source": "contracts.call",
    "PluginConfig": "contracts.config",
    "EngineContext": "contracts.context",
    "GenerateContext": "contracts.context",
    "Discovery": "contracts.discovery",
    "Lease": "contracts.discovery",
    "WatchEvent": "contracts.discovery",
    "WatchKind": "contracts.discovery",
    "DisaggregationMode": "contracts.engine",
    "EngineConfig": "contracts.engine",
    "LLMEngine": "contracts.engine",
    "WorkerConfig": "contracts.engine",
    "invalid_argument": "contracts.engine",
    "EventPlane": "contracts.events",
    "Publisher": "contracts.events",
    "Frontend": "contracts.frontend",
    "FrontendServices": "contracts.frontend",
    "HttpRoute": "contracts.frontend",
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
    "hookimpl": "hookspecs.markers",
    "Annotated": "protocol.annotated",
    "CompletionUsage": "protocol.output",
    "FinishReason": "protocol.output",
    "LLMEngineOutput": "protocol.output",
    "TopLogprob": "protocol.output",
    "chunk": "protocol.output",
    "usage": "protocol.output",
    "BootstrapInfo": "protocol.request",
    "EmbedOutput": "protocol.request",
    "EmbedRequest": "protocol.request",
    "PrefillResult": "protocol.request",
    "PreprocessedRequest": "protocol.request",
    "SamplingOptions": "protocol.request",
    "StopConditions": "protocol.request",
    "TraceLink": "protocol.request",
}

__all__ = [
    "DYNAMO_API",
    "Admission",
    "Annotated",
    "BackendError",
    "BootstrapInfo",
    "CompletionUsage",
    "DisaggregationMode",
    "Discovery",
    "DynamoError",
    "EmbedOutput",
    "EmbedRequest",
    "Endpoint",
    "EngineConfig",
    "EngineContext",
    "EventPlane",
    "FinishReason",
    "Frontend",
    "FrontendServices",
    "GenerateContext",
    "Handler",
    "HttpRoute",
    "LLMEngine",
    "LLMEngineOutput",
    "Lease",
    "Permit",
    "Plugin",
    "PluginConfig",
    "PrefillResult",
    "PreprocessedRequest",
    "Principal",
    "Publisher",
    "Route",
    "Router",
    "RouterServices",
    "RoutingRequest",
    "SamplingOptions",
    "Served",
    "ServedContext",
    "Sink",
    "Source",
    "StopConditions",
    "TopLogprob",
    "TraceLink",
    "Transport",
    "WatchEvent",
    "WatchKind",
    "WorkerConfig",
    "chunk",
    "hookimpl",
    "invalid_argument",
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
