"""The switch of span export: off unless ``OTEL_EXPORT_ENABLED`` says so, and then by OTLP over HTTP.

OpenTelemetry is imported only when it is on. docs/reference/telemetry.md lists the variables.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

from dynamo_core import spans
from dynamo_core.errors import ConfigError

log = logging.getLogger(__name__)

ENABLED = "OTEL_EXPORT_ENABLED"
RATIO = "OTEL_TRACES_SAMPLE_RATIO"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
#: The only supported protocol.
PROTOCOL = "http/protobuf"

#: Seconds that a process which ends waits for its last spans to leave.
FLUSH_TIMEOUT = 5.0

_ON = frozenset({"1", "true", "yes", "on"})

_close: Callable[[], None] | None = None


def export_enabled(env: Mapping[str, str] | None = None) -> bool:
    """Return whether spans are to be exported. ``OTEL_SDK_DISABLED`` wins."""
    env = os.environ if env is None else env
    return _true(env.get(ENABLED, "")) and not _true(env.get("OTEL_SDK_DISABLED", ""))


def configure_export(service_name: str) -> bool:
    """Begin to export spans, if it is enabled; whether it is. ``OTEL_SERVICE_NAME`` goes before `service_name`.

    Raises:
        ConfigError: a variable is wrong, or the exporter is not installed.
    """
    global _close
    if not export_enabled():
        return False
    _check_protocol(os.environ)
    ratio = _ratio(os.environ)
    try:
        from dynamo_runtime.telemetry import otel

        recorder, close = otel.connect(service_name, ratio)
    except ImportError as error:
        raise ConfigError(
            f"environment {ENABLED}: traces cannot be exported, {error.name or 'a package'} is not installed; "
            'install it with pip install "dynamo-runtime[otlp]", or set the variable to 0'
        ) from error
    shutdown_export()
    _close = close
    spans.set_recorder(recorder)
    return True


def shutdown_export(timeout: float = FLUSH_TIMEOUT) -> bool:
    """End export, wait up to `timeout` seconds for the recorded spans to leave, and return whether they did.

    Safe twice. It blocks: call it when the event loop has ended.
    """
    global _close
    close, _close = _close, None
    if close is None:
        return True
    spans.set_recorder(None)
    # The exporter retries for as long as its own deadlines allow and cannot be stopped, so it is left behind.
    flusher = threading.Thread(target=close, name="span-flush", daemon=True)
    flusher.start()
    flusher.join(timeout)
    if flusher.is_alive():
        log.warning("the last spans could not be exported within %g s", timeout)
        return False
    return True


def _true(value: str) -> bool:
    return value.strip().lower() in _ON


def _check_protocol(env: Mapping[str, str]) -> None:
    for name in PROTOCOLS:
        value = env.get(name, "").strip()
        if value:
            if value != PROTOCOL:
                raise ConfigError(f"environment {name}: {value!r} is not spoken here; unset it or set it to {PROTOCOL}")
            return


def _ratio(env: Mapping[str, str]) -> float | None:
    text = env.get(RATIO, "").strip()
    if not text:
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"environment {RATIO}: {text!r} is not a share of traces; set it to a number from 0 to 1")
    return ratio
