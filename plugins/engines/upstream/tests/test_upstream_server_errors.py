"""Refusals of a server: which are the client's fault, which another worker may mend, and what clients are told."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import BackendError, DynamoError
from dynamo_core.errors import NotSupported, WorkerOverloaded
from dynamo_plugin_engine_upstream.server_errors import LONGEST, error_object, sanitized, status_error, stream_error

NAMES = {"org/secret-name": "ours", "sk-123456": "…"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BackendError.InvalidArgument),
        (413, BackendError.InvalidArgument),
        (422, BackendError.InvalidArgument),
        (401, BackendError.CannotConnect),
        (403, BackendError.CannotConnect),
        (404, NotSupported),
        (405, NotSupported),
        (408, BackendError.Disconnected),
        (429, WorkerOverloaded),
        (500, BackendError.Unknown),
        (502, BackendError.Disconnected),
        (503, WorkerOverloaded),
        (504, BackendError.Disconnected),
        (302, BackendError.Unknown),
    ],
)
def test_each_status_has_its_type(status: int, kind: type[DynamoError]) -> None:
    assert type(status_error(status, {"message": "because"}, NAMES)) is kind


@pytest.mark.parametrize(
    "error", [{"message": "The model `x` does not exist."}, {"param": "model"}, {"code": "model_not_found"}]
)
def test_a_model_that_is_gone_sends_the_request_elsewhere(error: dict[str, Any]) -> None:
    assert type(status_error(404, error, NAMES)) is BackendError.CannotConnect


def test_a_clients_fault_has_the_servers_words_without_what_is_nobodys_business() -> None:
    told = (
        "temperature of org/secret-name\nmust be below 2; see http://10.0.0.5:8000/docs or /opt/models/llama/config"
        " (key sk-123456)"
    )

    error = status_error(400, {"message": told, "param": "temperature"}, NAMES)

    assert isinstance(error, BackendError.InvalidArgument)
    assert error.message == "temperature of ours must be below 2; see … or … (key …)"
    assert error.field == "temperature"


def test_a_long_message_is_cut_and_one_that_is_missing_is_made_up() -> None:
    assert len(sanitized("x" * 10_000, {})) == LONGEST
    assert status_error(400, None, NAMES).message == "The server of this model refused the request (400)"


@pytest.mark.parametrize("param", [7, "a b", "x" * 200, None])
def test_a_field_that_is_no_name_is_not_told(param: object) -> None:
    error = status_error(400, {"message": "no", "param": param}, NAMES)

    assert isinstance(error, BackendError.InvalidArgument)
    assert error.field is None


def test_errors_in_streams_go_by_their_code() -> None:
    assert type(stream_error({"message": "x", "code": 429}, NAMES)) is WorkerOverloaded
    assert type(stream_error({"message": "x", "code": "server_error"}, NAMES)) is BackendError.Unknown
    assert type(stream_error("it broke", NAMES)) is BackendError.Unknown


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"error": {"message": "a"}}', {"message": "a"}),
        (b'{"error": "a"}', "a"),
        (b'{"detail": "a"}', {"detail": "a"}),
        (b"<html>", None),
        (b"[1]", None),
    ],
)
def test_the_error_is_found_in_whatever_form_servers_give_it(body: bytes, found: Any) -> None:
    assert error_object(body) == found
