"""Errors of an unusable Redis server in one line that names it, never a secret."""

from __future__ import annotations

from enum import Enum, auto

from dynamo_core.errors import CannotConnect, ConfigError
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
)

from dynamo_redis.settings import RedisSettings

_LOGIN_ERRORS = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError)
#: A script's missing permission shows in the text only, and not alike in all versions.
_SCRIPT_DENIED = ("user executing the script can't", "ACL failure in script")


class Fault(Enum):
    """The fault of a Redis server."""

    #: The user lacks a permission.
    DENIED = auto()
    #: The server refuses the login.
    LOGIN = auto()
    #: A server of another protocol answers.
    PROTOCOL = auto()
    #: The server's certificate is not trusted.
    UNTRUSTED = auto()
    #: The server does not speak TLS.
    PLAIN = auto()
    #: The server has no database of that number.
    DATABASE = auto()
    #: Anything else; it may pass.
    OTHER = auto()


class RedisFailure(CannotConnect):
    """The server cannot be used; `fault` says why."""

    def __init__(self, message: str, fault: Fault, *, cause: BaseException | None = None) -> None:
        super().__init__(message, cause=cause)
        self.fault = fault

    @property
    def refused(self) -> bool:
        """Whether the server is there and says no: it needs another login or another set of permissions."""
        return self.fault in (Fault.DENIED, Fault.LOGIN)


def explain(settings: RedisSettings, error: Exception) -> RedisFailure:
    """Return an exception of the library, or of the network, as a failure."""
    place = f"{settings.host}:{settings.port}"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if settings.password is not None and (secret := settings.password.get_secret_value()):
        # A server that does not know a command says with which arguments it came.
        text = text.replace(secret, "…")
    fault = _fault(error, text)
    match fault:
        case Fault.DENIED:
            message = f"Redis at {place} lets the user do too little: {text}"
        case Fault.LOGIN:
            message = f"Redis at {place} refuses the login: {text}"
        case Fault.PROTOCOL:
            message = f"this is no Redis server: {place} answers in another protocol ({text})"
        case Fault.UNTRUSTED:
            message = f"Redis at {place} is not trusted: {text}"
        case Fault.PLAIN:
            message = f"Redis at {place} does not speak TLS: {text}"
        case _ if isinstance(error, RedisError):
            message = f"Redis at {place} does not serve: {text}"
        case _:
            message = f"Redis at {place} cannot be reached: {text}"
    return RedisFailure(message, fault, cause=error)


def config_error(failure: CannotConnect, section: str) -> ConfigError | None:
    """Return the error if waiting would not help, with the key and the remedy; None if it may.

    `section` is where the settings stand, such as ``discovery``.
    """
    match failure.fault if isinstance(failure, RedisFailure) else Fault.OTHER:
        case Fault.DENIED:
            key, remedy = "username", "the plugin's README has the permissions that it needs"
        case Fault.LOGIN:
            key, remedy = "password", "set `username` and `password`"
        case Fault.PROTOCOL:
            key, remedy = "url", "name the port of a Redis server, with rediss:// if it is one for TLS"
        case Fault.UNTRUSTED:
            key, remedy = "tls.ca", "name the authority that signed the server's certificate"
        case Fault.PLAIN:
            key, remedy = "tls", "name its port for TLS, or remove `tls` and rediss://"
        case Fault.DATABASE:
            key, remedy = "database", "the server has no database of that number"
        case Fault.OTHER:
            return None
    return ConfigError(f"{section}.{key}: {failure}; {remedy}", cause=failure)


def _fault(error: Exception, text: str) -> Fault:
    if isinstance(error, NoPermissionError) or any(part in text for part in _SCRIPT_DENIED):
        return Fault.DENIED
    # The text is that of a server that has not even read a request of many parts.
    if isinstance(error, _LOGIN_ERRORS) or "unauthenticated" in text:
        return Fault.LOGIN
    if isinstance(error, InvalidResponse):
        return Fault.PROTOCOL
    plain = text.lower().replace("_", " ")
    if "certificate verify failed" in plain:
        return Fault.UNTRUSTED
    if "wrong version number" in plain:
        return Fault.PLAIN
    if "DB index is out of range" in text or "Invalid Database" in text:
        return Fault.DATABASE
    return Fault.OTHER
