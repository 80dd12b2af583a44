"""How connections are made, and what is wrong when they are not."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from dynamo_core.certificates import ClientTls, client_context
from dynamo_core.errors import CannotConnect, ConfigError, DynamoError
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    InvalidResponse,
    NoPermissionError,
)

from dynamo_plugin_transport_redis.config import RedisConfig

#: The server is there, and says no to the login.
_REFUSALS = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError)


def maker(config: RedisConfig) -> Callable[[], Connection]:
    """What makes connections, each of them not connected yet.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """
    options: dict[str, Any] = {
        "host": config.host,
        "port": config.port,
        "username": config.username,
        "password": None if config.password is None else config.password.get_secret_value(),
        # Deadlines are ours: the library's would be a task per write, and a timer per message.
        "socket_timeout": None,
        "socket_connect_timeout": config.connect_timeout,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        # Messages look the same in both; this one every server speaks.
        "protocol": 2,
    }
    if not config.wants_tls:
        return lambda: Connection(**options)
    tls = config.tls or ClientTls()
    # Only to find out whether the files can be used: the library makes its own.
    client_context(tls, "transport.tls")
    options |= {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_certfile": None if tls.cert is None else str(tls.cert),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        # Without one, an encrypted key would ask on the terminal and wait for ever.
        "ssl_password": "",
    }
    return lambda: SSLConnection(**options)


def explain(config: RedisConfig, error: Exception) -> DynamoError:
    """Why a connection was not made, in one line; a `ConfigError` where trying again will not help."""
    where = f"Redis at {config.host}:{config.port}"
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, InvalidResponse):
        return ConfigError(
            f"transport.url: this is no Redis server: {config.host}:{config.port} answers in another protocol "
            f"({text}); name the port of a Redis server, with rediss:// if it is one for TLS",
            cause=error,
        )
    if isinstance(error, NoPermissionError):
        return ConfigError(
            f"transport.username: {where} lets the user do too little: {text}; the plugin's README has the permissions "
            "that it needs",
            cause=error,
        )
    # The last is how a server says it that has not even read a request of many parts.
    if isinstance(error, _REFUSALS) or "unauthenticated" in text:
        return ConfigError(
            f"transport.password: {where} refuses the login: {text}; set `username` and `password`", cause=error
        )
    if "certificate verify failed" in text.lower().replace("_", " "):
        return ConfigError(
            f"transport.tls.ca: {where} is not trusted: {text}; name the authority that signed its certificate",
            cause=error,
        )
    if "wrong version number" in text.lower().replace("_", " "):
        return ConfigError(
            f"transport.tls: {where} does not speak TLS: {text}; name its port for TLS, or remove `tls` and rediss://",
            cause=error,
        )
    if isinstance(error, TimeoutError) and not str(error):
        text = f"no connection within {config.connect_timeout} s"
    return CannotConnect(f"{where} cannot be reached: {text}", cause=error)
