"""Errors of the API server in one line that names it, never a secret."""

from __future__ import annotations

from typing import Any

from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases import Refused, UnsupportedServer, untrusted

NOT_FOUND, CONFLICT, GONE, INVALID = 404, 409, 410, 422
#: The server understood; what it was asked for is not there, already is, or has changed.
_ANSWERS = {NOT_FOUND, CONFLICT, GONE, INVALID}


class Denied(Refused):
    """This process lacks a permission."""


class NoNamespace(UnsupportedServer):
    """The namespace does not exist."""


class Unauthorized(Exception):
    """The token is unknown or has ended: perhaps there is a newer one."""


class Throttled(Exception):
    """The server wants to be left alone for `seconds`."""

    def __init__(self, seconds: float, message: str) -> None:
        super().__init__(message)
        self.seconds = seconds


class Status(Exception):
    """The server understood and says no: `NOT_FOUND`, `CONFLICT`, `GONE` or `INVALID`, and a reason in one word."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


def failure(where: str, code: int, status: dict[str, Any], retry_after: float | None = None) -> Exception:
    """Return the exception for what a server says, as an object of kind Status; `retry_after` in seconds."""
    about = " ".join(str(status.get("message") or f"HTTP {code}").split()).rstrip(".")
    if code == 401:
        return Unauthorized(about)
    if code == 429 or (code >= 500 and retry_after is not None):
        return Throttled(1.0 if retry_after is None else retry_after, about)
    if code == 403:
        return Denied(f"Kubernetes at {where} lets this process do too little: {about}")
    if code in _ANSWERS:
        return Status(code, str(status.get("reason", "")), about)
    return CannotConnect(f"Kubernetes at {where} does not serve: {about}")


def as_config_error(error: CannotConnect) -> ConfigError | None:
    """Return the error if waiting would not help, with the key and the remedy; None if it would."""
    text = str(error)
    if isinstance(error, Denied):
        return ConfigError(f"discovery: {text}; the plugin's README has the Role that it needs", cause=error)
    if isinstance(error, Refused):
        return ConfigError(
            f"discovery.token: {text}; set `token` or `token_file`, or mount a service account", cause=error
        )
    if isinstance(error, NoNamespace):
        return ConfigError(f"discovery.namespace: {text}; make it, or name another", cause=error)
    if isinstance(error, UnsupportedServer):
        return ConfigError(f"discovery.url: {text}; it must be the API server of Kubernetes", cause=error)
    return untrusted(error, "discovery.tls")
