"""A recorder whose spans stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from dynamo_core import spans
from dynamo_runtime.telemetry.otel import RandomIds, SpanRecorder
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased


class Recorded:
    """What was recorded, and the provider that did."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False, id_generator=RandomIds()
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that have ended, in that order."""
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def record() -> Iterator[Callable[..., Recorded]]:
    """Switch recording on, for the rest of the test."""

    def switch_on(ratio: float = 1.0) -> Recorded:
        recorded = Recorded(ratio)
        spans.set_recorder(SpanRecorder(recorded.provider))
        return recorded

    yield switch_on
    spans.set_recorder(None)
