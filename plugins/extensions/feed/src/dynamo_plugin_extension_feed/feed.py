"""The extension `feed`: reads request events, and reports the state of the whole deployment to operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from dynamo_core import (
    Extension,
    ExtensionServices,
    HttpFault,
    HttpRoute,
    ListenerName,
    PluginConfig,
    RequestEvent,
    RequestFinished,
    RequestRouted,
)
from dynamo_core.protocol import Unreadable
from pydantic import Field

from dynamo_plugin_extension_feed.frontend_view import View, frontend_view, read_view
from dynamo_plugin_extension_feed.rates import Rates
from dynamo_plugin_extension_feed.request_histories import RequestHistories, timeline
from dynamo_plugin_extension_feed.state import State, Views, join_views
from dynamo_plugin_extension_feed.tenant_metrics import TenantMeters
from dynamo_plugin_extension_feed.worker_names import WorkerNames

#: What other frontends are asked for.
_STATE, _REQUEST = "state", "request"
#: Events that wait to be read: those of a second or two of the greatest load.
_CAPACITY: Final = 16_384
#: Events that are read before others have their turn.
_AT_ONCE: Final = 500
#: Seconds between two readings. All that happens in them has to fit into the capacity.
_PAUSE: Final = 0.1
#: Seconds that all other frontends together have to answer.
_ANSWER: Final = 1.0
#: Seconds that a reader may leave a message in the socket before it is given up.
_STALL: Final = 30.0

#: `Extension.spawn`.
Spawn: TypeAlias = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class FeedConfig(PluginConfig):
    """The keys of the extension's entry in the config file, beside `use`."""

    requests: int = Field(default=1000, ge=1, le=100_000, description="How many of the last requests are kept.")
    candidates: int = Field(
        default=5, ge=0, le=100, description="How many workers of each choice of a router are kept, with their costs."
    )
    interval: float = Field(default=1.0, ge=0.1, le=60, description="Seconds between two states of the feed.")
    readers: int = Field(default=50, ge=1, le=1000, description="How many may read the feed at the same time.")


