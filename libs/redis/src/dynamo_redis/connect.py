"""How connections are made."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from dynamo_core import ClientTls, client_context
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from dynamo_redis.settings import RedisSettings


def client_options(settings: RedisSettings, section: str, *, database: int = 0, timeout: float) -> dict[str, Any]:
    """The arguments of the library's clients, blocking or not; `timeout` bounds connecting and each answer.

    `section` is where the settings stand, such as ``discovery``. Times are in seconds.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """
    options = _options(settings, database, timeout) | {"socket_timeout": timeout}
    if settings.wants_tls:
        options |= _tls_options(settings, section) | {"ssl": True}
    return options


def connection_factory(
    settings: RedisSettings, section: str, *, database: int = 0, connect_timeout: float
) -> Callable[[], Connection]:
    """Makes connections, each of them not connected yet. The caller sets the deadlines of answers.

    A deadline of the library's would be a task per write and a timer per message.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """
    options = _options(settings, database, connect_timeout) | {"socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    if not settings.wants_tls:
        return lambda: Connection(**options)
    options |= _tls_options(settings, section)
    return lambda: SSLConnection(**options)


def _options(settings: RedisSettings, database: int, connect_timeout: float) -> dict[str, Any]:
    return {
        "host": settings.host,
        "port": settings.port,
        "db": database,
        "username": settings.username,
        "password": None if settings.password is None else settings.password.get_secret_value(),
        "socket_connect_timeout": connect_timeout,
        "socket_keepalive": True,
        # Answers and messages look the same in both; this one every server speaks.
        "protocol": 2,
    }


def _tls_options(settings: RedisSettings, section: str) -> dict[str, Any]:
    tls = settings.tls or ClientTls()
    # Only to find out whether the files can be used: the library makes its own context.
    client_context(tls, f"{section}.tls")
    return {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        "ssl_ca_certs": None if tls.ca is None else str(tls.ca),
        "ssl_certfile": None if tls.cert is None else str(tls.cert),
        "ssl_keyfile": None if tls.key is None else str(tls.key),
        # Without one, an encrypted key would ask on the terminal and wait for ever.
        "ssl_password": "",
    }
