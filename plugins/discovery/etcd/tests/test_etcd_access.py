"""Logins, certificates, and what is told when they do not fit."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dynamo_core import WatchKind
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.discovery import EtcdDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.servers.certificates import make_certificates
from pydantic import ValidationError

#: Time enough for a login on a busy machine, in which etcd computes more than in all the rest.
LOGIN: dict[str, Any] = {"username": "worker", "password": "opensesame", "ttl": 6.0, "timeout": 3.0}


def guard(etcd: Any) -> None:
    """Switch authentication on, with a user that may use the prefix of the framework alone."""
    for path, body in (
        ("user/add", {"name": "root", "password": "rootpass"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("role/add", {"name": "dynamo"}),
        ("role/grant", {"name": "dynamo", "perm": {"permType": 2, "key": "ZHluYW1vLw==", "range_end": "ZHluYW1vMA=="}}),
        ("user/add", {"name": "worker", "password": "opensesame"}),
        ("user/grant", {"user": "worker", "role": "dynamo"}),
        ("user/add", {"name": "nobody", "password": "opensesame"}),
        ("enable", {}),
    ):
        if path == "user/grant" and body["user"] == "root":
            etcd.ask("/v3/auth/role/add", {"name": "root"})
        etcd.ask(f"/v3/auth/{path}", body)


async def test_discovery_works_with_a_login_and_never_shows_the_secret(
    etcd: Any, make: Any, see: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    guard(etcd)
    owner, other = make(**LOGIN), make(**LOGIN)
    await owner.start()
    lease, seen = await owner.lease(), see(other)

    await lease.put("a", b"1")
    await owner.put_value("b", b"2")
    await seen.shows({"a": b"1", "b": b"2"})
    await lease.remove("a")
    await owner.put_value("b", None)
    await seen.shows({})
    await lease.aclose()

    assert "opensesame" not in caplog.text
    assert "opensesame" not in repr(owner.config)


async def test_a_token_that_etcd_has_forgotten_is_fetched_anew(etcd: Any, make: Any, see: Any) -> None:
    guard(etcd)
    owner, seen = make(**LOGIN), see(make(**LOGIN))
    lease = await owner.lease()
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    # Its tokens live in memory.
    etcd.kill()
    await seen.hears(WatchKind.STALE)
    etcd.start()
    await seen.hears(WatchKind.FRESH)
    await lease.put("b", b"2")

    await seen.shows({"a": b"1", "b": b"2"})


async def test_authentication_may_be_switched_on_while_processes_run(etcd: Any, make: Any, see: Any) -> None:
    owner, seen = make(**LOGIN), see(make(**LOGIN))
    lease = await owner.lease()
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    guard(etcd)
    await lease.put("b", b"2")

    await seen.shows({"a": b"1", "b": b"2"})


@pytest.mark.parametrize(
    ("login", "told"),
    [
        ({}, r"^discovery\.password: etcd at http://127.* refuses: user name is empty; set `username` and `password`$"),
        (LOGIN | {"password": "wrongpass"}, r"^discovery\.password: .*authentication failed"),
        (LOGIN | {"username": "nobody"}, r"^discovery\.username: .*permission denied; the plugin's README"),
        (LOGIN | {"prefix": "others"}, r"^discovery\.username: .*permission denied; the plugin's README"),
    ],
)
async def test_a_wrong_login_is_a_config_error_with_a_remedy(
    etcd: Any, make: Any, login: dict[str, Any], told: str
) -> None:
    guard(etcd)

    with pytest.raises(ConfigError, match=told) as raised:
        await make(**login).start()
    assert "wrongpass" not in str(raised.value)


async def test_a_lease_that_is_refused_for_long_is_lost(etcd: Any, make: Any) -> None:
    lease = await make(lost_after=0.2).lease()
    await lease.put("a", b"1")

    guard(etcd)
    root = etcd.ask("/v3/auth/authenticate", {"name": "root", "password": "rootpass"})["token"]
    etcd.ask("/v3/lease/revoke", {"ID": str(lease.id)}, token=root)

    async with asyncio.timeout(15):
        await lease.lost.wait()
    with pytest.raises(CannotConnect, match="lost"):
        await lease.put("a", b"2")


async def test_a_cluster_that_is_not_there_is_waited_for_and_then_named(make_on: Any) -> None:
    with pytest.raises(
        Exception, match=r"^discovery\.endpoints: etcd at http://127\.0\.0\.1:1 cannot be reached: .*; start"
    ):
        await make_on("http://127.0.0.1:1", start_timeout=0.1).start()


@pytest.mark.parametrize(
    ("status", "body", "is_etcd"),
    [
        (200, "<html>", False),
        (404, '{"detail": "Not Found"}', False),
        (404, '{"message": "Route not found", "code": 404}', False),
        (501, "not implemented", False),
        (503, "no healthy upstream", True),
        (503, '{"error": "etcdserver: no leader", "code": 14, "message": "etcdserver: no leader"}', True),
    ],
)
async def test_a_foreign_service_is_told_from_a_failing_cluster(
    make_on: Any, status: int, body: str, is_etcd: bool
) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text=body)

    server = await asyncio.get_running_loop().create_server(web.Server(answer), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    with pytest.raises(CannotConnect if is_etcd else ConfigError) as raised:
        await make_on(url, start_timeout=0).start()

    server.close()
    assert ("does not serve" if is_etcd else f"this is no etcd: {url} answers HTTP {status}") in str(raised.value)


async def test_over_tls_the_servers_certificate_is_checked_and_a_client_certificate_shown(
    make_etcd: Any, make_on: Any, see: Any, tmp_path: Path
) -> None:
    certificates = await asyncio.to_thread(make_certificates, tmp_path, node="IP:127.0.0.1")
    ca, cert, key = (str(certificates / name) for name in ("ca.crt", "node.crt", "node.key"))
    etcd = make_etcd(
        "--cert-file", cert, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth",
        tls_ca=Path(ca), tls_client=(cert, key),
    )  # fmt: skip
    good = make_on(etcd.url, tls={"ca": ca, "cert": cert, "key": key})

    await good.start()
    lease, seen = await good.lease(), see(good)
    await lease.put("a", b"1")
    await seen.shows({"a": b"1"})

    with pytest.raises(ConfigError, match=r"^discovery\.tls\.ca: .*certificate verify failed.*; name the authority"):
        await make_on(etcd.url).start()
    with pytest.raises(CannotConnect, match=r"^discovery\.endpoints: etcd at https://127"):
        await make_on(etcd.url, tls={"ca": ca}, start_timeout=0).start()
    with pytest.raises(ConfigError, match=r"^discovery\.tls\.ca: .*missing\.pem' cannot be used: No such file"):
        await make_on(etcd.url, tls={"ca": str(certificates / "missing.pem")}).start()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"endpoints": []}, "endpoints"),
        ({"endpoints": ["http://user:hunter2@etcd:2379"]}, "set `username` and `password`"),
        ({"endpoints": ["redis://etcd"]}, "neither http://host:port nor https://host:port"),
        ({"endpoints": ["http://etcd:2379/v3"]}, "neither http://host:port nor https://host:port"),
        ({"endpoints": ["etcd"], "tls": {}}, "write https://"),
        ({"username": "a"}, "belong together"),
        ({"tls": {"cert": "a"}}, "belong together"),
        ({"heartbeat": 6}, "heartbeat"),
        ({"poll": 6}, "poll"),
        ({"timeout": 6}, "timeout"),
        ({"ttl": 0.5}, "ttl"),
        ({"endpoint": "x"}, "endpoint"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as raised:
        EtcdConfig.model_validate(settings)

    # What pydantic adds about the input is left out by the loader.
    assert told in str(raised.value)


def test_addresses_are_completed() -> None:
    settings = EtcdConfig(endpoints=("etcd-0", "https://[::1]", "http://etcd-0:2379/", "b:1"))

    assert settings.endpoints == ("http://etcd-0:2379", "https://[::1]:2379", "http://b:1")


async def test_closing_needs_neither_a_start_nor_a_cluster() -> None:
    await EtcdDiscovery(EtcdConfig(), Metrics()).aclose()
