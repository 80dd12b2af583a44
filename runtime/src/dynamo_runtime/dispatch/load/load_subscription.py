"""Subscriptions to the load messages of other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from dynamo_core.backoff import jitter
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.protocol.decoding import Unreadable
from dynamo_core.protocol.unreadable_warnings import UnreadableWarner

log = logging.getLogger(__name__)

#: Seconds before a broken event plane or directory is tried again, varied by half.
RETRY = 1.0


async def listen(
    events: EventPlane, directory: Discovery, subject: str, take: Callable[[bytes], None], *, whose: str
) -> None:
    """Give each message of `subject` to `take`, which may raise `Unreadable`. `whose` is for the log."""
    unreadable = UnreadableWarner(log, f"a message about the load of {whose}")
    while True:
        try:
            async with aclosing(events.subscribe(subject, directory)) as messages:
                async for source, _, payload in messages:
                    try:
                        take(payload)
                    except Unreadable as error:
                        unreadable.warn(f"{source:016x}", error)
                    else:
                        unreadable.readable(f"{source:016x}")
        except Exception as error:
            log.warning("the loads of %ss cannot be received: %s", whose, error)
        await asyncio.sleep(jitter(RETRY))
