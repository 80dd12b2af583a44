"""The settings of the extension: its entry in the config file, and OpenTelemetry's variables.

The SDK reads the variables itself, and takes a default in place of a value that is wrong. Here such a value is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from dynamo_core import PluginConfig, SettingsMismatch
from dynamo_core.errors import ConfigError
from pydantic import Field, field_validator

#: A header as the SDK takes it. It writes another one, with its secret, to the log, and goes on without it.
_HEADER: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\s*=[ !#-+\--:<-\[\]-~]*")
#: What the collector's address is followed by.
_PATH: Final = "/v1/metrics"


class OtelMetricsConfig(PluginConfig):
    """The keys of the extension's entry in the config file, beside `use`. Each goes before its variable."""

    endpoint: str | None = Field(
        default=None,
        description=f"The address of the collector; {_PATH} is added. Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    interval: float | None = Field(
        default=None,
        ge=0.1,
        le=3600,
        description="Seconds between two exports. Default: OTEL_METRIC_EXPORT_INTERVAL, or 60.",
    )

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if any(sign in value for sign in "@?#"):
            # Without the text: it holds what should not be shown.
            raise SettingsMismatch(
                "holds more than an address, which would show in logs: set the variable OTEL_EXPORTER_OTLP_HEADERS"
            )
        if not _is_address(value):
            raise ValueError(f"{value!r} is not an address such as http://127.0.0.1:4318")
        return value.rstrip("/").removesuffix(_PATH) + _PATH


def check_environment(environment: Mapping[str, str], config: OtelMetricsConfig) -> None:
    """Refuse a variable that has an effect and a value that is none.

    Raises:
        ConfigError: it names the variable and the remedy. Values that may hold a secret are not shown.
    """
    for rule in _RULES:
        name = next((name for name in rule.names if environment.get(name, "").strip()), None)
        if name is None or (rule.key and getattr(config, rule.key) is not None):
            continue
        value = environment[name].strip()
        if not rule.accepts(value):
            shown = "its value" if rule.secret else repr(value)
            raise ConfigError(f"environment {name}: {shown} cannot be used; unset it or set it to {rule.right}")


class _Rule(NamedTuple):
    """The constraint on a value. Of several variables the first that is set is in force, and none if `key` is set."""

    names: tuple[str, ...]
    accepts: Callable[[str], bool]
    right: str
    key: str = ""
    secret: bool = False


def _exporter(name: str) -> tuple[str, str]:
    return f"OTEL_EXPORTER_OTLP_METRICS_{name}", f"OTEL_EXPORTER_OTLP_{name}"


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_amount(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _are_headers(text: str) -> bool:
    return all(_HEADER.fullmatch(part.strip()) for part in text.split(",") if part.strip())


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda text: text.lower() in values


_FILE: Final = "the path of a file that can be read"
_RULES: Final = (
    _Rule(_exporter("PROTOCOL"), _one_of("http/protobuf"), "http/protobuf"),
    _Rule(_exporter("ENDPOINT"), _is_address, "an address such as http://127.0.0.1:4318", "endpoint", secret=True),
    _Rule(_exporter("HEADERS"), _are_headers, "name=value, with commas between several", secret=True),
    _Rule(_exporter("TIMEOUT"), _is_amount, "a number of seconds above 0"),
    _Rule(_exporter("COMPRESSION"), _one_of("none", "gzip", "deflate"), "none, gzip or deflate"),
    *(
        _Rule(_exporter(name), lambda text: Path(text).is_file(), _FILE)
        for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
    ),
    _Rule(("OTEL_METRIC_EXPORT_INTERVAL",), _is_amount, "a number of milliseconds above 0", "interval"),
    _Rule(("OTEL_METRIC_EXPORT_TIMEOUT",), _is_amount, "a number of milliseconds above 0"),
    _Rule(
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",),
        _one_of("cumulative", "delta", "lowmemory"),
        "cumulative, delta or lowmemory",
    ),
    _Rule(
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION",),
        _one_of("explicit_bucket_histogram", "base2_exponential_bucket_histogram"),
        "explicit_bucket_histogram or base2_exponential_bucket_histogram",
    ),
)
