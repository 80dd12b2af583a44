"""Connections to a Redis server."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from dynamo_core import ClientTls, client_context
from dynamo_core.errors import CannotConnect
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from dynamo_redis.errors import config_error, explain
from dynamo_redis.settings import RedisSettings

#: The name of a command, and its arguments.
Command: TypeAlias = Sequence[bytes | str | int | float]


def client_options(settings: RedisSettings, section: str, *, database: int = 0, timeout: float) -> dict[str, Any]:
    """Return the arguments of the library's clients, blocking or not; `timeout` bounds connecting and each answer.

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
    """Make connections, each of them not connected yet. The caller sets the deadlines of answers.

    A deadline of the library's would be a task per write and a timer per message.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """
    options = _options(settings, database, connect_timeout) | {"socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
    if not settings.wants_tls:
        return lambda: Connection(**options)
    options |= _tls_options(settings, section)
    return lambda: SSLConnection(**options)


class ReusedConnection:
    """One connection, made when it is needed, and anew after a failure. For one task at a time.

    Deadlines are the caller's: a cancelled call throws the connection away.

    Raises:
        ConfigError: a file of `tls` cannot be used.
    """

    def __init__(self, settings: RedisSettings, section: str, *, database: int = 0, connect_timeout: float) -> None:
        self._settings = settings
        self._section = section
        self._make = connection_factory(settings, section, database=database, connect_timeout=connect_timeout)
        self._connection: Connection | None = None

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Return the answers to commands that go out together.

        Raises:
            CannotConnect: the server cannot be used now; the text names the setting if one is wrong.
        """
        done = False
        try:
            if self._connection is None:
                self._connection = self._make()
            connection = self._connection
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(connection.pack_commands(commands))
            answers = [await self.read_answer(connection) for _ in commands]
            done = True
        except (RedisError, OSError) as error:
            failure = explain(self._settings, error)
            # A wrong setting does not end a process that serves.
            raise CannotConnect(str(config_error(failure, self._section) or failure), cause=error) from error
        finally:
            if not done:
                await self.aclose()
        return answers

    async def read_answer(self, connection: Connection) -> Any:
        """Return the answer to the next command. A subclass may catch an error that one command may end with."""
        return await connection.read_response(disable_decoding=True)

    async def aclose(self) -> None:
        """End the connection; another call makes a new one."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # There is no public way to give up what waits to be sent, for ever on a network that swallows everything.
        writer = connection._writer
        if writer is not None:
            writer.transport.abort()
        with suppress(Exception):
            await connection.disconnect(nowait=True)


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
