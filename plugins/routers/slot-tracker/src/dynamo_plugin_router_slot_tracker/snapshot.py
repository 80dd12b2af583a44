"""A snapshot of a service: its workers and active requests, as lines of JSON that another one takes at its start."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from itertools import islice

import aiohttp
import msgspec
from aiohttp import web
from dynamo_core import HttpRoute
from dynamo_core.protocol import Unreadable, read

from dynamo_plugin_router_slot_tracker.errors import Conflict, Malformed
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.schemas import Held, SnapshotPart

log = logging.getLogger(__name__)

PATH = "/snapshot"
#: Requests, and workers, of one line.
BATCH = 128
#: Bytes of the longest line: no request is larger than a body may be.
MAX_LINE = 512 * 1024 * 1024
#: Seconds for all of it.
TIMEOUT = 10.0

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SnapshotPart)


class SnapshotError(Exception):
    """A peer gave no snapshot that could be used."""


def snapshot_route(registry: Registry) -> HttpRoute:
    """Return ``GET /snapshot``."""

    async def snapshot(http: web.Request) -> web.StreamResponse:
        # Taken in one go, sent bit by bit: what changes from now on the peer hears as events.
        workers = registry.workers()
        held = list(registry.held())
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(http)
        for at in range(0, len(workers), BATCH):
            await response.write(_line(SnapshotPart(workers=workers[at : at + BATCH])))
        rest = iter(held)
        while batch := list(islice(rest, BATCH)):
            await response.write(_line(SnapshotPart(requests=batch)))
        await response.write(_line(SnapshotPart(complete=True)))
        await response.write_eof()
        return response

    return HttpRoute("GET", PATH, snapshot, "workers and active requests, for a replica")


async def take_snapshot(
    registry: Registry, urls: tuple[str, ...], *, token: str | None = None, ca: ssl.SSLContext | None = None
) -> bool:
    """Fill an empty registry from the first of these services that gives a whole snapshot; whether one did."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        for url in urls:
            try:
                parts = [part async for part in _parts(session, url, ca)]
                if not parts or not parts[-1].complete:
                    raise SnapshotError("it broke off")
            except (aiohttp.ClientError, TimeoutError, SnapshotError, Unreadable) as error:
                log.warning("no snapshot from %s: %s", url, str(error) or type(error).__name__)
                continue
            workers, requests = _fill(registry, parts)
            log.info("took a snapshot of %s: %d workers, %d active requests", url, workers, requests)
            return True
    return False


def _fill(registry: Registry, parts: list[SnapshotPart]) -> tuple[int, int]:
    workers = 0
    for part in parts:
        for worker in part.workers:
            try:
                registry.register(worker)
            except (Malformed, Conflict) as refused:
                log.warning("a worker of the snapshot was left out: %s", refused)
                continue
            workers += 1
    held: list[Held] = [request for part in parts for request in part.requests]
    return workers, registry.restore(held)


async def _parts(session: aiohttp.ClientSession, url: str, ca: ssl.SSLContext | None) -> AsyncIterator[SnapshotPart]:
    async with session.get(url.rstrip("/") + PATH, ssl=True if ca is None else ca) as response:
        if response.status != 200:
            raise SnapshotError(f"it answered {response.status}")
        waiting = bytearray()
        searched = 0
        async for data in response.content.iter_any():
            waiting += data
            while (end := waiting.find(b"\n", searched)) >= 0:
                yield read(_decoder, bytes(waiting[:end]))
                del waiting[: end + 1]
                searched = 0
            searched = len(waiting)
            if searched > MAX_LINE:
                raise SnapshotError("a line is too long")


def _line(part: SnapshotPart) -> bytes:
    return _encoder.encode(part) + b"\n"