class FeedExtension(Extension):
    """Folds each event into the way of its request, and each end of a request into rates."""

    NAME = "feed"
    Config = FeedConfig
    config: FeedConfig

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        super().__init__(config, services)
        self._ways = RequestHistories(self.config.requests)
        self._rates = Rates(time.time)
        self._names = WorkerNames(services.pools)
        self._meters = TenantMeters(services.metrics, services.metrics_prefix)
        self._feed = _Broadcast(self.config.interval, self._message, self.spawn)

    def routes(self) -> Iterable[HttpRoute]:
        """Return the routes for operators."""
        admin = ListenerName.ADMIN
        return [
            HttpRoute("GET", "/admin/state", self._show, "What all frontends and workers do now", admin),
            HttpRoute("GET", "/admin/feed", self._stream, "The state, again and again, as server-sent events", admin),
            HttpRoute("GET", "/admin/requests/{id}", self._find, "What happened to one request", admin),
        ]

    async def start(self) -> None:
        """Begin to read events, and to answer other frontends."""
        peers = self.services.peers
        peers.serve(_STATE, self._answer_state)
        peers.serve(_REQUEST, self._answer_request)
        self._events = self.services.requests.subscribe(_CAPACITY, self.config.candidates)
        self.spawn(self._read(), name="read events")

    async def aclose(self) -> None:
        """End the feeds of all readers too."""
        await self._feed.aclose()
        await super().aclose()

    async def _read(self) -> None:
        while events := await self._events.batch():
            for start in range(0, len(events), _AT_ONCE):
                for event in events[start : start + _AT_ONCE]:
                    self._take(event)
                await asyncio.sleep(0)
            # What comes meanwhile is read together: to be woken costs more than to read an event.
            await asyncio.sleep(_PAUSE)

    def _take(self, event: RequestEvent) -> None:
        if isinstance(event, RequestRouted):
            self._names.note(event.instance_id)
        way = self._ways.add(event)
        if way is not None and isinstance(event, RequestFinished):
            self._rates.add(event.record, refused=way.refused, moved=way.moved)
            self._meters.add(event.record, refused=way.refused)

    async def _answer_state(self, payload: Any) -> View:
        return frontend_view(self.services, self._ways, self._rates, self._names)

    async def _answer_request(self, payload: Any) -> Any:
        way = self._ways.find(str(payload))
        return None if way is None else timeline(way, self._names)

    async def _state(self) -> State:
        peers = self.services.peers
        replies = await peers.call_all(_STATE, timeout=_ANSWER)
        views, missing = {}, dict(replies.missing)
        for one, reply in replies.replies.items():
            try:
                views[one] = read_view(reply)
            except Unreadable as error:
                missing[one] = f"it tells its state in another way, as another release does: {error}"
        return join_views(Views(replies.frontends, views, missing), peers.own.frontend_id)

    async def _message(self) -> bytes:
        return b"event: state\ndata: " + msgspec.json.encode(await self._state()) + b"\n\n"

    async def _show(self, http: web.Request) -> web.Response:
        return _json(await self._state())

    async def _find(self, http: web.Request) -> web.Response:
        wanted = http.match_info["id"]
        replies = await self.services.peers.call_all(_REQUEST, wanted, timeout=_ANSWER)
        missing = {f"{one:x}": reason for one, reason in replies.missing.items()}
        found = [(one, way) for one, way in replies.replies.items() if way is not None]
        if not found:
            silent = f"; {len(missing)} of {len(replies.frontends)} frontends did not answer" if missing else ""
            raise HttpFault(404, f"no frontend knows this request: the last {self.config.requests} are kept{silent}")
        # A client may have used an id of its own twice, at different frontends.
        frontend_id, way = max(found, key=lambda pair: pair[1]["received"])
        frontend = next(one for one in replies.frontends if one.frontend_id == frontend_id)
        told = {"id": f"{frontend_id:x}", "host": frontend.host, "pid": frontend.pid}
        return _json({"request": way, "frontend": told, "missing": missing})

    async def _stream(self, http: web.Request) -> web.StreamResponse:
        if self._feed.readers >= self.config.readers:
            raise HttpFault(503, f"{self.config.readers} read the feed already; see the feed's `readers`")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        # It counts before anything is waited for, so that no more than that get in at once.
        async with self._feed.reading() as reader:
            await response.prepare(http)
            while message := await reader.next():
                try:
                    async with asyncio.timeout(_STALL):
                        await response.write(message)
                except (TimeoutError, ConnectionError):
                    if http.transport is not None:
                        http.transport.abort()
                    break
        return response


class _Broadcast:
    """Makes a message every `interval` seconds while there are readers, and keeps the latest only."""

    def __init__(self, interval: float, make: Callable[[], Awaitable[bytes]], spawn: Spawn) -> None:
        self._interval = interval
        self._make = make
        self._spawn = spawn
        self.readers = 0
        self._number = 0
        self._latest = b""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def reading(self) -> _Reader:
        """Return a reader. The first has the making begin, the last has it end."""
        return _Reader(self)

    async def after(self, number: int) -> tuple[int, bytes]:
        """Return the latest message that is newer than `number`, and its number; empty once there is none any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._number > number)
            return self._number, b"" if self._closed else self._latest

    def enter(self) -> None:
        """Add a reader."""
        self.readers += 1
        if not self._closed and (self._task is None or self._task.done()):
            self._task = self._spawn(self._run(), "make states")

    async def leave(self) -> None:
        """Remove a reader."""
        self.readers -= 1
        if not self.readers:
            await self._stop()

    async def aclose(self) -> None:
        """End the feed of each reader. Safe twice."""
        self._closed = True
        await self._stop()
        async with self._changed:
            self._changed.notify_all()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                due = loop.time() + self._interval
                await self._notify(await self._make())
                await asyncio.sleep(due - loop.time())
        except Exception:
            # The readers end with it; the next one begins anew.
            await self._notify(b"")
            raise

    async def _notify(self, message: bytes) -> None:
        async with self._changed:
            self._number, self._latest = self._number + 1, message
            self._changed.notify_all()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


class _Reader:
    """Reads the latest message each time: one that is slow misses those in between."""

    def __init__(self, feed: _Broadcast) -> None:
        self._feed = feed
        self._number = 0

    async def __aenter__(self) -> _Reader:
        self._number = self._feed._number
        self._feed.enter()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._feed.leave()

    async def next(self) -> bytes:
        """Return the next message; empty once there is none any more."""
        self._number, message = await self._feed.after(self._number)
        return message


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
