from __future__ import annotations

import io
import json
from typing import Any

from dynamo_core.protocol.records import RequestRecord
from dynamo_runtime.telemetry.access_log import AccessLog
from dynamo_telemetry import logs


def record_of(chat: dict[str, Any], **fields: Any) -> RequestRecord:
    return RequestRecord(
        request_id="r-1",
        **chat,
        prompt_tokens=3,
        output_tokens=4,
        duration=1.5,
        time_to_first_token=0.25,
        instance_id=0xAB,
        trace_id="a" * 32,
        span_id="b" * 16,
        **fields,
    )


def line_of(record: RequestRecord) -> dict[str, Any]:
    """Return what is logged of a record."""
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)
    AccessLog().dynamo_request_finished(record)
    logs.shutdown_logging()
    line: dict[str, Any] = json.loads(stream.getvalue())
    return line


def test_the_access_log_names_key_and_tenant_and_never_user_or_session(chat: dict[str, Any]) -> None:
    row = line_of(record_of(chat, key_id="k", tenant="blue", user="mallory", session="dark-room"))

    assert (row["key_id"], row["tenant"]) == ("k", "blue")
    assert not {"mallory", "dark-room"} & set(map(str, row.values()))


def test_the_access_log_writes_one_line_per_request(chat: dict[str, Any]) -> None:
    row = line_of(record_of(chat))

    del row["time"]
    assert row == {
        "level": "info",
        "target": "dynamo.access",
        "message": "request finished",
        "model": "m",
        "endpoint": "chat_completions",
        "type": "stream",
        "status": "success",
        "http_status": 200,
        "prompt_tokens": 3,
        "output_tokens": 4,
        "duration_ms": 1500.0,
        "ttft_ms": 250.0,
        "finish_reason": "stop",
        "instance_id": "00000000000000ab",
        "request_id": "r-1",
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
    }
