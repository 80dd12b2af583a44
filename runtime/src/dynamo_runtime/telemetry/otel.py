"""Spans recorded with OpenTelemetry. Imported only when export is on; everything that names the SDK is here.

An engine or a library that uses OpenTelemetry's own API is part of the same trace: a span that is entered here is
current there too, and the other way round.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from contextvars import Token

from dynamo_core import tracing
from dynamo_core.protocol.request import TraceLink
from dynamo_core.spans import Attributes, Kind, Recorder, Span, Value
from dynamo_core.tracing import TraceContext
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
_HEX = re.compile(r"[0-9a-f]{32}/[0-9a-f]{16}")


def connect(service_name: str, ratio: float | None) -> tuple[Recorder, Callable[[], None]]:
    """Return a recorder whose spans are exported by OTLP over HTTP, and what flushes and closes it.

    `ratio` is the share of new traces that are recorded; None leaves it to the SDK, which takes all unless told
    otherwise. Where spans go, and with which headers, the exporter reads from the environment.

    Raises:
        ImportError: the exporter is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(
        sampler=None if ratio is None else ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create(None if named else {SERVICE_NAME: service_name}),
        # Its own handler at exit would wait without a deadline.
        shutdown_on_exit=False,
        id_generator=RandomIds(),
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    # For engines and libraries that use OpenTelemetry's own API.
    trace.set_tracer_provider(provider)
    return SpanRecorder(provider), provider.shutdown


class RandomIds(IdGenerator):
    """Ids from a generator of their own: engines seed the shared one, and all workers with the same number."""

    def __init__(self) -> None:
        self._bits = random.Random().getrandbits  # noqa: S311 - ids need to differ, not to be secret

    def generate_span_id(self) -> int:
        """Return 64 bits, not all zero."""
        return self._bits(64) or 1

    def generate_trace_id(self) -> int:
        """Return 128 bits, not all zero."""
        return self._bits(128) or 1


class SpanRecorder:
    """Opens spans of a provider; a `dynamo_core.spans.Recorder`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("dynamo_core")

    def __call__(
        self,
        name: str,
        kind: Kind,
        attributes: Attributes | None,
        links: Sequence[TraceLink],
        parent: TraceContext | None,
    ) -> Span:
        """Start a span, like `start_span`."""
        remote = parent is not None
        if parent is None:
            parent = _innermost()
        if parent is None:
            above = otel_context.Context()
        elif parent.sampled:
            above = trace.set_span_in_context(NonRecordingSpan(_named(parent, remote=remote)), otel_context.Context())
        else:
            # The SDK takes nearly as long to record nothing as to record a span.
            own = parent.child()
            return _OtelSpan(NonRecordingSpan(_named(own, remote=False)), own)
        span = self._tracer.start_span(name, above, _KINDS[kind], attributes, [*map(Link, _known(links))])
        return _OtelSpan(span, _context_of(span.get_span_context(), "" if parent is None else parent.tracestate))


class _OtelSpan(Span):
    """A span of OpenTelemetry, which may be one that records nothing."""

    __slots__ = ("_attached", "_ended", "_span")

    def __init__(self, span: trace.Span, context: TraceContext) -> None:
        super().__init__(context)
        self._span = span
        self._ended = False
        self._attached: Token[otel_context.Context] | None = None

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set_attribute(self, key: str, value: Value) -> None:
        if not self._ended:
            self._span.set_attribute(key, value)

    def set_attributes(self, attributes: Attributes) -> None:
        if not self._ended:
            self._span.set_attributes(attributes)

    def set_error(self, text: str) -> None:
        if not self._ended:
            self._span.set_status(Status(StatusCode.ERROR, text))

    def add_link(self, link: TraceLink) -> None:
        if not self._ended:
            for context in _known((link,)):
                self._span.add_link(context)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._span.end()

    def __enter__(self) -> Span:
        self._attached = otel_context.attach(trace.set_span_in_context(self._span))
        return super().__enter__()

    def _leave(self) -> bool:
        attached, self._attached = self._attached, None
        here = super()._leave()
        if here and attached is not None:
            otel_context.detach(attached)
        return here


def _innermost() -> TraceContext | None:
    """Return the current span: ours, or one that was opened inside it with OpenTelemetry's own API."""
    ours = tracing.current.get()
    theirs = trace.get_current_span().get_span_context()
    if not theirs.is_valid or (ours is not None and f"{theirs.span_id:016x}" == ours.span_id):
        return ours
    return _context_of(theirs, theirs.trace_state.to_header())


def _context_of(context: SpanContext, tracestate: str) -> TraceContext:
    sampled = context.trace_flags.sampled
    return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", sampled, tracestate)


def _named(context: TraceContext, *, remote: bool) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        remote,
        _SAMPLED if context.sampled else _NOT_SAMPLED,
        TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _known(links: Sequence[TraceLink]) -> list[SpanContext]:
    """Return the links that can be: they come from other processes. The SDK leaves out those that are all zero."""
    return [
        SpanContext(int(link.trace_id, 16), int(link.span_id, 16), is_remote=True, trace_flags=_SAMPLED)
        for link in links
        if _HEX.fullmatch(f"{link.trace_id}/{link.span_id}")
    ]
