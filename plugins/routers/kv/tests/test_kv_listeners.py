"""Routers are notified of ended requests for as long as they live, and not kept alive."""

from __future__ import annotations

import gc

import pytest
from dynamo_core.protocol import RequestRecord
from dynamo_plugin_router_kv import dynamo_request_finished, listeners


class Told:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)


RECORD = RequestRecord(
    request_id="r",
    model="m",
    endpoint="completions",
    request_type="unary",
    status="success",
    error_type="",
    http_status=200,
    prompt_tokens=1,
    output_tokens=1,
    duration=1.0,
    time_to_first_token=None,
    finish_reason="stop",
    instance_id=None,
    trace_id="",
    span_id="",
    x_request_id=None,
)


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "_listeners", [])


def test_listeners_are_called_until_unregistered() -> None:
    one, other = Told(), Told()
    listeners.register(one)
    listeners.register(other)

    dynamo_request_finished(RECORD)
    listeners.unregister(one)
    listeners.unregister(one)
    dynamo_request_finished(RECORD)

    assert (one.records, other.records) == ([RECORD], [RECORD, RECORD])


def test_a_collected_listener_leaves_no_reference() -> None:
    one, other = Told(), Told()
    listeners.register(one)
    listeners.register(other)

    del one
    gc.collect()
    dynamo_request_finished(RECORD)

    assert other.records == [RECORD]
    assert len(listeners._listeners) == 1


def test_an_unregistered_listener_can_be_collected() -> None:
    one = Told()
    listeners.register(one)
    listeners.unregister(one)

    del one
    gc.collect()

    assert listeners._listeners == []
