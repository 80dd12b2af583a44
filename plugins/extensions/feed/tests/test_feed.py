"""The feed keeps what extensions promise; its state is that of all requests; a request is found by both its ids."""

from __future__ import annotations

import pytest
from dynamo_plugin_extension_feed.feed import FeedConfig, FeedExtension
from dynamo_testing import ExtensionFactory, ExtensionHost, ExtensionKit


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

    async def test_a_request_is_told_event_by_event(self, host: ExtensionHost) -> None:
        await self.send_requests(host, "kit-1")

        found = await self.json(host, "/admin/requests/kit-1")

        events = [event["event"] for event in found["request"]["events"]]
        assert events[0] == "received"
        assert events[-1] == "finished"
        assert "routed" in events
        assert found["request"]["ended"]
