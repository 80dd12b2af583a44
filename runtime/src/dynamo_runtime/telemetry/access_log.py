"""The built-in listener of `dynamo_request_finished`: one log line per client request."""

from __future__ import annotations

import logging
from typing import Any

from dynamo_core.hookspecs import hookimpl
from dynamo_core.protocol.records import RequestRecord

log = logging.getLogger("dynamo.access")


class AccessLog:
    """Writes one line on logger ``dynamo.access`` for each request that ended. Register it like any hook plugin."""

    @hookimpl
    def dynamo_request_finished(self, record: RequestRecord) -> None:
        """Log the record at level info, without the fields that are None."""
        if log.isEnabledFor(logging.INFO):
            log.info("request finished", extra={"fields": fields(record)})


def fields(record: RequestRecord) -> dict[str, Any]:
    """Return the fields of a line. Durations are in milliseconds, the worker's id in hex."""
    row: dict[str, Any] = {
        "model": record.model,
        "endpoint": record.endpoint,
        "type": record.request_type,
        "status": record.status,
        "http_status": record.http_status,
        "error_type": record.error_type or None,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "duration_ms": _milliseconds(record.duration),
        "ttft_ms": _milliseconds(record.time_to_first_token),
        "finish_reason": record.finish_reason,
        "instance_id": None if record.instance_id is None else f"{record.instance_id:016x}",
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "span_id": record.span_id,
        "x_request_id": record.x_request_id,
        "key_id": record.key_id or None,
        "tenant": record.tenant if record.key_id else None,
    }
    return {key: value for key, value in row.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
