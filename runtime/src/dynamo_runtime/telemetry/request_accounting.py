"""The accounting of client requests: their metrics, their ids, and their record at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from dynamo_core import tracing
from dynamo_core.contracts.requests.principal import ANONYMOUS, Principal
from dynamo_core.contracts.requests.request_events import RequestFinished, RequestFirstToken, RequestReceived
from dynamo_core.errors import CANCELLED, CLIENT_CLOSED_REQUEST, HTTP_ROWS, INTERNAL, OVERLOAD, DynamoError
from dynamo_core.protocol.decoding import truncated
from dynamo_core.protocol.ids import client_request_id, new_request_id
from dynamo_core.protocol.records import RequestRecord
from dynamo_core.spans import Span, start_span
from dynamo_telemetry import logs
from dynamo_telemetry.gen_ai import gen_ai_attributes
from dynamo_telemetry.metrics import Counter, Gauge, Metrics

from dynamo_runtime.telemetry.request_events import RequestEventHub
from dynamo_runtime.telemetry.stages import PREPROCESS, Stage, Stages

log = logging.getLogger(__name__)

DURATION_BUCKETS = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
TTFT_BUCKETS = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
ITL_BUCKETS = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21),
    *(0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44, 80),
)
INPUT_BUCKETS = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
OUTPUT_BUCKETS = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)

#: How many models get series of their own; the rest share the label value `OTHER`.
MAX_MODELS = 1000
OTHER = "other"

#: The lowest HTTP status of a server error.
_SERVER_ERROR = 500

#: What kind of failure an error type is; any other is internal.
_CLASSES = {row.metric: row.metric_class for row in HTTP_ROWS.values()}
_FAILURE = ("class", "reason")


class _Families:
    """The metrics of requests, made once."""

    def __init__(self, metrics: Metrics, prefix: str) -> None:
        self.changed = metrics.changed
        model = ("model",)
        self.finished = metrics.counter(
            f"{prefix}_requests_total",
            "Requests that have ended. status is success or error; error_type is empty for a success.",
            ("model", "endpoint", "request_type", "status", "error_type"),
        )
        self.started = metrics.counter(
            f"{prefix}_requests_started_total",
            "Requests that have begun.",
            ("endpoint", "model", "request_type"),
        )
        self.cancelled = metrics.counter(
            f"{prefix}_model_cancellation_total",
            "Requests whose client disconnected or cancelled before it had the whole answer.",
            ("endpoint", "model", "request_type"),
        )
        self.rejected = metrics.counter(
            f"{prefix}_model_rejection_total",
            "Requests refused for load: workers or the queue were full. Refusals by rate limits do not count.",
            ("endpoint", "model"),
        )
        self.output_tokens = metrics.counter(
            f"{prefix}_output_tokens_total", "Tokens of answers that clients were sent.", model
        )
        self.active = metrics.gauge(
            f"{prefix}_active_requests", "Requests that have arrived and whose answer has not ended.", model
        )
        self.inflight = metrics.gauge(
            f"{prefix}_inflight_requests", "Requests whose prompt is ready and whose answer has not ended.", model
        )
        self.queued = metrics.gauge(f"{prefix}_queued_requests", "Requests that have no output yet.", model)
        self.disconnected = metrics.gauge(
            f"{prefix}_disconnected_clients",
            "Clients that disconnected before the end of their answer, since the process started.",
        ).labels()
        self._make_histograms(metrics, prefix, model)
        self.preprocess = Stages(metrics, prefix).stage(PREPROCESS)
        self.failures = metrics.counter(
            f"{prefix}_failures_total",
            "Requests that have failed, also those for no known model. class is the kind of the error, reason its "
            "error_type; rate_limited and quota_exceeded are refusals by limits, not for load.",
            _FAILURE,
        )

    def _make_histograms(self, metrics: Metrics, prefix: str, model: tuple[str, ...]) -> None:
        self.duration = metrics.histogram(
            f"{prefix}_request_duration_seconds",
            "Seconds from the arrival of a request to its end, whether it succeeds or fails.",
            model,
            DURATION_BUCKETS,
        )
        self.ttft = metrics.histogram(
            f"{prefix}_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first output.",
            model,
            TTFT_BUCKETS,
        )
        self.itl = metrics.histogram(
            f"{prefix}_inter_token_latency_seconds",
            "Seconds between two tokens of an answer. Tokens that are sent at once share the time since those before.",
            model,
            ITL_BUCKETS,
        )
        self.input_length = metrics.histogram(
            f"{prefix}_input_sequence_tokens", "Tokens of a prompt.", model, INPUT_BUCKETS
        )
        self.output_length = metrics.histogram(
            f"{prefix}_output_sequence_tokens",
            "Tokens of an answer, whole or not; a request without output does not count.",
            model,
            OUTPUT_BUCKETS,
        )
        self.cached = metrics.histogram(
            f"{prefix}_cached_tokens",
            "Tokens of a prompt that the engine found in its cache, where it says so and the request succeeds.",
            model,
            INPUT_BUCKETS,
        )

    def failed(self, error_type: str) -> None:
        """Count a failure."""
        self.failures.labels(_CLASSES.get(error_type, _CLASSES[INTERNAL]), error_type).inc()


class _ModelSeries:
    """The children for one model."""

    __slots__ = (
        "active",
        "cached",
        "duration",
        "endpoints",
        "inflight",
        "input_length",
        "itl",
        "name",
        "output_length",
        "output_tokens",
        "queued",
        "ttft",
    )

    def __init__(self, families: _Families, name: str) -> None:
        self.name = name
        self.output_tokens = families.output_tokens.labels(name)
        self.active = families.active.labels(name)
        self.inflight = families.inflight.labels(name)
        self.queued = families.queued.labels(name)
        self.duration = families.duration.labels(name)
        self.ttft = families.ttft.labels(name)
        self.itl = families.itl.labels(name)
        self.input_length = families.input_length.labels(name)
        self.output_length = families.output_length.labels(name)
        self.cached = families.cached.labels(name)
        #: By endpoint and request type.
        self.endpoints: dict[tuple[str, str], _EndpointSeries] = {}


class _EndpointSeries:
    """The children for one model, endpoint and request type."""

    __slots__ = ("_families", "_labels", "_outcomes", "started")

    def __init__(self, families: _Families, model: str, endpoint: str, request_type: str) -> None:
        self._families = families
        self._labels = (model, endpoint, request_type)
        self._outcomes: dict[str, Counter] = {}
        self.started = families.started.labels(endpoint, model, request_type)

    def finished(self, status: str, error_type: str) -> Counter:
        child = self._outcomes.get(error_type)
        if child is None:
            child = self._outcomes[error_type] = self._families.finished.labels(*self._labels, status, error_type)
        return child

    def cancelled(self) -> Counter:
        model, endpoint, request_type = self._labels
        return self._families.cancelled.labels(endpoint, model, request_type)

    def rejected(self) -> Counter:
        model, endpoint, _ = self._labels
        return self._families.rejected.labels(endpoint, model)

    def failed(self, error_type: str) -> None:
        self._families.failed(error_type)

    def ended(self) -> None:
        """Mark the metrics as changed: a request has ended."""
        self._families.changed()


class RequestTracker:
    """Begins requests; implements `dynamo_core.contracts.frontend.RequestLog`.

    `announce` is given the record of each request, once, after every gauge it held is back; what it raises is logged.
    `clock` gives seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        announce: Callable[[RequestRecord], None],
        prefix: str = "dynamo_frontend",
        *,
        clock: Callable[[], float] = time.perf_counter,
        events: RequestEventHub | None = None,
    ) -> None:
        self._families = _Families(metrics, prefix)
        self._events = events or RequestEventHub()
        self._announce = announce
        self._clock = clock
        self._models: dict[str, _ModelSeries] = {}
        self._other: _ModelSeries | None = None

    def begin(
        self, *, model: str, endpoint: str, streaming: bool, headers: dict[str, str], principal: Principal = ANONYMOUS
    ) -> Inflight:
        """Return a request for a model that exists. It is counted in when the returned context is entered.

        `endpoint` is the label value, such as ``chat_completions`` or ``embeddings``. `headers` has lower-case
        names; an invalid `traceparent` or `x-request-id` is as good as none. `principal` is who asks.
        """
        series = self._models.get(model) or self._series(model)
        request_type = "stream" if streaming else "unary"
        part = series.endpoints.get((endpoint, request_type))
        if part is None:
            part = _EndpointSeries(self._families, series.name, endpoint, request_type)
            series.endpoints[endpoint, request_type] = part
        span = start_span("http-request", kind="server", parent=tracing.TraceContext.from_headers(headers))
        return Inflight(
            model=model,
            endpoint=endpoint,
            request_type=request_type,
            span=span,
            x_request_id=client_request_id(headers.get("x-request-id")),
            series=series,
            part=part,
            disconnects=self._families.disconnected,
            preprocess=self._families.preprocess,
            announce=self._announce,
            clock=self._clock,
            principal=principal,
            events=self._events,
        )

    def refused(self, error_type: str) -> None:
        """Count a request that ended before its model was known: a failure without a model."""
        self._families.failed(error_type)
        self._families.changed()

    def _series(self, model: str) -> _ModelSeries:
        if len(self._models) >= MAX_MODELS:
            if self._other is None:
                self._other = _ModelSeries(self._families, OTHER)
            return self._other
        series = self._models[model] = _ModelSeries(self._families, model)
        return series


