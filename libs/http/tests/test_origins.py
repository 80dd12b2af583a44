"""Routes without a token serve programs of this host and of others, and no page that leads a browser here."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_http.auth import AdminToken, Operators
from dynamo_http.listener import Listener
from dynamo_http.origins import is_on_this_host

TOKEN = "a-token-that-is-long-enough"


class House:
    """Routes that change something and one that shows something, with and without a token; `changed` lists uses."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        open_, closed = Operators(None), Operators(AdminToken(TOKEN))
        routes = [
            *(open_.protect(HttpRoute(method, "/set", self._change)) for method in ("GET", "POST", "DELETE")),
            open_.protect(HttpRoute("POST", "/act", self._change, acts=True)),
            closed.protect(HttpRoute("POST", "/with-token", self._change)),
        ]
        self.listener = Listener(
            "public", host="127.0.0.1", port=0, routes=routes, body_limit=1000, max_connections=10, idle_timeout=30
        )

    async def _change(self, request: web.Request) -> web.Response:
        self.changed.append(f"{request.method} {request.path}")
        return web.Response()

    async def ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        headers = {name: value.replace("PORT", str(self.listener.port)) for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as client,
            client.request(method, f"{self.listener.url}{path}", headers=headers) as response,
        ):
            return response.status, await response.text()


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    async with made.listener:
        await made.listener.start()
        yield made


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://evil.example:PORT", "Host": "evil.example:PORT"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": "[::1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/set"), ("DELETE", "/set"), ("POST", "/act")])
async def test_without_a_token_foreign_pages_may_not_change_anything(
    house: House, method: str, path: str, headers: dict[str, str]
) -> None:
    status, answer = await house.ask(method, path, headers)

    assert status == 403
    assert "set a token" in answer
    assert house.changed == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost:PORT"},
        {"Host": "[::1]:PORT"},
        {"Host": "192.0.2.1"},
        {"Host": socket.gethostname().upper()},
        {"Origin": "http://127.0.0.1:PORT", "Sec-Fetch-Site": "same-origin"},
    ],
)
async def test_without_a_token_programs_and_own_pages_may_change_things(house: House, headers: dict[str, str]) -> None:
    assert (await house.ask("POST", "/set", headers))[0] == 200


async def test_a_route_that_acts_serves_no_page_at_all(house: House) -> None:
    assert (await house.ask("POST", "/act", {}))[0] == 200
    assert (await house.ask("POST", "/act", {"Origin": "http://127.0.0.1:PORT"}))[0] == 403


async def test_reads_and_requests_with_a_token_are_served_under_any_host_name(house: House) -> None:
    foreign = {"Origin": "http://ops.example", "Host": "ops.example"}

    assert (await house.ask("GET", "/set", foreign))[0] == 200
    assert (await house.ask("POST", "/with-token", foreign | {"Authorization": f"Bearer {TOKEN}"}))[0] == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_this_host(address: str) -> None:
    assert is_on_this_host(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "192.168.1.2", "::ffff:10.0.0.1", "fe80::1", "8.8.8.8", "", None, "x"])
def test_everything_else_is_another_host(address: str | None) -> None:
    assert not is_on_this_host(address)
