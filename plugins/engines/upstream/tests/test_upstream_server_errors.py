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
def test_a_missing_model_migrates_the_request(error: dict[str, Any]) -> None:
    assert type(status_error(404, error, NAMES)) is BackendError.CannotConnect


def test_a_client_fault_keeps_the_servers_message_without_internals() -> None:
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
def test_an_invalid_field_name_is_left_out(param: object) -> None:
    error = status_error(400, {"message": "no", "param": param}, NAMES)

    assert isinstance(error, BackendError.InvalidArgument)
    assert error.field is None


def test_stream_errors_are_mapped_by_code() -> None:
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
def test_error_bodies_of_all_server_forms_are_read(body: bytes, found: Any) -> None:
    assert error_object(body) == found
