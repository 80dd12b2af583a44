"""The schema of errors in the OpenAPI description."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct):
    """An error in the shape that the official clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """An error: for the official clients, and flat for other clients. `code` is the HTTP status."""

    error: ErrorDetail
    message: str
    type: str
    code: int
