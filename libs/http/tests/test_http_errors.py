from __future__ import annotations

import json
import math

import pytest
from aiohttp import web
from dynamo_core.errors import (
    LIMITS,
    BackendError,
    Cancelled,
    ConnectionTimeout,
    DeadlineExceeded,
    Disconnected,
    DynamoError,
    InvalidArgument,
    ModelNotFound,
    NotSupported,
    Problem,
    QuotaExceeded,
    RateLimited,
    ServiceOverloaded,
    Unavailable,
    WorkerOverloaded,
    problem_of,
)
from dynamo_http.errors import error_body, error_response
from hypothesis import given
from hypothesis import strategies as st


def told(error: DynamoError) -> web.Response:
    return error_response(problem_of(error))


def test_a_message_that_quotes_a_client_is_cut() -> None:
    body = error_body(problem_of(InvalidArgument(f"there is no {'x' * 1_000_000}")))

    assert json.loads(body)["message"] == f"there is no {'x' * 1988}…"
    assert len(body) < 5000


def test_the_body_has_the_flat_keys_and_the_envelope_of_the_sdks() -> None:
    body = error_body(Problem(400, "temperature is too high", param="temperature", code="out_of_range"))

    assert json.loads(body) == {
        "error": {
            "message": "temperature is too high",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "out_of_range",
        },
        "message": "temperature is too high",
        "type": "invalid_request_error",
        "code": 400,
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "request_cancelled"),
        (500, "server_error"),
        (503, "service_unavailable"),
        (504, "timeout_error"),
    ],
)
def test_the_type_follows_the_status(status: int, kind: str) -> None:
    assert json.loads(error_body(Problem(status, "x")))["type"] == kind


def test_the_type_can_be_given() -> None:
    body = json.loads(error_body(Problem(503, "x", type="custom")))

    assert (body["type"], body["error"]["type"]) == ("custom", "custom")


def test_half_a_surrogate_pair_in_a_message_can_be_sent() -> None:
    assert json.loads(error_body(Problem(400, "bad \ud800", param="\ud800")))["message"] == "bad ?"


def test_a_response_carries_status_type_and_headers() -> None:
    response = error_response(Problem(503, "busy", retry_after=2))

    assert response.status == 503
    assert response.content_type == "application/json"
    assert response.headers["Retry-After"] == "2"


def test_overload_has_the_message_of_the_seed_documents() -> None:
    response = told(ServiceOverloaded(retry_after=1.2))

    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert body["message"] == "Service temporarily unavailable: All workers are busy, please retry later"
    assert (body["type"], body["code"]) == ("service_unavailable", 503)
    assert response.headers["Retry-After"] == "2"
    assert told(Unavailable("no worker")).headers["Retry-After"] == "1"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidArgument("n must be 1", field="n"), 400, "n must be 1"),
        (BackendError.InvalidArgument("too long"), 400, "too long"),
        (ModelNotFound("Model not found"), 404, "Model not found"),
        (Unavailable("no worker has registered yet"), 503, "no worker has registered yet"),
        (
            WorkerOverloaded("secret detail"),
            503,
            "Service temporarily unavailable: All workers are busy, please retry later",
        ),
        (Cancelled("x"), 499, "Request cancelled"),
        (NotSupported("no embeddings here"), 501, "no embeddings here"),
        (DeadlineExceeded("590 s"), 504, "The model did not answer in time"),
        (ConnectionTimeout("10.0.0.1:99"), 503, "The worker of this request was lost, please retry"),
        (Disconnected("10.0.0.1:99"), 503, "The worker of this request was lost, please retry"),
        (BackendError.Unknown("10.0.0.1:99"), 500, "Internal server error"),
    ],
)
def test_errors_become_responses_that_show_public_messages_only(error: DynamoError, status: int, message: str) -> None:
    response = told(error)

    assert response.status == status
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert body["message"] == message
    assert body["error"]["param"] == ("model" if status == 404 else getattr(error, "field", None))


def test_a_limit_has_the_plugins_message_and_headers() -> None:
    limits = {"limit-requests": "60", "remaining-requests": "0", "reset-requests": "1.5s"}

    response = told(RateLimited("Only 60 requests a minute for team a", retry_after=1.2, limits=limits))

    assert response.status == 429
    assert isinstance(response.body, bytes)
    body = json.loads(response.body)
    assert body["error"] == {
        "message": "Only 60 requests a minute for team a",
        "type": "rate_limit_error",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert response.headers["Retry-After"] == "2"
    assert {name: value for name, value in response.headers.items() if name.startswith("x-")} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1.5s",
    }


def test_a_spent_quota_tells_clients_not_to_retry() -> None:
    response = told(QuotaExceeded("The budget of team a is spent"))

    assert response.status == 429
    assert isinstance(response.body, bytes)
    error = json.loads(response.body)["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert error["message"] == "The budget of team a is spent"
    assert response.headers["x-should-retry"] == "false"
    assert "Retry-After" not in response.headers


@pytest.mark.parametrize(
    ("seconds", "told_seconds"), [(-5.0, 1), (0.0, 1), (1.001, 2), (3600.0, 60), (math.inf, 60), (math.nan, 1)]
)
def test_a_limited_client_is_asked_to_wait_within_bounds(seconds: float, told_seconds: int) -> None:
    assert problem_of(RateLimited(retry_after=seconds)).retry_after == told_seconds


@given(st.dictionaries(st.sampled_from(sorted(LIMITS)) | st.text(max_size=10), st.text(max_size=10), max_size=8))
def test_limit_headers_are_always_well_formed(limits: dict[str, str]) -> None:
    headers = problem_of(RateLimited(limits=limits)).headers

    for name, value in headers.items():
        assert limits[name.removeprefix("x-ratelimit-")] == value
        assert value.isascii()
        assert value.isprintable()
    assert len(headers) == sum(name in LIMITS and v.isascii() and v.isprintable() for name, v in limits.items())
