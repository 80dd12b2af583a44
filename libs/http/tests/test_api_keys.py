"""Keys: who is let in, what the handler is told of them, and what those are told who are not."""

from __future__ import annotations

import logging
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.errors import ConfigError
from dynamo_http.auth import AdminToken, ApiKeys, hash_of, new_key
from dynamo_http.request_identity import principal_of
from dynamo_http.settings import AuthSettings
from pydantic import ValidationError

from libs.http.tests.serving import make

KEY, OTHER = new_key(), new_key()
TOKEN = "operators-" + "x" * 16


class Door:
    """A listener with one route behind keys, and one behind the operators' token."""

    def __init__(self, *keys: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.seen: list[Principal] = []
        self.failed: list[str] = []
        loaded = ApiKeys.load(AuthSettings.model_validate({"keys": keys}), env or {}, self.failed.append)
        assert loaded is not None
        self.listener = make(
            loaded.protect(HttpRoute("GET", "/models", self._note)),
            AdminToken(TOKEN, self.failed.append).protect(HttpRoute("GET", "/metrics", self._note)),
            HttpRoute("GET", "/health", self._note),
        )

    async def _note(self, request: web.Request) -> web.Response:
        self.seen.append(principal_of(request))
        return web.Response(text="come in")

    async def ask(self, path: str, headers: Any) -> tuple[int, Any]:
        async with aiohttp.ClientSession() as client, client.get(self.listener.url + path, headers=headers) as response:
            if response.status == 200:
                return 200, None
            return response.status, (response.headers["WWW-Authenticate"], await response.json())

    async def __aenter__(self) -> Door:
        await self.listener.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.listener.aclose()


ENTRY = {"id": "team-a", "hash": hash_of(KEY), "models": ["m"], "tenant": "a", "priority": 7}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer   {KEY}"},
        {"x-api-key": KEY},
        {"X-Api-Key": f" {KEY} "},
    ],
)
async def test_a_valid_key_is_admitted_with_its_principal(headers: dict[str, str]) -> None:
    async with Door(ENTRY) as door:
        assert (await door.ask("/models", headers))[0] == 200

    assert door.seen == [Principal(key_id="team-a", tenant="a", priority=7, models=frozenset({"m"}))]
    assert door.failed == []


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"Authorization": ""}, "missing"),
        ({"Authorization": "Bearer "}, "missing"),
        ({"Authorization": f"Basic {KEY}"}, "missing"),
        ({"Authorization": KEY}, "missing"),
        ({"Authorization": f"Bearer {OTHER}"}, "unknown"),
        ({"Authorization": f"Bearer {KEY}x"}, "unknown"),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, "unknown"),
        ({"Authorization": f"Bearer {hash_of(KEY)}"}, "unknown"),
        ({"Authorization": f"Bearer {KEY} {KEY}"}, "unknown"),
        ({"Authorization": f"Bearer {TOKEN}"}, "unknown"),
        ({"x-api-key": OTHER}, "unknown"),
        ([("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {KEY}")], "missing"),
        ([("x-api-key", KEY), ("x-api-key", OTHER)], "missing"),
        ({"Authorization": f"Bearer {OTHER}", "x-api-key": KEY}, "unknown"),
        ({"Authorization": "Basic abc", "x-api-key": KEY}, "missing"),
    ],
)
async def test_a_missing_or_wrong_key_gets_401(headers: Any, reason: str) -> None:
    async with Door(ENTRY) as door:
        status, (challenge, body) = await door.ask("/models", headers)

    assert status == 401
    assert challenge == ("Bearer" if reason == "missing" else 'Bearer error="invalid_token"')
    assert body["error"]["type"] == "authentication_error"
    assert body["error"]["code"] == (None if reason == "missing" else "invalid_api_key")
    assert door.seen == []
    assert door.failed == [reason]


async def test_a_key_of_undecodable_bytes_is_unknown() -> None:
    async with Door(ENTRY) as door:
        status, _ = await door.ask("/models", {"Authorization": "Bearer \udcff\udcfe"})

    assert status == 401


