"""Waits of a starting process for a store or another server, and the error when its port is taken."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from dynamo_core.backoff import pauses
from dynamo_core.errors import CannotConnect, ConfigError, DynamoError

T = TypeVar("T")

log = logging.getLogger(__name__)

#: Seconds of the first and the longest pause between two attempts; it doubles. Each is varied by half.
FIRST_RETRY = 0.05
LAST_RETRY = 1.0

#: Seconds for a greeting, and for an answer.
GREETING_TIMEOUT = 1.0
#: A line that is a command or a mistake in most protocols of text, and answered in either case.
QUESTION = b"PING\r\n\r\n"


def waitable(error: CannotConnect) -> ConfigError | None:
    """Return the `hopeless` of an attempt that raises `ConfigError` itself where waiting would not help."""
    return None


async def wait_for_store(
    try_out: Callable[[], Awaitable[T]],
    *,
    timeout: float,
    unreachable: str,
    hopeless: Callable[[CannotConnect], ConfigError | None] = waitable,
    what: str = "discovery",
    tell: Callable[[str], object] = str,
) -> T:
    """Return what `try_out` does, once it does.

    Args:
        try_out: asks the server for everything that will be needed; raises a `DynamoError` if it is not there.
        timeout: how long to wait, in seconds.
        unreachable: the text of the error, with `{}` in place of the reason.
        hopeless: what a failure means that waiting would not mend, None for one that it may.
        what: what is waited for, for the log, which is told each reason once.
        tell: is given the reason after each attempt, and "" in the end.

    Raises:
        ConfigError: waiting would not help.
        CannotConnect: the server could not be used in time.
    """
    deadline = time.monotonic() + timeout
    waits, told = pauses(FIRST_RETRY, LAST_RETRY), set[str]()
    try:
        while True:
            try:
                return await try_out()
            except ConfigError:
                raise
            except DynamoError as error:
                if isinstance(error, CannotConnect) and (mistake := hopeless(error)) is not None:
                    raise mistake from error
                reason, left = str(error), deadline - time.monotonic()
                if left <= 0:
                    raise CannotConnect(unreachable.format(reason), cause=error) from error
            tell(reason)
            if reason not in told:
                told.add(reason)
                log.warning("waiting up to %.0f s for %s: %s", left, what, reason)
            await asyncio.sleep(min(left, next(waits)))
    finally:
        tell("")


async def read_greeting(host: str, port: int) -> bytes:
    """Return how a service begins: its greeting, or its answer to a line of text. Empty if it is silent or not there.

    A server that is starting, or a proxy with nothing behind it, says nothing; it is worth waiting for.
    """
    try:
        async with asyncio.timeout(GREETING_TIMEOUT):
            reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    try:
        for question in (b"", QUESTION):
            writer.write(question)
            with suppress(TimeoutError):
                async with asyncio.timeout(GREETING_TIMEOUT):
                    return await reader.read(64)
        return b""
    except OSError:
        return b""
    finally:
        writer.transport.abort()


def quote_greeting(words: bytes) -> str:
    """Return the first line of it, for an error message."""
    return repr(words.split(b"\r\n", 1)[0])[1:]
