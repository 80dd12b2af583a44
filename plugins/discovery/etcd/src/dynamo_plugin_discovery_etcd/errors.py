"""What goes wrong with etcd, in one line that names the server; never a secret."""

from __future__ import annotations

import ssl

from aiohttp import ClientConnectorCertificateError, ClientError, ClientResponseError
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases import Refused

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


class NotSpoken(CannotConnect):
    """There is a server that does not speak etcd's v3 API."""


class Status(Exception):
    """The server understood and says no: `NOT_FOUND`, `PRECONDITION` or `OUT_OF_RANGE`."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def failure(where: str, code: int, message: str) -> Exception:
    """The exception for what a server says."""
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


def unreachable(where: str, error: Exception) -> CannotConnect:
    """The exception for a server that cannot be asked."""
    if isinstance(error, TimeoutError):
        return CannotConnect(f"etcd at {where} does not answer", cause=error)
    if isinstance(error, ClientResponseError):
        return stranger(where, "what is no HTTP", error)
    return CannotConnect(f"etcd at {where} cannot be reached: {_text(error)}", cause=error)


def stranger(where: str, answer: str, error: Exception | None = None) -> NotSpoken:
    """The exception for a server that answers what etcd never would."""
    return NotSpoken(f"this is no etcd: {where} answers {answer}", cause=error)


def as_config_error(error: CannotConnect) -> ConfigError | None:
    """The error if waiting would not help, with the key and the remedy; None if it would."""
    text, cause = str(error), error.__cause__
    if isinstance(error, Denied):
        return ConfigError(
            f"discovery.username: {text}; the plugin's README has the permissions that it needs", cause=error
        )
    if isinstance(error, Refused):
        return ConfigError(f"discovery.password: {text}; set `username` and `password`", cause=error)
    if isinstance(error, NotSpoken):
        return ConfigError(f"discovery.endpoints: {text}; it must be etcd 3.4 or newer", cause=error)
    if isinstance(cause, ClientConnectorCertificateError) or isinstance(
        getattr(cause, "os_error", None), ssl.SSLCertVerificationError
    ):
        return ConfigError(
            f"discovery.tls.ca: {text}; name the authority that signed the server's certificate", cause=error
        )
    return None


def _text(error: Exception) -> str:
    inner = getattr(error, "os_error", None) or getattr(error, "certificate_error", None)
    words = str(inner or error) if isinstance(error, ClientError | OSError | ValueError) else type(error).__name__
    return " ".join(words.split()).rstrip(".") or type(error).__name__
