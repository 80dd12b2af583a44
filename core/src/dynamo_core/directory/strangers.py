"""What is on a port where another server should be: a starting process that waits for that would wait in vain."""

from __future__ import annotations

import asyncio
from contextlib import suppress

#: Seconds for a greeting, and for an answer.
PATIENCE = 1.0
#: A line that is a command or a mistake in most protocols of text, and answered in either case.
QUESTION = b"PING\r\n\r\n"


async def first_words(host: str, port: int) -> bytes:
    """How a service begins: its greeting, or its answer to a line of text. Empty if it is silent or not there.

    A server that is starting, or a proxy with nothing behind it, says nothing; it is worth waiting for.
    """
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return b""
    try:
        for question in (b"", QUESTION):
            writer.write(question)
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    return await reader.read(64)
        return b""
    except OSError:
        return b""
    finally:
        writer.transport.abort()


def quoted(words: bytes) -> str:
    """The first line of it, for an error message."""
    return repr(words.split(b"\r\n", 1)[0])[1:]
