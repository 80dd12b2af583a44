"""Real NATS and Redis servers on the loopback, as child processes, and how many messages they were sent."""

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from dynamo_testing.servers.ports import free_port

from benchmarks.children import ChildFailed, Children, accepts
from benchmarks.http1 import BadResponse, Endpoint, fetch

ASK_DEADLINE: Final = 5.0

# Debian puts servers where the PATH of a user need not lead.
_PLACES: Final = ":/usr/sbin:/usr/local/bin"
_PUBLISHED: Final = re.compile(rb"^cmdstat_publish:calls=(\d+)", re.MULTILINE)


class ServerMissing(Exception):
    """The program is not installed; the text has the remedy."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A running server: its process, the config section `transport` that goes there, and how to ask for its count.

    `messages` is how many messages it was ever sent; it raises ChildFailed when it does not answer.
    """

    pid: int
    transport: str
    messages: Callable[[], Awaitable[int]]


async def start_nats(children: Children, folder: Path) -> Broker:
    """Raise ServerMissing or ChildFailed."""
    binary = _program("nats-server", "nats-server")
    port, monitor = free_port(), free_port()
    command = [binary, "--addr", "127.0.0.1", "--port", str(port), "--http_port", str(monitor)]
    pid = await children.start("nats-server", command, lambda: accepts(port))
    endpoint = Endpoint("127.0.0.1", monitor, "")

    async def messages() -> int:
        try:
            reply = await fetch(endpoint, "/varz", timeout=ASK_DEADLINE)
            return msgspec.json.decode(reply.body, type=_Varz).in_msgs
        except (OSError, BadResponse, msgspec.MsgspecError) as error:
            raise ChildFailed(f"nats-server does not say how many messages it has had: {error!r}") from None

    return Broker(pid, f'{{use: nats, servers: ["nats://127.0.0.1:{port}"]}}', messages)


async def start_redis(children: Children, folder: Path) -> Broker:
    """Raise ServerMissing or ChildFailed."""
    binary = _program("redis-server", "redis-server", "valkey-server")
    port = free_port()
    command = [binary, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(folder)]
    pid = await children.start("redis-server", command, lambda: accepts(port))

    async def messages() -> int:
        try:
            async with asyncio.timeout(ASK_DEADLINE):
                published = _PUBLISHED.search(await _info(port))
        except (OSError, ValueError, EOFError) as error:
            raise ChildFailed(f"redis-server does not say how many messages it has had: {error!r}") from None
        return int(published[1]) if published else 0

    return Broker(pid, f'{{use: redis, url: "redis://127.0.0.1:{port}"}}', messages)


#: The servers that transports need, by the transport's name.
BROKERS: Final[Mapping[str, Callable[[Children, Path], Awaitable[Broker]]]] = MappingProxyType(
    {"nats": start_nats, "redis": start_redis}
)


class _Varz(msgspec.Struct):
    in_msgs: int


async def _info(port: int) -> bytes:
    """Return the statistics of commands. Raise OSError, EOFError, or ValueError when the answer is another."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"INFO commandstats\r\n")
        size = await reader.readline()
        if size[:1] != b"$":
            raise ValueError(size)
        return await reader.readexactly(int(size[1:]))
    finally:
        writer.close()


def _program(package: str, *names: str) -> str:
    path = os.environ.get("PATH", os.defpath) + _PLACES
    for name in names:
        found = shutil.which(name, path=path)
        if found is not None:
            return found
    raise ServerMissing(f"{names[0]} is not installed; on Debian: apt-get install {package}")
