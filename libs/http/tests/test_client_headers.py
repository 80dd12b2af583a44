"""The headers that the settings name reach the handlers of routes with the principal; no other header does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.errors import InvalidArgument
from dynamo_http.client_headers import CLIENT_HEADERS, client_headers, with_client_headers
from dynamo_http.request_identity import PRINCIPAL, principal_of
from dynamo_http.settings import HttpSettings
from multidict import CIMultiDict

from libs.http.tests.serving import answer_to, serving

KNOWN = Principal(key_id="k", tenant="t")


async def told(*headers: tuple[str, str], **settings: Any) -> Principal:
    """Return the principal that the handler of a route finds."""
    seen: list[Principal] = []

    async def handler(http: web.Request) -> web.StreamResponse:
        seen.append(principal_of(http))
        return web.Response()

    route = HttpRoute("POST", "/", handler)
    named = client_headers(HttpSettings(**settings))
    if named is not None:
        route = with_client_headers(route, named)
    request = make_mocked_request("POST", "/", headers=CIMultiDict(headers))
    request[PRINCIPAL] = KNOWN
    await route.handler(request)
    (principal,) = seen
    return principal


async def test_headers_are_ignored_without_settings() -> None:
    assert client_headers(HttpSettings()) is None
    assert await told(("x-session", "s"), ("x-team", "t")) is KNOWN


async def test_names_are_of_any_case_and_values_stay_as_they_are() -> None:
    principal = await told(
        ("X-SESSION", "s 1"), ("x-Team", "Blue"), session_header="x-Session", forward_headers=["X-Team", "x-absent"]
    )

    assert (principal.key_id, principal.tenant, principal.session) == ("k", "t", "s 1")
    assert principal.headers == {"x-team": "Blue"}


async def test_a_header_that_comes_twice_is_one_list() -> None:
    assert (await told(("x-a", "1"), ("X-A", "2"), forward_headers=["x-a"])).headers == {"x-a": "1, 2"}


async def test_a_request_without_these_headers_costs_no_copy() -> None:
    assert await told(("x-b", "1"), session_header="x-s", forward_headers=["x-a"]) is KNOWN


@pytest.mark.parametrize("value", ["x" * 257, "a\tb"])
async def test_an_invalid_session_header_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match="`x-s` must") as refused:
        await told(("x-s", value), session_header="X-S")

    assert refused.value.field == "x-s"


async def test_an_undecodable_header_is_refused_by_name() -> None:
    async def handler(http: web.Request) -> web.StreamResponse:
        return web.Response(text=principal_of(http).session)

    named = client_headers(HttpSettings(forward_headers=("x-a",)))
    assert named is not None
    route = with_client_headers(HttpRoute("GET", "/", handler), named)
    async with serving(route) as listener:
        answer = await answer_to(listener, b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-A: \xff\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["param"] == "x-a"


def test_the_listener_leaves_other_requests_alone() -> None:
    assert CLIENT_HEADERS not in make_mocked_request("GET", "/")