class Inflight:
    """One client request; implements `dynamo_core.contracts.frontend.InflightRequest`.

    Until `succeed` is called the request counts as failed. Of several outcomes that are reported the first one stands,
    except that a client that went away is always counted as such.
    """

    __slots__ = (
        "_announce",
        "_cached_tokens",
        "_clock",
        "_disconnects",
        "_endpoint",
        "_entered",
        "_error_type",
        "_events",
        "_finish_reason",
        "_first",
        "_gap_counts",
        "_gap_sum",
        "_gone",
        "_http_status",
        "_in_pipeline",
        "_instance_id",
        "_last",
        "_model",
        "_output_tokens",
        "_part",
        "_preparing",
        "_preprocess",
        "_principal",
        "_prompt_tokens",
        "_reason",
        "_request_type",
        "_scope",
        "_series",
        "_span",
        "_started",
        "_x_request_id",
        "metadata",
        "request_id",
        "trace",
        "trace_id",
    )

    def __init__(
        self,
        *,
        model: str,
        endpoint: str,
        request_type: str,
        span: Span,
        x_request_id: str | None,
        series: _ModelSeries,
        part: _EndpointSeries,
        disconnects: Gauge,
        preprocess: Stage,
        announce: Callable[[RequestRecord], None],
        clock: Callable[[], float],
        principal: Principal,
        events: RequestEventHub,
    ) -> None:
        self.request_id = new_request_id()
        self.trace = span.context
        self.trace_id = span.context.trace_id
        self.metadata = span.context.to_headers()
        if x_request_id is not None:
            self.metadata["x-request-id"] = x_request_id
        self._model = model
        self._endpoint = endpoint
        self._request_type = request_type
        self._x_request_id = x_request_id
        self._principal = principal
        self._events = events
        self._series = series
        self._part = part
        self._disconnects = disconnects
        self._preprocess = preprocess
        #: When the preprocessing began, while it is going on.
        self._preparing: float | None = None
        self._announce = announce
        self._clock = clock
        self._started = clock()
        self._entered = False
        self._in_pipeline = False
        self._first: float | None = None
        self._last = 0.0
        self._gap_counts: list[int] | None = None
        self._gap_sum = 0.0
        self._prompt_tokens: int | None = None
        self._output_tokens = 0
        self._cached_tokens: int | None = None
        self._instance_id: int | None = None
        self._finish_reason: str | None = None
        self._error_type: str | None = None
        self._http_status = 0
        self._reason = ""
        self._gone = False
        self._span = span
        self._scope = logs.RequestScope(self.request_id, x_request_id)
        if span.recording:
            self._describe_start()

    def __enter__(self) -> Inflight:
        self._entered = True
        self._part.started.inc()
        self._series.active.inc()
        self._series.queued.inc()
        self._preparing = self._preprocess.enter()
        self._span.__enter__()
        self._scope.__enter__()
        if self._events.active:
            self._publish_received()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._entered:
            return
        self._entered = False
        if exc and exc[0] in (asyncio.CancelledError, GeneratorExit):
            # The listener cancels a handler whose client left or whose time is over; no client reads its answer.
            self.fail(CANCELLED, CLIENT_CLOSED_REQUEST)
        self._release()
        record = self._record(self._clock())
        if self._span.recording:
            self._describe(record)
        if self._events.active:
            self._events.publish(RequestFinished(self.request_id, time.monotonic(), record, self._reason))
        try:
            self._announce(record)
        except Exception:
            log.exception("a listener of finished requests failed")
        finally:
            self._scope.__exit__()
            self._span.__exit__(None, None, None)

    def prompt_tokens(self, count: int) -> None:
        """Record the length of the prompt. Only the first call counts."""
        if self._entered and self._prompt_tokens is None:
            self._prompt_tokens = count
            self._series.input_length.observe(count)
            self._prepared()
            self._enter_pipeline()

    def output(self, tokens: int) -> None:
        """Record new tokens that are about to be sent to the client; call once per write, not per token."""
        if tokens <= 0 or not self._entered:
            return
        now = self._clock()
        if self._first is None:
            self._first_output(now)
        else:
            gap = now - self._last
            counts = self._gap_counts
            if counts is None:
                counts = self._gap_counts = [0] * (len(ITL_BUCKETS) + 1)
            # Tokens of one write share the time since the write before.
            counts[bisect_left(ITL_BUCKETS, gap / tokens)] += tokens
            self._gap_sum += gap
        self._last = now
        self._output_tokens += tokens
        self._series.output_tokens.inc(tokens)

    def routed(self, instance_id: int | None) -> None:
        """Record the worker that accepted the request; after a migration, another one."""
        if self._entered:
            self._instance_id = instance_id
            self._enter_pipeline()

    def succeed(self, finish_reason: str | None, cached_tokens: int | None = None) -> None:
        """Record that the whole answer was sent. `cached_tokens` are prompt tokens from the engine's cache."""
        if self._error_type is None:
            self._cached_tokens = cached_tokens
            self._error_type = ""
            self._http_status = 200
            self._finish_reason = finish_reason

    def fail(self, error_type: str, http_status: int, error: BaseException | None = None) -> None:
        """Record what the client is told, and the error behind it, which operators see if it is the server's."""
        if self._error_type is None:
            self._error_type = error_type or INTERNAL
            self._http_status = http_status
            # The error itself would keep its frames, and with them this request.
            if error is not None and http_status >= _SERVER_ERROR:
                self._reason = _reason(error)

    def disconnected(self) -> None:
        """Record that the client disconnected. Do nothing once the whole answer was sent."""
        if self._gone or self._error_type == "":
            return
        self._gone = True
        self.fail(CANCELLED, CLIENT_CLOSED_REQUEST)

    def _describe_start(self) -> None:
        """Write what is known at the start to the span."""
        self._span.set_attributes(
            {
                # Models are asked with POST only.
                "method": "POST",
                "endpoint": self._endpoint,
                "model": self._model,
                "request_id": self.request_id,
                "streaming": self._request_type == "stream",
                **gen_ai_attributes(self._endpoint, self._model),
            }
        )
        if self._x_request_id is not None:
            self._span.set_attribute("x_request_id", self._x_request_id)

    def _publish_received(self) -> None:
        received = RequestReceived(
            self.request_id,
            time.monotonic(),
            self._model,
            self._endpoint,
            self._request_type,
            self._principal,
            self._x_request_id,
            self.trace_id,
        )
        self._events.publish(received)

    def _enter_pipeline(self) -> None:
        if not self._in_pipeline:
            self._in_pipeline = True
            self._series.inflight.inc()

    def _first_output(self, now: float) -> None:
        self._first = now
        self._series.queued.dec()
        self._series.ttft.observe(now - self._started)
        self._enter_pipeline()
        if self._events.active:
            self._events.publish(RequestFirstToken(self.request_id, time.monotonic()))

    def _prepared(self) -> None:
        since, self._preparing = self._preparing, None
        if since is not None:
            self._preprocess.leave(since)

    def _release(self) -> None:
        series = self._series
        self._prepared()
        series.active.dec()
        if self._first is None:
            series.queued.dec()
        if self._in_pipeline:
            series.inflight.dec()

    def _record(self, now: float) -> RequestRecord:
        """Count the request out and describe it."""
        error_type = INTERNAL if self._error_type is None else self._error_type
        status = "error" if error_type else "success"
        series = self._series
        self._part.finished(status, error_type).inc()
        if self._gone:
            self._disconnects.inc()
        if self._gone or error_type == CANCELLED:
            self._part.cancelled().inc()
        if error_type:
            self._part.failed(error_type)
            if error_type == OVERLOAD:
                self._part.rejected().inc()
        if self._cached_tokens is not None:
            series.cached.observe(self._cached_tokens)
        series.duration.observe(now - self._started)
        if self._first is not None:
            series.output_length.observe(self._output_tokens)
        if self._gap_counts is not None:
            series.itl.observe_many(self._gap_counts, self._gap_sum)
        self._part.ended()
        principal = self._principal
        return RequestRecord(
            request_id=self.request_id,
            model=self._model,
            endpoint=self._endpoint,
            request_type=self._request_type,
            status=status,
            error_type=error_type,
            http_status=self._http_status or 500,
            prompt_tokens=self._prompt_tokens or 0,
            output_tokens=self._output_tokens,
            duration=now - self._started,
            time_to_first_token=None if self._first is None else self._first - self._started,
            finish_reason=self._finish_reason,
            instance_id=self._instance_id,
            trace_id=self.trace.trace_id,
            span_id=self.trace.span_id,
            x_request_id=self._x_request_id,
            key_id=principal.key_id,
            tenant=principal.tenant,
            user=principal.user,
            session=principal.session,
            cached_tokens=self._cached_tokens,
        )

    def _describe(self, record: RequestRecord) -> None:
        """Write the outcome to the span. A mistake of the client, or its disconnect, is no error of the server."""
        span = self._span
        span.set_attributes(
            {
                "status": record.http_status,
                "input_tokens": record.prompt_tokens,
                "output_tokens": record.output_tokens,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "gen_ai.response.finish_reasons": [record.finish_reason] if record.finish_reason else [],
            }
        )
        if record.error_type:
            span.set_attributes({"error_type": record.error_type, "error.type": record.error_type})
            if record.http_status >= _SERVER_ERROR:
                span.set_error(record.error_type)


def _reason(error: BaseException) -> str:
    # The text of an error that is not ours may hold anything.
    return f"{error.kind}: {truncated(error.message)}" if isinstance(error, DynamoError) else type(error).__name__
