"""Extensions that break a promise each, for the kit that must notice."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import ClassVar

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
        """Here a database would be written."""


class _Kit(ExtensionKit):
    FAILS: ClassVar[tuple[str, ...]] = ()
    WAIT = 3.0
    UNGUARDED: ClassVar[Sequence[str]] = ("GET /ledger-login",)
    EXTENSION: ClassVar[type[Sound]] = Sound

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        return lambda services: self.EXTENSION(Settings(), services)


class TestSound(_Kit):
    pass


class TestOfFrontendsBesideWorkers(_Kit):
    FAILS = ("test_it_starts_in_each_of_its_roles",)

    class EXTENSION(Sound):
        async def start(self) -> None:
            if self.services.role == "worker":
                self.services.requests.subscribe()
            await super().start()


class TestFailsSoonBesideWorkers(_Kit):
    FAILS = ("test_it_starts_in_each_of_its_roles",)

    class EXTENSION(Sound):
        async def start(self) -> None:
            await super().start()
            if self.services.role == "worker":
                self.spawn(self.fail(), name="fail")

        async def fail(self) -> None:
            raise OSError("there is no disk")


class TestClosesOnceOnly(_Kit):
    FAILS = ("test_it_can_be_closed_twice_and_without_a_start", "test_it_closes_while_events_come")

    class EXTENSION(Sound):
        closed = False

        async def aclose(self) -> None:
            await super().aclose()
            assert not self.closed
            self.closed = True


class TestClosesOnlyWhatHasStarted(_Kit):
    FAILS = ("test_it_can_be_closed_twice_and_without_a_start", "test_it_starts_in_each_of_its_roles")

    class EXTENSION(Sound):
        async def aclose(self) -> None:
            await super().aclose()
            assert hasattr(self, "events") or self.services.role == "worker"


class TestWaitsForTheLastEvent(_Kit):
    FAILS = ("test_it_closes_while_events_come",)

    class EXTENSION(Sound):
        async def aclose(self) -> None:
            if self.services.role == "frontend" and hasattr(self, "events"):
                await asyncio.sleep(0.05)
                while await self.quiet():
                    pass
            await super().aclose()

        async def quiet(self) -> bool:
            before, self.seen = self.seen, 0
            await asyncio.sleep(0.05)
            return bool(before or self.seen)

        seen = 0

        def note(self, event: RequestEvent) -> None:
            super().note(event)
            self.seen += 1


class TestRunsOn(_Kit):
    FAILS = ("test_no_task_and_no_thread_is_left_behind",)

    class EXTENSION(Sound):
        async def start(self) -> None:
            await super().start()
            self.task = asyncio.ensure_future(asyncio.sleep(60))


class TestLeavesAThread(_Kit):
    FAILS = ("test_no_task_and_no_thread_is_left_behind",)

    class EXTENSION(Sound):
        async def start(self) -> None:
            await super().start()
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


class TestOnePathTwice(_Kit):
    FAILS = ("test_its_routes_are_sound_and_each_is_there_once",)

    class EXTENSION(Sound):
        def routes(self) -> Iterable[HttpRoute]:
            login = next(route for route in super().routes() if not route.guarded)
            again = HttpRoute("GET", "/ledger-login", self.show, "Twice.", ListenerName.ADMIN, guarded=False)
            return [login, again]


class TestUnnamedRoute(_Kit):
    FAILS = ("test_its_routes_are_sound_and_each_is_there_once",)

    class EXTENSION(Sound):
        def routes(self) -> Iterable[HttpRoute]:
            return [*super().routes(), HttpRoute("GET", "/unnamed", self.show)]


class TestOpenToAll(_Kit):
    FAILS = ("test_routes_without_a_guard_are_meant_to_have_none",)

    class EXTENSION(Sound):
        def routes(self) -> Iterable[HttpRoute]:
            return [*super().routes(), HttpRoute("GET", "/open", self.show, "All of it.", guarded=False)]


class TestTripsOverBodies(_Kit):
    FAILS = ("test_each_route_answers_whatever_it_is_asked",)

    class EXTENSION(Sound):
        async def add(self, http: web.Request) -> web.StreamResponse:
            return web.json_response((await http.json())["model"])


class TestNeverAnswers(_Kit):
    FAILS = ("test_each_route_answers_whatever_it_is_asked",)

    class EXTENSION(Sound):
        async def show(self, http: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            return await super().show(http)


class TestReadsOnce(_Kit):
    FAILS = ("test_events_are_read_as_they_come",)

    class EXTENSION(Sound):
        async def read(self) -> None:
            await self.events.batch()
            await asyncio.Event().wait()


class TestBlocksTheLoop(_Kit):
    FAILS = ("test_the_event_loop_goes_on_while_events_come",)

    class EXTENSION(Sound):
        blocked = False

        def note(self, event: RequestEvent) -> None:
            super().note(event)
            if not self.blocked:
                self.blocked = True
                time.sleep(1.2)


class TestKnowsEveryRequest(_Kit):
    FAILS = ("test_it_survives_events_of_all_kinds",)

    class EXTENSION(Sound):
        def note(self, event: RequestEvent) -> None:
            super().note(event)
            if isinstance(event, RequestReceived):
                self.tokens[event.request_id] = 0
            else:
                self.tokens[event.request_id] += 1


class TestLogsItsAddress(_Kit):
    FAILS = ("test_a_secret_setting_is_never_shown",)

    class EXTENSION(Sound):
        async def start(self) -> None:
            await super().start()
            log.info("the ledger is at %s", self.config.url)


class TestShowsItsSettings(_Kit):
    FAILS = ("test_a_secret_setting_is_never_shown",)

    class EXTENSION(Sound):
        async def show(self, http: web.Request) -> web.StreamResponse:
            return web.json_response(self.config.model_dump())