async def test_the_operators_token_opens_their_routes_and_keys_do_not() -> None:
    async with Door(ENTRY) as door:
        assert (await door.ask("/metrics", {"Authorization": f"Bearer {TOKEN}"}))[0] == 200
        assert (await door.ask("/metrics", {"Authorization": f"Bearer {KEY}"}))[0] == 401
        assert (await door.ask("/metrics", {}))[0] == 401


async def test_unprotected_routes_need_no_key() -> None:
    async with Door(ENTRY) as door:
        assert (await door.ask("/health", {}))[0] == 200

    assert door.seen == [Principal()]


async def test_each_of_many_keys_has_its_own_principal() -> None:
    keys = [new_key() for _ in range(50)]
    async with Door(*({"id": f"k{index}", "hash": hash_of(key)} for index, key in enumerate(keys))) as door:
        for key in keys:
            assert (await door.ask("/models", {"x-api-key": key}))[0] == 200

    assert [principal.key_id for principal in door.seen] == [f"k{index}" for index in range(50)]


async def test_a_key_may_come_from_a_variable() -> None:
    async with Door({"id": "a", "env": "TEAM_KEY"}, env={"TEAM_KEY": KEY}) as door:
        assert (await door.ask("/models", {"x-api-key": KEY}))[0] == 200


async def test_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with Door(ENTRY) as door:
        for key in (KEY, OTHER):
            await door.ask("/models", {"Authorization": f"Bearer {key}"})

    assert KEY not in caplog.text
    assert OTHER not in caplog.text
    assert KEY not in repr(door.seen)


@pytest.mark.parametrize(
    ("keys", "env", "says"),
    [
        ([{"id": "a", "env": "NO_SUCH"}], {}, r"auth\.keys\[0\]\.env: environment variable 'NO_SUCH' is not set"),
        ([{"id": "a", "env": "K"}], {"K": ""}, "is not set"),
        ([{"id": "a", "env": "K"}], {"K": "short"}, "fewer than 16 characters"),
        ([{"id": "a", "hash": hash_of(KEY)}, {"id": "b", "env": "K"}], {"K": KEY}, "the same key as that of 'a'"),
    ],
)
def test_unusable_keys_are_config_errors(keys: list[Any], env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ApiKeys.load(AuthSettings.model_validate({"keys": keys}), env)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([{"id": "a"}], "needs either hash or env"),
        ([{"id": "a", "hash": hash_of(KEY), "env": "K"}], "needs either hash or env"),
        ([{"id": "a", "hash": KEY}], "is not `sha256:` and 64 hexadecimal digits"),
        ([{"id": "a", "hash": "sha256:abc"}], "64 hexadecimal digits"),
        ([{"id": "a", "hash": hash_of(KEY)}, {"id": "a", "hash": hash_of(OTHER)}], "the same id"),
        ([{"id": "a", "hash": hash_of(KEY)}, {"id": "b", "hash": hash_of(KEY)}], "the same hash"),
    ],
)
def test_invalid_key_entries_are_refused_without_showing_the_key(keys: list[Any], says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AuthSettings.model_validate({"keys": keys})

    assert says in caught.value.errors()[0]["msg"]
    assert KEY not in caught.value.errors()[0]["msg"]


def test_without_entries_there_are_no_keys() -> None:
    assert ApiKeys.load(AuthSettings(), {}) is None


def test_the_operators_token_may_be_a_hash_and_must_be_long() -> None:
    AdminToken(hash_of(KEY))
    for secret, says in (("short", "fewer than 16"), ("sha256:abc", "64 hexadecimal digits")):
        with pytest.raises(ConfigError, match=rf"^admin\.token: .*{says}"):
            AdminToken(secret)
        with pytest.raises(ConfigError, match=rf"^--token: .*{says}"):
            AdminToken(secret, where="--token")


def test_new_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(len(key) > 40 for key in keys)
