"""Errors of etcd in one line that names the server, never a secret."""

from __future__ import annotations

from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases import Refused, UnsupportedServer, untrusted

#: The numbers of what went wrong that the plugin tells apart.
INVALID, NOT_FOUND, DENIED, PRECONDITION, OUT_OF_RANGE, LOGIN = 3, 5, 7, 9, 11, 16
#: The highest number that there is.
LAST = 16
#: The server understood; what it was asked for is not there, or already is.
_ANSWERS = {NOT_FOUND, PRECONDITION, OUT_OF_RANGE}


class Denied(Refused):
    """The user may do too little."""


class TokenExpired(Exception):
    """The server does not know the token (any more): log in again."""


class Status(Exception):
    """The server understood and says no: `NOT_FOUND`, `PRECONDITION` or `OUT_OF_RANGE`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def failure(where: str, code: int, message: str) -> Exception:
    """Return the exception for what a server says."""
    about = " ".join(message.split()).removeprefix("etcdserver: ").rstrip(".")
    if code == LOGIN or "auth token" in about or "auth store is old" in about:
        return TokenExpired(about)
    if code in _ANSWERS:
        return Status(code, about)
    if code == DENIED:
        return Denied(f"etcd at {where} lets the user do too little: {about}")
    if code == INVALID and ("user" in about or "authentication" in about):
        return Refused(f"etcd at {where} refuses: {about}")
    return CannotConnect(f"etcd at {where} does not serve: {about}")


def as_config_error(error: CannotConnect) -> ConfigError | None:
    """Return the error if waiting would not help, with the key and the remedy; None if it would."""
    text = str(error)
    if isinstance(error, Denied):
        return ConfigError(
            f"discovery.username: {text}; the plugin's README has the permissions that it needs", cause=error
        )
    if isinstance(error, Refused):
        return ConfigError(f"discovery.password: {text}; set `username` and `password`", cause=error)
    if isinstance(error, UnsupportedServer):
        return ConfigError(f"discovery.endpoints: {text}; it must be etcd 3.4 or newer", cause=error)
    return untrusted(error, "discovery.tls")
