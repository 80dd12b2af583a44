"""The kit for extensions: routes, request events, and leftovers after the close.

The author's whole test file::

    import pytest
    from dynamo_testing.extension_kit import ExtensionFactory, ExtensionKit

    class TestMine(ExtensionKit):
        @pytest.fixture
        def make_extension(self) -> ExtensionFactory:
            return lambda services: MyExtension(MyConfig(), services)

The kit has the listener, the events and the services. Each call of the factory makes another extension; those that
write to a file need one each, or a file that several may use in turn.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit

from dynamo_core.contracts.extension import Extension, ExtensionServices
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.plugin import FRONTEND_ROLE
from dynamo_core.contracts.requests.request_events import RequestEvent
from dynamo_core.tasks import TaskSet
from dynamo_runtime.settings.secrets_in_settings import HIDDEN, redacted
from pydantic import SecretBytes, SecretStr

from dynamo_testing.extension.host import TOKEN, ExtensionHost, unserved
from dynamo_testing.extension.sample_events import answered, of_all_kinds
from dynamo_testing.frontend_kit import BROKEN
from dynamo_testing.optional_packages import pytest

__all__ = ["ExtensionFactory", "ExtensionHost", "ExtensionKit"]

#: Makes the extension under test, not yet started.
ExtensionFactory: TypeAlias = Callable[[ExtensionServices], Extension]

#: Requests of the checks that send many events, and how many of them come at once.
REQUESTS, AT_ONCE = 500, 50


@pytest.mark.asyncio
class ExtensionKit:
    """All checks of an extension. Subclass it as ``Test…`` and write the fixture `make_extension`."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0
    #: Seconds that the event loop may stand still while events come.
    STANDSTILL: ClassVar[float] = 1.0
    #: The routes that callers without a key or the token may reach, such as ``GET /login``.
    UNGUARDED: ClassVar[Sequence[str]] = ()

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        """Make the extension from its services. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_extension` that returns a function of ExtensionServices")

    @pytest.fixture
    async def host(self, make_extension: ExtensionFactory) -> AsyncIterator[ExtensionHost]:
        """Yield the extension, started beside a frontend."""
        async with self.running(make_extension) as host:
            yield host

    # Its life.

    async def test_the_extension_starts_in_each_of_its_roles(self, make_extension: ExtensionFactory) -> None:
        unused = ExtensionHost(make_extension)
        await unused.aclose()
        for role in type(unused.extension).ROLES:
            async with self.running(make_extension, role) as host:
                await asyncio.sleep(0)
                assert host.failure == "", f"it says that it failed in the role {role}: {host.failure}"

    async def test_the_extension_can_be_closed_twice_and_without_a_start(
        self, make_extension: ExtensionFactory
    ) -> None:
        unstarted = ExtensionHost(make_extension)
        await self.within(unstarted.aclose(), "`aclose` without `start`")
        await self.within(unstarted.extension.aclose(), "a second `aclose`")
        async with self.running(make_extension) as host:
            await self.within(host.extension.aclose(), "`aclose`")

    async def test_the_extension_closes_while_events_come(self, make_extension: ExtensionFactory) -> None:
        async with self.running(make_extension) as host, TaskSet() as tasks:
            coming = tasks.spawn(self.publish_for_ever(host), name="kit-frontend")
            await asyncio.sleep(0.05)
            await self.within(host.extension.aclose(), "`aclose`")
            assert not coming.done()

    async def test_no_task_and_no_thread_is_left_behind(self, make_extension: ExtensionFactory) -> None:
        threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
        pool = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(pool)
        async with self.running(make_extension) as host:
            await self.send(host, answered("kit-request", host.candidates))
        await asyncio.sleep(0)

        left = asyncio.all_tasks() - tasks
        assert left == set(), f"tasks go on after `aclose`: {left}"
        pool.shutdown(wait=False)
        deadline = time.monotonic() + self.WAIT
        for thread in set(threading.enumerate()) - threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a thread goes on after `aclose`: {thread}"

    # Its routes.

    async def test_its_routes_are_sound_and_each_is_there_once(self, host: ExtensionHost) -> None:
        # Core serves all of them or none.
        assert unserved(host.routes) == ""
        for route in host.routes:
            assert route.summary, f"{named(route)}: a line of summary is missing, for the list of routes"

    async def test_routes_without_a_guard_are_meant_to_have_none(self, host: ExtensionHost) -> None:
        unguarded = {named(route) for route in host.routes if not route.guarded}

        assert unguarded == set(self.UNGUARDED), "UNGUARDED lists the routes that anyone may call"

    async def test_each_route_answers_any_request(self, host: ExtensionHost) -> None:
        if not host.routes:
            pytest.skip("it serves no routes")
        await self.send(host, of_all_kinds(host.candidates))
        for route in host.routes:
            bodies = (b"{}", *BROKEN) if route.method in ("POST", "PUT", "PATCH") else (None,)
            for body in bodies:
                for token in ("", TOKEN):
                    status = await self.within(self.status(host, route, body, token), f"the answer of {named(route)}")
                    assert status < 500, f"{named(route)} with the body {body!r:.40}: {status}"

    # Events of requests.

    async def test_events_are_read_as_they_come(self, host: ExtensionHost) -> None:
        if not host.subscribes:
            pytest.skip("it subscribes to no events of requests")
        # A fast frontend fills one batch with all of a turn: an extension that reads once would have read them.
        for turn in range(2):
            for first in range(0, REQUESTS, AT_ONCE):
                for number in range(first, first + AT_ONCE):
                    for event in answered(f"kit-{turn}-{number}", host.candidates):
                        host.publish(event)
                await asyncio.sleep(0)
            await self.within(self.all_read(host), f"the reading of {host.unread} events that are held")

    async def test_the_event_loop_goes_on_while_events_come(self, host: ExtensionHost) -> None:
        longest = 0.0
        async with TaskSet() as tasks:
            tasks.spawn(self.publish_for_ever(host), name="kit-frontend")
            began = last = time.monotonic()
            while last - began < self.STANDSTILL:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                longest, last = max(longest, now - last), now

        assert longest < self.STANDSTILL, f"the event loop stood still for {longest:.1f} s: use asyncio.to_thread"

    async def test_the_extension_survives_events_of_all_kinds(self, host: ExtensionHost) -> None:
        for _ in range(2):
            await self.send(host, of_all_kinds(host.candidates))

        assert host.failure == "", "it failed over an event"

    # What it shows.

    async def test_a_secret_setting_is_never_shown(
        self, make_extension: ExtensionFactory, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with self.running(make_extension) as host:
            secrets = set(secrets_of(host.extension.config.model_dump()))
            if not secrets:
                pytest.skip("none of its settings holds a secret")
            await self.send(host, of_all_kinds(host.candidates))
            texts = {"its repr": repr(host.extension), "/metrics": (await host.metrics.render()).decode()}
            texts["what it reports to be wrong"] = host.failure
            for route in host.routes:
                if route.method == "GET":
                    texts[named(route)] = await self.text(host, route)
        out, err = capsys.readouterr()
        texts |= {"the log": caplog.text, "what it prints": out + err}

        for where, text in texts.items():
            assert not any(secret in text for secret in secrets), f"a secret setting is in {where}"

    # What the checks use.

    @asynccontextmanager
    async def running(
        self, make_extension: ExtensionFactory, role: str = FRONTEND_ROLE
    ) -> AsyncIterator[ExtensionHost]:
        """Yield the extension, started in a process of a role, and closed at the end."""
        host = ExtensionHost(make_extension, role)
        try:
            await self.within(host.start(), "`start`")
            yield host
        finally:
            await self.within(host.aclose(), "`aclose`")

    async def send(self, host: ExtensionHost, events: Iterable[RequestEvent]) -> None:
        """Send events, and return once they are read and what follows at once has happened."""
        for event in events:
            host.publish(event)
        await self.all_read(host, self.WAIT)

    async def send_requests(self, host: ExtensionHost, *request_ids: str) -> None:
        """Send all events of requests that are answered, and return as `send`."""
        for request_id in request_ids:
            await self.send(host, answered(request_id, host.candidates))

    async def json(self, host: ExtensionHost, path: str) -> Any:
        """Return what a GET of a path answers to an operator."""
        async with host.asked("GET", path, token=TOKEN) as response:
            return await self.within(response.json(), f"the answer of GET {path}")

    async def all_read(self, host: ExtensionHost, patience: float = float("inf")) -> None:
        """Return once no event is held; with `patience`, at the latest then."""
        deadline = time.monotonic() + patience
        while host.unread and not host.failure and time.monotonic() < deadline:  # noqa: ASYNC110 - the last read has no event
            await asyncio.sleep(0.01)
        # What was read last is worked on.
        await asyncio.sleep(0.02)

    async def publish_for_ever(self, host: ExtensionHost) -> None:
        """Publish requests without end, with time for other tasks in between."""
        while True:
            for event in answered("kit-request", host.candidates):
                host.publish(event)
            await asyncio.sleep(0.001)

    async def status(self, host: ExtensionHost, route: HttpRoute, body: bytes | None, token: str) -> int:
        """Return the status of an answer, whose body may come later or never end."""
        async with host.asked(route.method, path_of(route), body, token=token) as response:
            return response.status

    async def text(self, host: ExtensionHost, route: HttpRoute) -> str:
        """Return what a route answers to an operator, as far as it comes at once."""
        text = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2), host.asked(route.method, path_of(route), token=TOKEN) as response:
                text = str(dict(response.headers))
                async for piece in response.content.iter_any():
                    text += piece.decode(errors="replace")
        return text

    async def within(self, waited: Any, what: str) -> Any:
        """Return what is waited for, in the time that anything may take."""
        try:
            async with asyncio.timeout(self.WAIT):
                return await waited
        except TimeoutError:
            raise AssertionError(f"{what} took more than {self.WAIT} s") from None


def named(route: HttpRoute) -> str:
    """Return a route in messages, and in `ExtensionKit.UNGUARDED`."""
    return f"{route.method} {route.path}"


def path_of(route: HttpRoute) -> str:
    """Return a path of the route, with something in the place of each variable."""
    return "/".join("7" if part.startswith("{") else part for part in route.display_path.split("/"))


def secrets_of(value: Any, path: Sequence[str] = ()) -> Iterator[str]:
    """Yield the texts in settings that are hidden where settings are shown."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from secrets_of(below, (*path, str(key)))
    elif isinstance(value, list | tuple | set | frozenset):
        for below in value:
            yield from secrets_of(below, path)
    elif isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, SecretBytes):
        yield value.get_secret_value().decode(errors="replace")
    elif isinstance(value, str) and value:
        shown = redacted(path, value)
        if shown == HIDDEN:
            yield value
        elif shown != value and (password := urlsplit(value).password):
            yield password
