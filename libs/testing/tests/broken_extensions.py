"""Extensions that break a promise each, for the kit that must notice."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest
from aiohttp import web
from dynamo_core import (
    Extension,
    ExtensionServices,
    HttpRoute,
    ListenerName,
    PluginConfig,
    RequestEvent,
    RequestFinished,
    RequestReceived,
)
from dynamo_testing.extension_kit import ExtensionFactory, ExtensionKit

from libs.testing.tests.planted import Planted, adding, closes_once, first, leave_running, then

log = logging.getLogger(__name__)


class Settings(PluginConfig):
    url: str = "redis://ledger:hidden-password@127.0.0.1:1"
    api_key: str = "hidden-key"


class Sound(Extension):
    """Keeps every promise."""

    NAME = "sound"
    ROLES = ("frontend", "worker")
    Config = Settings
    config: Settings
    thread: threading.Thread | None = None

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        super().__init__(config, services)
        self.tokens: dict[str, int] = {}

    def routes(self) -> Iterable[HttpRoute]:
        return [
            HttpRoute("GET", "/ledger/{model}", self.show, "What a model has said."),
            HttpRoute("POST", "/ledger", self.add, "Enters something.", listener=ListenerName.ADMIN),
            HttpRoute("GET", "/ledger-events", self.stream, "What happens.", listener=ListenerName.ADMIN),
            HttpRoute("GET", "/ledger-login", self.log_in, "Asks for the token.", guarded=False),
        ]

    async def show(self, http: web.Request) -> web.StreamResponse:
        return web.json_response(self.tokens)

    async def add(self, http: web.Request) -> web.StreamResponse:
        return web.Response(status=204 if await http.read() == b"{}" else 400)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"data: {}\n\n")
        await asyncio.Event().wait()
        return response

    async def log_in(self, http: web.Request) -> web.StreamResponse:
        known = self.services.admin.opens(http.query.get("token", ""))
        return web.Response(status=200 if known else 403)

    async def start(self) -> None:
        if self.services.role == "frontend":
            self.events = self.services.requests.subscribe(candidates=1)
            self.spawn(self.read(), name="read")

    async def read(self) -> None:
        while events := await self.events.batch():
            for event in events:
                self.note(event)
            await asyncio.to_thread(self.store)

    def note(self, event: RequestEvent) -> None:
        if isinstance(event, RequestFinished):
            model = event.record.model
            self.tokens[model] = self.tokens.get(model, 0) + event.record.output_tokens

    def store(self) -> None:
        """Stand for writing to a database."""


class _Kit(Planted, ExtensionKit):
    WAIT = 3.0
    UNGUARDED: ClassVar[Sequence[str]] = ("GET /ledger-login",)
    PART = Sound

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        return lambda services: self.PART(Settings(), services)


class TestSound(_Kit):
    pass


TestOfFrontendsBesideWorkers = _Kit.failing(
    "test_the_extension_starts_in_each_of_its_roles",
    start=first(lambda self: self.services.requests.subscribe() if self.services.role == "worker" else None),
)


async def fail(self: Any) -> None:
    raise OSError("there is no disk")


TestFailsSoonBesideWorkers = _Kit.failing(
    "test_the_extension_starts_in_each_of_its_roles",
    start=then(lambda self: self.spawn(fail(self), name="fail") and None if self.services.role == "worker" else None),
)
TestClosesOnceOnly = _Kit.failing(
    "test_the_extension_can_be_closed_twice_and_without_a_start",
    "test_the_extension_closes_while_events_come",
    aclose=closes_once,
)


async def close_what_has_started(real: Any, self: Any) -> None:
    await real()
    assert hasattr(self, "events") or self.services.role == "worker"


TestClosesOnlyWhatHasStarted = _Kit.failing(
    "test_the_extension_can_be_closed_twice_and_without_a_start",
    "test_the_extension_starts_in_each_of_its_roles",
    aclose=close_what_has_started,
)


async def wait_for_the_last_event(self: Any) -> None:
    before = -1
    while self.services.role == "frontend" and hasattr(self, "events") and before != self.seen:
        before = self.seen
        await asyncio.sleep(0.05)


TestWaitsForTheLastEvent = _Kit.failing(
    "test_the_extension_closes_while_events_come", aclose=first(wait_for_the_last_event), seen=0, note=adding("seen")
)
TestRunsOn = _Kit.failing(
    "test_no_task_and_no_thread_is_left_behind",
    start=then(leave_running),
)
TestLeavesAThread = _Kit.failing(
    "test_no_task_and_no_thread_is_left_behind",
    start=then(lambda self: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()),
)
TestOnePathTwice = _Kit.failing(
    "test_its_routes_are_sound_and_each_is_there_once",
    routes=lambda real, self: [
        *(route for route in real() if not route.guarded),
        HttpRoute("GET", "/ledger-login", self.show, "Twice.", ListenerName.ADMIN, guarded=False),
    ],
)
TestUnnamedRoute = _Kit.failing(
    "test_its_routes_are_sound_and_each_is_there_once",
    routes=lambda real, self: [*real(), HttpRoute("GET", "/unnamed", self.show)],
)
TestOpenToAll = _Kit.failing(
    "test_routes_without_a_guard_are_meant_to_have_none",
    routes=lambda real, self: [*real(), HttpRoute("GET", "/open", self.show, "All of it.", guarded=False)],
)


async def trip(real: Any, self: Any, http: web.Request) -> web.StreamResponse:
    return web.json_response((await http.json())["model"])


TestTripsOverBodies = _Kit.failing("test_each_route_answers_any_request", add=trip)
TestNeverAnswers = _Kit.failing(
    "test_each_route_answers_any_request", show=first(lambda self, http: asyncio.Event().wait())
)


async def read_once(real: Any, self: Any) -> None:
    await self.events.batch()
    await asyncio.Event().wait()


TestReadsOnce = _Kit.failing("test_events_are_read_as_they_come", read=read_once)


def block_once(real: Any, self: Any, event: RequestEvent) -> None:
    real(event)
    if not hasattr(self, "blocked"):
        self.blocked = True
        time.sleep(1.2)


TestBlocksTheLoop = _Kit.failing("test_the_event_loop_goes_on_while_events_come", note=block_once)


def know_every_request(real: Any, self: Any, event: RequestEvent) -> None:
    real(event)
    self.tokens[event.request_id] = 0 if isinstance(event, RequestReceived) else self.tokens[event.request_id] + 1


TestKnowsEveryRequest = _Kit.failing("test_the_extension_survives_events_of_all_kinds", note=know_every_request)
TestLogsItsAddress = _Kit.failing(
    "test_a_secret_setting_is_never_shown",
    start=then(lambda self: log.info("the ledger is at %s", self.config.url)),
)


async def show_settings(real: Any, self: Any, http: web.Request) -> web.StreamResponse:
    return web.json_response(self.config.model_dump())


TestShowsItsSettings = _Kit.failing("test_a_secret_setting_is_never_shown", show=show_settings)
