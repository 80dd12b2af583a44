"""How a process that starts waits for a store that is not there yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from dynamo_core.directory.times import spread
from dynamo_core.errors import CannotConnect, ConfigError

log = logging.getLogger(__name__)

#: Seconds between two attempts; varied by half.
RETRY = 0.5


async def wait_for_store(
    try_out: Callable[[], Awaitable[None]],
    *,
    timeout: float,
    hopeless: Callable[[CannotConnect], ConfigError | None],
    unreachable: str,
) -> None:
    """Returns once `try_out` does.

    Args:
        try_out: asks the store for everything that will be needed; raises `CannotConnect`.
        timeout: how long to wait, in seconds.
        hopeless: what a failure means that waiting would not mend, None for one that it may.
        unreachable: the text of the error, with `{}` in place of the reason.

    Raises:
        ConfigError: waiting would not help.
        CannotConnect: the store could not be used in time.
    """
    deadline = time.monotonic() + timeout
    told = False
    while True:
        try:
            await try_out()
        except CannotConnect as error:
            if (mistake := hopeless(error)) is not None:
                raise mistake from error
            left = deadline - time.monotonic()
            if left <= 0:
                raise CannotConnect(unreachable.format(error), cause=error) from error
            if not told:
                log.warning("waiting up to %.0f s for discovery: %s", left, error)
            told = True
            await asyncio.sleep(min(left, spread(RETRY)))
        else:
            return
