"""How connections are made, and what is wrong when they are not."""

from __future__ import annotations

import ssl
from typing import Any

from dynamo_core.certificates import ClientTls, client_context
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases.patience import Refused
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
)

from dynamo_plugin_discovery_redis.config import RedisConfig

#: The server is there, and says no to what the settings say.
_REFUSALS = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError, NoPermissionError)


class NotSpoken(CannotConnect):
    """There is a server that speaks another protocol."""


def options(config: RedisConfig) -> dict[str, Any]:
    """What both of the library's clients, blocking and not, are made with.

    Raises:
        ConfigError: a file cannot be used.
    """
    found: dict[str, Any] = {
        "host": config.host,
        "port": config.port,
        "db": config.database,
        "username": config.username,
        "password": None if config.password is None else config.password.get_secret_value(),
        "socket_timeout": config.timeout,
        "socket_connect_timeout": config.timeout,
        "socket_keepalive": True,
        # The answers of scripts are the same in both; this one every server speaks.
        "protocol": 2,
    }
    if config.wants_tls:
        tls = config.tls or ClientTls()
        # Only to find out whether the files can be used: the library makes its own.
        client_context(tls, "discovery.tls")
        found |= {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
            "ssl_certfile": None if tls.cert is None else str(tls.cert),
            "ssl_keyfile": None if tls.key is None else str(tls.key),
            # Without one, an encrypted key would ask on the terminal and wait for ever.
            "ssl_password": "",
        }
    return found


def once() -> NoBackoff:
    """No pause between two attempts of the library's own."""
    return NoBackoff()


def explain(config: RedisConfig, error: Exception) -> CannotConnect:
    """An error of the library as one of ours, in one line that names the server; never a secret."""
    where = f"Redis at {config.host}:{config.port}"
    if _not_permitted(error):
        return Refused(f"{where} lets the user do too little: {_text(error)}", cause=error)
    # The last is how a server says it that has not even read a request of many parts.
    if isinstance(error, _REFUSALS) or "unauthenticated" in str(error):
        return Refused(f"{where} refuses the login: {_text(error)}", cause=error)
    if isinstance(error, InvalidResponse):
        place = f"{config.host}:{config.port}"
        return NotSpoken(f"this is no Redis server: {place} answers in another protocol ({_text(error)})", cause=error)
    if isinstance(error, RedisError):
        return CannotConnect(f"{where} does not serve: {_text(error)}", cause=error)
    return CannotConnect(f"{where} cannot be reached: {_text(error)}", cause=error)


def as_config_error(config: RedisConfig, error: CannotConnect) -> ConfigError | None:
    """The error if waiting would not help, with the key and the remedy; None if it would."""
    text = str(error)
    if isinstance(error, NotSpoken):
        return ConfigError(
            f"discovery.url: {text}; name the port of a Redis server, with rediss:// if it is one for TLS", cause=error
        )
    if error.__cause__ is not None and _not_permitted(error.__cause__):
        return ConfigError(
            f"discovery.username: {text}; the plugin's README has the permissions that it needs", cause=error
        )
    if isinstance(error, Refused):
        return ConfigError(f"discovery.password: {text}; set `username` and `password`", cause=error)
    if "DB index is out of range" in text or "Invalid Database" in text:
        return ConfigError(f"discovery.database: {text}; the server has no database {config.database}", cause=error)
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return ConfigError(
            f"discovery.tls.ca: {text}; name the authority that signed the server's certificate", cause=error
        )
    return None


def _not_permitted(error: BaseException) -> bool:
    # What a script may not do is told by text only, and not alike in all versions.
    texts = ("user executing the script can't", "ACL failure in script")
    return isinstance(error, NoPermissionError) or any(text in str(error) for text in texts)


def _text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.rstrip(".") or type(error).__name__
