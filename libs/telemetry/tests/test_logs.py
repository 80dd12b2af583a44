from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from dynamo_core import tracing
from dynamo_core.errors import ConfigError
from dynamo_core.tracing import TraceContext
from dynamo_telemetry import logs

log = logging.getLogger("dynamo_core.tests")


@pytest.fixture(autouse=True)
def _logging_ends() -> Iterator[None]:
    yield
    logs.shutdown_logging()


def rows(stream: io.StringIO) -> list[dict[str, Any]]:
    logs.shutdown_logging()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_json_line_has_time_level_target_and_message() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)

    log.info("served %d", 3)

    (row,) = rows(stream)
    assert {**row, "time": ""} == {"time": "", "level": "info", "target": "dynamo_core.tests", "message": "served 3"}
    assert row["time"].endswith("Z")
    assert datetime.fromisoformat(row["time"]).tzinfo is not None


def test_a_line_inside_a_request_carries_its_ids() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)
    trace = tracing.current.set(TraceContext("a" * 32, "b" * 16))
    request = logs.context.set(logs.LogContext("r-1", "x-1"))
    try:
        log.info("inside")
    finally:
        tracing.current.reset(trace)
        logs.context.reset(request)
    log.info("outside")

    inside, outside = rows(stream)
    assert inside["trace_id"] == "a" * 32
    assert inside["span_id"] == "b" * 16
    assert inside["request_id"] == "r-1"
    assert inside["x_request_id"] == "x-1"
    assert "trace_id" not in outside


def test_text_lines_can_be_read_by_people() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=False, stream=stream)

    log.warning("low on %s", "blocks", extra={"fields": {"worker": "a b", "free": 3}})
    logs.shutdown_logging()

    assert stream.getvalue().split(" ", 1)[1] == 'WARNING dynamo_core.tests: low on blocks worker="a b" free=3\n'


@pytest.mark.parametrize("as_json", [True, False])
def test_control_characters_are_escaped_in_log_lines(as_json: bool) -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=as_json, stream=stream)

    evil = "a\r\nfake line \x1b[2J\x9b1m\u2028\x00\ud800\u202etxt\u2066\u200f"
    log.info("model %s", evil, extra={"fields": {"x": evil}})
    logs.shutdown_logging()

    text = stream.getvalue()
    assert text.count("\n") == 1
    assert not any(char in text for char in "\r\x1b\x9b\u2028\x00\ud800\u202e\u2066\u200f")


def test_a_traceback_stays_with_its_line() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=False, stream=stream)

    try:
        raise ValueError("bad\x1bthing")
    except ValueError:
        log.exception("failed")
    logs.shutdown_logging()

    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("dynamo_core.tests: failed")
    assert rest[0] == "    Traceback (most recent call last):"
    assert rest[-1] == "    ValueError: bad\\x1bthing"


def test_a_traceback_is_a_field_in_json() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)

    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed")

    (row,) = rows(stream)
    assert row["exception"].endswith("ValueError: bad")


def test_keys_are_masked_and_long_messages_cut() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)

    log.info("got Authorization: Bearer abc.def-123 and sk-0123456789abcdef")
    log.info("x" * 100_000)

    masked, cut = rows(stream)
    assert masked["message"] == "got Authorization: Bearer *** and sk-***"
    assert len(cut["message"]) < logs.MAX_MESSAGE + 100


@pytest.mark.parametrize("as_json", [True, False])
def test_credentials_in_addresses_that_a_library_repeats_are_masked(as_json: bool) -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=as_json, stream=stream)
    told = [
        "cannot connect to nats://hunter2@h:4222: refused",
        "redis://:hunt/hunter2@h:6379/0 is away",
        "Max retries exceeded with url: https://h:1/v1/traces?a=1&api_key=hunter2 (refused)",
        "https://h?access-token=hunter2",
        "servers ['nats://h', 'tls://u:p@hunter2@h2']",
    ]

    for text in told:
        log.warning("%s", text)
    try:
        raise ValueError("no answer of amqp://u:hunter2@h")
    except ValueError:
        log.exception("see https://h:8000/v1/models?limit=5, or write to me@example.org")
    logs.shutdown_logging()

    text = stream.getvalue()
    assert "hunter2" not in text
    assert text.count("***@h") >= 4
    assert "https://h:8000/v1/models?limit=5, or write to me@example.org" in text


