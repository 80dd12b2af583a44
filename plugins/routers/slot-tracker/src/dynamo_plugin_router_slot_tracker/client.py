"""A client of the service: calls with a deadline each, and the known state of the service."""

from __future__ import annotations

import asyncio
import logging
import ssl

import aiohttp
import msgspec
from dynamo_core.errors import ConfigError
from dynamo_core.protocol import Unreadable, read

from dynamo_plugin_router_slot_tracker.schemas import (
    Addition,
    PotentialLoad,
    Projection,
    Registration,
    RequestKey,
    Unregistration,
)

log = logging.getLogger(__name__)

#: Connections to the service.
_CONNECTIONS = 32
#: Bytes of the longest answer.
_MAX_ANSWER = 64 * 1024 * 1024

_encoder = msgspec.json.Encoder()
_loads = msgspec.json.Decoder(list[PotentialLoad])


class ServiceUnreachable(Exception):
    """The service did not answer, or not properly. If this is `uncertain`, it may have acted."""

    def __init__(self, *, uncertain: bool = True) -> None:
        super().__init__()
        self.uncertain = uncertain


class Refused(Exception):
    """The service answered with an error of the caller's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status = status


class ServiceClient:
    """Calls the service at `url`. After a failure it is left alone for `pause` seconds; `timeout` is for one call."""

    def __init__(self, url: str, *, token: str | None, ca: str | None, timeout: float, pause: float) -> None:
        self._url = url.rstrip("/")
        self._pause = pause
        self._away_until = 0.0
        #: Whether the last call was answered.
        self.present = True
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._ssl = _context(ca)
        self._session: aiohttp.ClientSession | None = None

    @property
    def usable(self) -> bool:
        """Whether it is to be asked now."""
        return self.present or asyncio.get_running_loop().time() >= self._away_until

    async def register(self, worker: Registration) -> None:
        """Make a worker known; fine if it is.

        Raises:
            ServiceUnreachable: no answer.
            Refused: others of its model have another block size, or it cannot be tracked.
        """
        try:
            await self._post("/register", worker)
        except Refused as refused:
            if refused.status != 409 or "already registered" not in str(refused):
                raise

    async def unregister(self, worker: Unregistration) -> None:
        """Make a worker unknown; fine if it is. Raise `ServiceUnreachable` or `Refused`."""
        try:
            await self._post("/unregister", worker)
        except Refused as refused:
            if refused.status != 404:
                raise

    async def add(self, addition: Addition) -> None:
        """Count a request in. Raise `ServiceUnreachable` or `Refused`."""
        await self._post("/add", addition)

    async def complete_prefill(self, key: RequestKey) -> None:
        """Raise `ServiceUnreachable` or `Refused`."""
        await self._post("/prefill_complete", key)

    async def free(self, key: RequestKey, *, urgent: bool = False) -> None:
        """Count a request out; an `urgent` call is also made while the service is to be left alone.

        Raises:
            ServiceUnreachable: no answer.
            Refused: the service knows no such model any more.
        """
        await self._post("/free", key, urgent=urgent)

    async def potential_loads(self, projection: Projection) -> list[PotentialLoad]:
        """Return what each rank would be busy with. Raise `ServiceUnreachable` or `Refused`."""
        answer = await self._post("/potential_loads", projection)
        try:
            return read(_loads, answer)
        except Unreadable as error:
            self._failed(error)
            raise ServiceUnreachable from error

    async def aclose(self) -> None:
        """Close the connections. Safe twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, path: str, body: msgspec.Struct, *, urgent: bool = False) -> bytes:
        if not (urgent or self.usable):
            raise ServiceUnreachable(uncertain=False)
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_CONNECTIONS, ssl=self._ssl)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=self._headers)
        try:
            async with self._session.post(self._url + path, data=_encoder.encode(body)) as response:
                if (response.content_length or 0) > _MAX_ANSWER:
                    raise aiohttp.ClientPayloadError("the answer is too long")
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._failed(error)
            raise ServiceUnreachable(uncertain=not isinstance(error, aiohttp.ClientConnectorError)) from error
        if response.status >= 500 or response.status in (401, 403):
            self._failed(Refused(response.status, _text_of(answer)))
            raise ServiceUnreachable(uncertain=response.status >= 500)
        if not self.present:
            log.info("the slot tracker at %s answers again", self._url)
            self.present = True
        if response.status >= 400:
            raise Refused(response.status, _text_of(answer))
        return answer

    def _failed(self, error: Exception) -> None:
        if self.present:
            reason = str(error) or type(error).__name__
            log.warning("the slot tracker at %s does not answer (%s): routing by load meanwhile", self._url, reason)
        self.present = False
        self._away_until = asyncio.get_running_loop().time() + self._pause


def _context(ca: str | None) -> ssl.SSLContext | bool:
    if ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(f"router.ca: {ca} cannot be used: {error}; name a PEM file") from error


def _text_of(answer: bytes) -> str:
    return answer[:500].decode("utf-8", "replace")
