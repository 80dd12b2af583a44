"""Extensions that behave as tests need them, and how they are installed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from aiohttp import web
from dynamo_core import (
    Extension,
    ExtensionServices,
    HttpRoute,
    ListenerName,
    PeerReplies,
    PluginConfig,
    RequestEvent,
    Subscription,
)

MODULE = """
from dynamo_core import hookimpl

DYNAMO_API = 1


@hookimpl
def dynamo_register_extensions():
    from tests.integration import extension_parts

    return extension_parts.ALL
"""


class Recorder(Extension):
    """Keeps every event."""

    NAME = "recorder"

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        super().__init__(config, services)
        self.events: list[RequestEvent] = []
        self.subscription = services.requests.subscribe(candidates=4)

    async def start(self) -> None:
        self.spawn(self._read(), name="read")

    async def _read(self) -> None:
        async for event in self.subscription:
            self.events.append(event)


class Reader(Extension):
    """Holds two events only. What it does with the first is up to those below."""

    subscription: Subscription

    async def start(self) -> None:
        self.subscription = self.services.requests.subscribe(capacity=2)
        self.spawn(self.read(), name="read")

    async def read(self) -> None:
        raise NotImplementedError


class Deaf(Reader):
    """Never reads."""

    NAME = "deaf"

    async def read(self) -> None:
        return None


class Stuck(Reader):
    """Reads once, and then waits for what never comes."""

    NAME = "stuck"

    async def read(self) -> None:
        await self.subscription.batch()
        await asyncio.Event().wait()


class Blocked(Reader):
    """Reads once, and then blocks a thread until it is closed."""

    NAME = "blocked"

    async def read(self) -> None:
        self.free = threading.Event()
        await self.subscription.batch()
        await asyncio.to_thread(self.free.wait)

    async def aclose(self) -> None:
        self.free.set()
        await super().aclose()


class Raising(Reader):
    """Fails over the first event."""

    NAME = "raising"

    async def read(self) -> None:
        await self.subscription.batch()
        raise OSError("the disk is full")


class Lame(Extension):
    """Cannot start."""

    NAME = "lame"
    closed = 0

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", "/lame", self._answer)]

    async def start(self) -> None:
        self.services.requests.subscribe()
        raise OSError("there is no disk")

    async def aclose(self) -> None:
        self.closed += 1
        await super().aclose()

    async def _answer(self, http: web.Request) -> web.Response:
        raise AssertionError("it has not started")


class Unmakeable(Extension):
    """Cannot be made."""

    NAME = "unmakeable"

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        raise OSError("there is no memory")


class Endless(Extension):
    """Neither starts nor closes within any time."""

    NAME = "endless"

    async def start(self) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        await asyncio.Event().wait()


class Site(Extension):
    """Serves routes of each kind."""

    NAME = "site"

    def routes(self) -> Iterable[HttpRoute]:
        return [
            HttpRoute("GET", "/site", self._answer),
            HttpRoute("GET", "/site/broken", self._fail),
            HttpRoute("GET", "/admin/site", self._answer, listener=ListenerName.ADMIN),
            HttpRoute("GET", "/admin/open", self._check, listener=ListenerName.ADMIN, guarded=False),
        ]

    async def _answer(self, http: web.Request) -> web.Response:
        return web.json_response({"name": self.services.name})

    async def _fail(self, http: web.Request) -> web.Response:
        raise OSError("a page is missing")

    async def _check(self, http: web.Request) -> web.Response:
        admin = self.services.admin
        known = admin.opens(http.query.get("token", ""))
        return web.json_response({"known": known, "token": admin.token})


class Clash(Extension):
    """Wants a path that core serves."""

    NAME = "clash"

    def routes(self) -> Iterable[HttpRoute]:
        return [HttpRoute("GET", "/health", self._answer), HttpRoute("GET", "/clash", self._answer)]

    async def _answer(self, http: web.Request) -> web.Response:
        return web.Response()


class Asker(Extension):
    """Asks all frontends, itself among them."""

    NAME = "asker"
    ROLES = ("frontend",)

    async def start(self) -> None:
        self.hanging = False
        self.asked: list[Any] = []
        self.services.peers.serve("echo", self._echo)

    async def ask(self, payload: Any = None, timeout: float = 10.0) -> PeerReplies:
        return await self.services.peers.call_all("echo", payload, timeout=timeout)

    async def _echo(self, payload: Any) -> Any:
        self.asked.append(payload)
        if self.hanging:
            await asyncio.Event().wait()
        if payload == "fail":
            raise OSError("no echo")
        return {"id": self.services.peers.own.frontend_id, "payload": payload}


class BesideWorkers(Extension):
    """Runs in both roles, and notes what it is given."""

    NAME = "beside"
    ROLES = ("frontend", "worker")
    roles: ClassVar[list[str]] = []

    async def start(self) -> None:
        self.roles.append(self.services.role)
        if self.services.frontend is None:
            self.services.report_failure("nothing to see here")


ALL = [
    Recorder,
    Deaf,
    Stuck,
    Blocked,
    Raising,
    Lame,
    Unmakeable,
    Endless,
    Site,
    Clash,
    Asker,
    BesideWorkers,
]


def install(folder: Path) -> None:
    """Write the distribution that offers them into a folder of the import path."""
    info = folder / "acme_extensions-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-extensions\nVersion: 1.0\n")
    lines = [f"extension-{cls.NAME} = acme_extensions" for cls in ALL]
    (info / "entry_points.txt").write_text("\n".join(["[dynamo]", *lines, ""]))
    (folder / "acme_extensions.py").write_text(MODULE)