def test_masking_takes_no_longer_than_a_line_is_long() -> None:
    line = "://" * 3000 + "?token" * 2000 + "@"
    begun = time.process_time()
    logs._clean(line * 10, logs.MAX_TRACEBACK)

    assert time.process_time() - begun < 2


def test_other_libraries_log_from_warning_up() -> None:
    stream = io.StringIO()
    logs.configure_logging("debug", json=True, stream=stream)

    logging.getLogger("aiohttp.access").info("noise")
    logging.getLogger("asyncio").debug("noise")
    logging.getLogger("aiohttp.server").warning("trouble")
    logging.getLogger("dynamo_plugin_engine_x").debug("detail")

    assert [row["message"] for row in rows(stream)] == ["trouble", "detail"]


def test_records_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    logs.configure_logging("ERROR", json=True, stream=stream)

    log.warning("quiet")
    log.error("loud")

    assert [row["message"] for row in rows(stream)] == ["loud"]


def test_an_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"log\.level: 'chatty'"):
        logs.configure_logging("chatty", json=False)


def test_configuring_again_replaces_and_shutdown_is_safe_twice() -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    first, second = io.StringIO(), io.StringIO()

    logs.configure_logging("info", json=True, stream=first)
    logs.configure_logging("info", json=True, stream=second)
    log.info("once")
    logs.shutdown_logging()
    logs.shutdown_logging()

    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1
    assert (root.handlers, root.level) == (handlers, level)


def test_fields_never_override_the_standard_keys() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", json=True, stream=stream)

    log.info("true", extra={"fields": {"message": "false", "level": "x", "odd": object}})

    (row,) = rows(stream)
    assert row["message"] == "true"
    assert row["level"] == "info"
    assert row["odd"] == "<class 'object'>"


def test_an_unread_output_blocks_neither_logging_nor_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    monkeypatch.setattr(logs, "FLUSH_TIMEOUT", 0.05)
    reader, writer = os.pipe()
    stuck = os.fdopen(writer, "w")
    logs.configure_logging("info", json=True, stream=stuck)

    for _ in range(100):
        log.info("%s", "x" * 8000)
    logs.shutdown_logging()

    # The writer may end now that somebody reads.
    drain = threading.Thread(target=read_all, args=(reader,))
    drain.start()
    for thread in threading.enumerate():
        if thread.name == "log-flush" or "_monitor" in thread.name:
            thread.join(5)
            assert not thread.is_alive()
    stuck.close()
    drain.join(5)
    assert not drain.is_alive()


class Stuck(io.StringIO):
    """An output that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.go_on.wait(5)
        return super().write(text)


def test_lines_that_were_dropped_are_counted_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 10)
    stream = Stuck()
    logs.configure_logging("info", json=True, stream=stream)
    for number in range(100):
        log.info("line %d", number)

    stream.go_on.set()
    while stream.getvalue().count('"line ') < 10:
        pass
    log.info("last")

    messages = [row["message"] for row in rows(stream)]
    dropped = [int(text.split()[0]) for text in messages if text.endswith("lines were dropped: the output is too slow")]
    assert messages[-1] == "last"
    assert sum(dropped) > 0
    assert sum(text.startswith("line ") for text in messages) + sum(dropped) == 100


def read_all(descriptor: int) -> None:
    with os.fdopen(descriptor, "rb") as pipe:
        while pipe.read(65536):
            pass
