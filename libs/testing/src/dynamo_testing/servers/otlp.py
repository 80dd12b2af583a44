"""An OTLP collector on the loopback, and the histograms it received. Needs the extra `otlp`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality

METRICS, TRACES = "/v1/metrics", "/v1/traces"
_PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True, slots=True)
class Received:
    """One request of an exporter. Names of headers are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class OtlpReceiver:
    """A receiver that keeps requests, and answers with `status` once `answering` is set.

    Enter it to serve, in threads.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()
        self._news = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        # The argument is how often it looks whether it is to end, in seconds.
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="otlp-receiver", daemon=True
        )
        #: Where it is, without a path.
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.answering.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def bodies(self, path: str) -> list[bytes]:
        """Return what was sent to a path as it should be, in order."""
        found = [one for one in list(self.received) if one.path == path]
        return [one.body for one in found if one.headers.get("content-type") == _PROTOBUF]

    def until(self, condition: Callable[[], object], seconds: float = 20) -> bool:
        """Return whether the condition holds within that time. It is asked again after each request. Blocks."""
        with self._news:
            return bool(self._news.wait_for(condition, seconds))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(headers["content-length"]))
                with receiver._news:
                    receiver.received.append(Received(self.path, headers, body))
                    receiver._news.notify_all()
                receiver.answering.wait(60)
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: the check says what went wrong."""

        return Handler


@dataclass(frozen=True, slots=True)
class Histogram:
    """The values of one set of attributes of one instrument. `counts` has one more than there are `bounds`."""

    name: str
    unit: str
    resource: Mapping[str, Any]
    attributes: Mapping[str, Any]
    delta: bool
    count: int
    sum: float
    bounds: Sequence[float]
    counts: Sequence[int]


def histograms(body: bytes) -> list[Histogram]:
    """Return the histograms with fixed buckets of one request."""
    return [
        Histogram(
            name=metric.name,
            unit=metric.unit,
            resource=plain(sent.resource.attributes),
            attributes=plain(point.attributes),
            delta=metric.histogram.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA,
            count=point.count,
            sum=point.sum,
            bounds=list(point.explicit_bounds),
            counts=list(point.bucket_counts),
        )
        for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for scope in sent.scope_metrics
        for metric in scope.metrics
        for point in metric.histogram.data_points
    ]


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes on the wire as a mapping."""
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}
