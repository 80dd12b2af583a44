"""The feed keeps what extensions promise; its state is that of all requests; a request is found by both its ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from dynamo_plugin_extension_feed.feed import FeedConfig, FeedExtension
from dynamo_testing import ExtensionFactory, ExtensionHost, ExtensionKit
from dynamo_testing.extension.host import TOKEN
from prometheus_client.parser import text_string_to_metric_families


class TestContract(ExtensionKit):
    """Every promise of an extension, and of this one."""

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        return lambda services: FeedExtension(FeedConfig(requests=2, interval=0.1, readers=1), services)

    async def test_the_last_requests_are_shown(self, host: ExtensionHost) -> None:
        await self.send_requests(host, "kit-1", "kit-2", "kit-3")

        state = await self.json(host, "/admin/state")

        assert [line["id"] for line in state["recent"]] == ["kit-3", "kit-2"]
        assert sum(row["requests"] for row in state["history"]) == 3
        (model,) = state["models"]
        assert model["last_minute"]["requests"] == 3
        assert len(state["workers"]) == 2

    async def test_requests_and_tokens_are_counted_by_tenant(self, host: ExtensionHost) -> None:
        await self.send_requests(host, "kit-1", "kit-2")

        page = (await host.metrics.render()).decode()

        labels = {"tenant": "default", "outcome": "answered"}
        assert sample(page, "dynamo_frontend_tenant_requests_total", **labels) == 2
        for kind in ("prompt", "cached", "output"):
            assert sample(page, "dynamo_frontend_tenant_tokens_total", tenant="default", kind=kind) is not None

    async def test_a_requests_history_lists_its_events(self, host: ExtensionHost) -> None:
        await self.send_requests(host, "kit-1")

        found = await self.json(host, "/admin/requests/kit-1")

        events = [event["event"] for event in found["request"]["events"]]
        assert events[0] == "received"
        assert events[-1] == "finished"
        assert "routed" in events
        assert found["request"]["ended"]

    async def test_a_request_that_is_not_kept_any_more_is_404(self, host: ExtensionHost) -> None:
        await self.send_requests(host, "kit-1", "kit-2", "kit-3")

        async with host.asked("GET", "/admin/requests/kit-1", token=TOKEN) as response:
            assert response.status == 404
            assert "no frontend knows this request: the last 2 are kept" in await response.text()

    async def test_the_feed_goes_on_and_has_no_more_readers_than_it_may(self, host: ExtensionHost) -> None:
        async with host.asked("GET", "/admin/feed", token=TOKEN) as reading:
            first, second = await state_of(reading), await state_of(reading)
            assert second["time"] > first["time"]
            async with host.asked("GET", "/admin/feed", token=TOKEN) as refused:
                assert refused.status == 503

    async def test_a_reader_that_reads_nothing_is_cut_off_and_makes_room(
        self, make_extension: ExtensionFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dynamo_plugin_extension_feed.feed._STALL", 1.5)
        # A state that is large, so that it does not fit between the two for long.
        crowded = ExtensionHost(make_extension, workers=range(1, 5001))
        try:
            await self.within(crowded.start(), "`start`")
            async with silent_reader(crowded.url):
                await self.within(let_in(crowded), "room for another reader")
        finally:
            await crowded.aclose()

    async def test_a_frontend_with_a_state_of_another_release_is_named(
        self, host: ExtensionHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dynamo_plugin_extension_feed.feed.frontend_view", lambda *args: {"workers": [], "more": 1})

        state = await self.json(host, "/admin/state")

        (frontend,) = state["frontends"]
        assert "as another release does: Object missing required field `standing`" in frontend["missing"]
        assert state["workers"] == state["models"] == []

    async def test_a_feed_ends_when_its_state_cannot_be_made_and_can_be_read_again(
        self, host: ExtensionHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with host.asked("GET", "/admin/feed", token=TOKEN) as reading:
            await state_of(reading)
            with monkeypatch.context() as patch:
                patch.setattr("dynamo_plugin_extension_feed.feed.join_views", broken)
                await self.within(reading.content.read(), "the end of the feed")
        assert "ZeroDivisionError" in host.failure

        async with host.asked("GET", "/admin/feed", token=TOKEN) as reading:
            assert (await state_of(reading))["workers"]


@asynccontextmanager
async def silent_reader(url: str) -> AsyncIterator[None]:
    """Yield a client that asks for the feed, and then reads nothing."""
    address = urlsplit(url)
    # What is more than the limit stays in the socket.
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1024)
    writer.write(f"GET /admin/feed HTTP/1.1\r\nHost: kit\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
    # The head of the answer: it counts as a reader now.
    assert await reader.read(16)
    try:
        yield
    finally:
        writer.transport.abort()


async def let_in(host: ExtensionHost) -> None:
    """Return once the feed has room."""
    refused = 0
    while True:
        async with host.asked("GET", "/admin/feed", token=TOKEN) as reading:
            if reading.status == 200:
                assert refused
                return
        refused += 1
        await asyncio.sleep(0.05)


def sample(page: str, name: str, **labels: str) -> float | None:
    """Return the value of a sample of a page of metrics."""
    families = text_string_to_metric_families(page)
    samples = [one for family in families for one in family.samples]
    return next((one.value for one in samples if one.name == name and one.labels == labels), None)


def broken(views: object, own: int) -> Mapping[str, object]:
    raise ZeroDivisionError


async def state_of(reading: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the next state of a feed."""
    while not (line := await reading.content.readline()).startswith(b"data: "):
        assert line, "the feed has ended"
    state: dict[str, Any] = json.loads(line[6:])
    return state
