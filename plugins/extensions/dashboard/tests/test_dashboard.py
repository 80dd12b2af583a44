"""The dashboard keeps what extensions promise; it lets in who has a token, and no page of another site."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import aiohttp
import pytest
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.errors import ConfigError
from dynamo_plugin_extension_dashboard.dashboard import _FILES, DashboardConfig, DashboardExtension
from dynamo_testing import ExtensionFactory, ExtensionHost, ExtensionKit
from dynamo_testing.extension.host import TOKEN

VIEWER_TOKEN = "viewer-0123456789"
PAGE = [f"GET /dashboard/{name}" for name in _FILES if name != "index.html"]


class _WithActs(DashboardExtension):
    """Beside the dashboard a route that changes something, and one that shows something."""

    def routes(self) -> list[HttpRoute]:
        async def done(http: aiohttp.web.Request) -> aiohttp.web.Response:
            return aiohttp.web.Response(text="done")

        admin = ListenerName.ADMIN
        shown = HttpRoute("GET", "/admin/shown", done, "Shows", admin)
        return [*super().routes(), shown, HttpRoute("POST", "/admin/act", done, "Acts", admin, acts=True)]


class TestContract(ExtensionKit):
    """Every promise of an extension, and of this one."""

    UNGUARDED: ClassVar = [
        "GET /dashboard",
        *PAGE,
        "GET /dashboard/session",
        "POST /dashboard/login",
        "POST /dashboard/logout",
    ]

    @pytest.fixture
    def make_extension(self) -> ExtensionFactory:
        config = DashboardConfig(viewer_token=VIEWER_TOKEN, hosts=["ops.example.com"])  # type: ignore[arg-type]
        return lambda services: _WithActs(config, services)

    async def test_viewers_cannot_have_the_token_of_operators(self) -> None:
        config = DashboardConfig(viewer_token=TOKEN)  # type: ignore[arg-type]

        with pytest.raises(ConfigError, match=r"^extensions\.kit\.viewer_token: .*admin\.token") as caught:
            ExtensionHost(lambda services: DashboardExtension(config, services))

        assert TOKEN not in str(caught.value)

    async def test_the_page_loads_nothing_from_elsewhere(self, host: ExtensionHost) -> None:
        async with browser(host) as page, page.get("/dashboard") as answer:
            assert answer.status == 200
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in (await answer.text()).replace("http-equiv", "")

    async def test_a_file_that_the_browser_has_is_not_sent_again(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            async with page.get("/dashboard/main.js") as first:
                etag = first.headers["ETag"]
            async with page.get("/dashboard/main.js", headers={"If-None-Match": etag}) as second:
                assert second.status == 304

    async def test_without_a_login_nothing_is_shown(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            assert await told(page, "/dashboard/session") == {"role": None, "asks_for_token": True}
            assert await status(page, "GET", "/admin/shown") == 401
            assert await status(page, "GET", "/dashboard/settings") == 401

    async def test_an_operator_may_read_and_act(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            about = await login(page, TOKEN)
            assert about["role"] == "operator"
            assert await told(page, "/dashboard/session") == about
            assert await status(page, "GET", "/admin/shown") == 200
            assert await status(page, "POST", "/admin/act", **{"x-csrf-token": about["csrf"]}) == 200
            rows = (await told(page, "/dashboard/settings"))["settings"]
            assert {"key": "admin.token", "value": "***", "origin": "kit.yaml:1"} in rows

    async def test_a_viewer_may_only_read(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            about = await login(page, VIEWER_TOKEN)
            assert about["role"] == "viewer"
            assert await status(page, "GET", "/admin/shown") == 200
            assert await status(page, "POST", "/admin/act", **{"x-csrf-token": about["csrf"]}) == 403

    async def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(self, host: ExtensionHost) -> None:
        async with browser(host) as page, page.post("/dashboard/login", json={"token": TOKEN}) as answer:
            (cookie,) = answer.headers.getall("Set-Cookie")
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            assert TOKEN not in cookie

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"x-csrf-token": "another"},
            {"x-csrf-token": "right", "Origin": "http://evil.example"},
            {"x-csrf-token": "right", "Origin": "null"},
            {"x-csrf-token": "right", "Sec-Fetch-Site": "cross-site"},
            {"x-csrf-token": "right", "Sec-Fetch-Site": "same-site"},
            {"x-csrf-token": "right", "Host": "evil.example"},
        ],
    )
    async def test_a_forged_act_is_refused(self, host: ExtensionHost, headers: dict[str, str]) -> None:
        async with browser(host) as page:
            about = await login(page, TOKEN)
            forged = {name: about["csrf"] if value == "right" else value for name, value in headers.items()}
            assert await status(page, "POST", "/admin/act", **forged) in (401, 403)

    @pytest.mark.parametrize("path", ["/dashboard", "/dashboard/session", "/admin/shown"])
    async def test_a_name_that_another_site_has_made_lead_here_is_refused(self, host: ExtensionHost, path: str) -> None:
        async with browser(host) as page:
            await login(page, TOKEN)
            cookies = "; ".join(f"{one.key}={one.value}" for one in page.cookie_jar)
            assert await status(page, "GET", path, Host="evil.example:80", Cookie=cookies) == 403
            assert await status(page, "GET", path, Host="ops.example.com", Cookie=cookies) == 200

    async def test_a_session_ends_with_the_logout(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            await login(page, TOKEN)
            cookies = "; ".join(f"{one.key}={one.value}" for one in page.cookie_jar)
            assert await status(page, "POST", "/dashboard/logout") == 200
            assert await status(page, "GET", "/admin/shown", Cookie=cookies) == 401

    async def test_wrong_tokens_have_to_wait_and_the_right_one_does_not(self, host: ExtensionHost) -> None:
        async with browser(host) as page:
            wrong = [await status(page, "POST", "/dashboard/login", {"token": "not-the-token"}) for _ in range(12)]
            assert wrong == [401] * 5 + [429] * 7
            assert (await login(page, TOKEN))["role"] == "operator"

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"token": 1}', b'{"tokens": "x"}', b"\xff" * 9000])
    async def test_a_login_that_is_none_is_named(self, host: ExtensionHost, body: bytes) -> None:
        async with browser(host) as page, page.post("/dashboard/login", data=body) as answer:
            assert answer.status == (413 if len(body) > 8192 else 400)


@asynccontextmanager
async def browser(host: ExtensionHost) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield what keeps cookies, as a browser does."""
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(host.url, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def told(page: aiohttp.ClientSession, path: str) -> Any:
    async with page.get(path) as answer:
        assert answer.status == 200
        return await answer.json()


async def status(page: aiohttp.ClientSession, method: str, path: str, body: Any = None, **headers: str) -> int:
    async with page.request(method, path, json=body, headers=headers) as answer:
        return answer.status


async def login(page: aiohttp.ClientSession, token: str) -> Any:
    async with page.post("/dashboard/login", json={"token": token}) as answer:
        assert answer.status == 200
        return await answer.json()
