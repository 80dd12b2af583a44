"""The export by OTLP over HTTP: an SDK thread sends records every few seconds and once at the end."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http import metric_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource

from dynamo_plugin_extension_otel_metrics.gen_ai_histograms import Instruments

log = logging.getLogger(__name__)

#: What the instruments say they are from.
_SCOPE: Final = "dynamo_plugin_extension_otel_metrics"
#: What the service is called unless the environment names it.
SERVICE: Final = "dynamo-frontend"


class Export:
    """Instruments whose values are sent to a collector until `close`."""

    def __init__(self, endpoint: str | None, interval: float | None, instance: str) -> None:
        """`interval` is in seconds. `instance` tells the streams of this process from those of others.

        The environment says where and how often values are sent if the first two are None.
        """
        self._exporter = _Exporter(endpoint=endpoint)
        reader = PeriodicExportingMetricReader(self._exporter, None if interval is None else interval * 1000)
        self._provider = MeterProvider(
            [reader],
            resource=_resource(instance),
            # Values are recorded apart from the spans of their requests.
            exemplar_filter=AlwaysOffExemplarFilter(),
            # Its handler would wait for longer than a process may take to end.
            shutdown_on_exit=False,
        )
        self.instruments = Instruments(self._provider.get_meter(_SCOPE))

    def close(self, timeout: float) -> None:
        """Send what was recorded last, for up to `timeout` seconds, and end. It blocks: call it in a thread."""
        # The SDK waits for its thread no longer than that, and then has it give up. A request that a collector does not
        # answer cannot be broken off: its thread is left behind, and no process waits for it.
        self._provider.shutdown(timeout_millis=timeout * 1000)
        if self._exporter.exporting:
            log.warning("the last metrics could not be exported within %g s", timeout)


class _Exporter(OTLPMetricExporter):
    """Tells that it fails once, and once that it works again.

    The SDK writes several lines for each export that fails, for as long as a collector is away.
    """

    def __init__(self, *, endpoint: str | None) -> None:
        super().__init__(endpoint=endpoint)
        #: The thread that exports now.
        self._thread: int | None = None
        self._reason = ""
        self._failing = False

    @property
    def exporting(self) -> bool:
        """Whether an export is under way."""
        return self._thread is not None

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        self._thread, self._reason = threading.get_ident(), ""
        _sdk_log.addFilter(self._keep)
        try:
            result = super().export(metrics_data, timeout_millis, **kwargs)
        finally:
            _sdk_log.removeFilter(self._keep)
            self._thread = None
        failed = result is not MetricExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("metrics are not exported, which is told once: %s", self._reason)
        elif self._failing and not failed:
            log.info("metrics are exported again")
        self._failing = failed
        return result

    def _keep(self, line: logging.LogRecord) -> bool:
        """Return whether a line of the SDK is logged: not one of this export, of which the first says what is wrong."""
        if line.thread != self._thread:
            return True
        self._reason = self._reason or line.getMessage()
        return False


_sdk_log: Final = logging.getLogger(metric_exporter.__name__)


def _resource(instance: str) -> Resource:
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({SERVICE_INSTANCE_ID: instance} | ({} if named else {SERVICE_NAME: SERVICE}))
