"""What browsers are told about pages of other origins."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.errors import Problem
from dynamo_http.cors import Cors
from dynamo_http.errors import error_response

from libs.http.tests.serving import serving as plain

PAGE = "https://chat.example.com"
QUESTION = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}


async def ask(_: web.Request) -> web.Response:
    return web.Response(text="answer")


async def refuse(_: web.Request) -> web.Response:
    return error_response(Problem(401, "no"))


@asynccontextmanager
async def serving(*origins: str) -> AsyncIterator[str]:
    routes = [HttpRoute("POST", "/ask", ask), HttpRoute("POST", "/refuse", refuse)]
    async with plain(*routes, cors=Cors(origins) if origins else None) as listener:
        yield listener.url


async def call(url: str, method: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    async with aiohttp.ClientSession() as client, client.request(method, url, headers=headers) as response:
        told = {name: value for name, value in response.headers.items() if name.startswith(("Access-", "Vary"))}
        return response.status, told


async def test_no_cors_headers_without_named_origins() -> None:
    async with serving() as url:
        assert await call(f"{url}/ask", "POST", {"Origin": PAGE}) == (200, {})
        status, told = await call(f"{url}/ask", "OPTIONS", {"Origin": PAGE} | QUESTION)

    assert (status, told) == (405, {})


async def test_a_named_origin_gets_cors_headers() -> None:
    async with serving(PAGE) as url:
        status, told = await call(f"{url}/ask", "OPTIONS", {"Origin": PAGE} | QUESTION)
        answered, marks = await call(f"{url}/ask", "POST", {"Origin": PAGE})

    assert status == 204
    assert told["Access-Control-Allow-Origin"] == PAGE
    assert told["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert "POST" in told["Access-Control-Allow-Methods"]
    assert answered == 200
    assert (marks["Access-Control-Allow-Origin"], marks["Vary"]) == (PAGE, "Origin")
    assert "Access-Control-Allow-Credentials" not in told | marks


async def test_refusals_have_cors_headers_too() -> None:
    async with serving(PAGE) as url:
        for path, expected in (("/refuse", 401), ("/nowhere", 404)):
            status, told = await call(f"{url}{path}", "POST", {"Origin": PAGE})

            assert (status, told.get("Access-Control-Allow-Origin")) == (expected, PAGE)


async def test_other_origins_get_no_cors_headers() -> None:
    strangers = (
        "https://evil.example.com",
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "https://chat.example.com.evil.com",
        "https://evil.com/https://chat.example.com",
        "null",
        "*",
    )
    async with serving(PAGE) as url:
        for origin in strangers:
            status, told = await call(f"{url}/ask", "OPTIONS", {"Origin": origin} | QUESTION)
            _, marks = await call(f"{url}/ask", "POST", {"Origin": origin})

            assert status == 405, origin
            assert "Access-Control-Allow-Origin" not in told | marks, origin
        # Nor does a program notice anything that is no browser.
        assert "Access-Control-Allow-Origin" not in (await call(f"{url}/ask", "POST", {}))[1]


async def test_headers_that_are_no_names_are_not_repeated() -> None:
    async with serving(PAGE) as url:
        wish = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": 'a"b<c>'}
        status, told = await call(f"{url}/ask", "OPTIONS", wish)

    assert status == 204
    assert "Access-Control-Allow-Headers" not in told
