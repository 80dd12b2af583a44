"""What Redis discovery promises beyond the kit: who may use the server, and what happens when it forgets."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from dynamo_core import WatchEvent, WatchKind
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.store import Store
from dynamo_testing.discovery.processes import OWNER, records_end_with_their_processes
from dynamo_testing.servers.certificates import make_certificates
from dynamo_testing.servers.ports import free_port
from dynamo_testing.settings_checks import refused_settings
from pydantic import SecretStr

README = Path(__file__).parents[1] / "README.md"

SCRIPT = OWNER.format(
    imports="""
from dynamo_plugin_discovery_redis.config import RedisConfig
from dynamo_plugin_discovery_redis.discovery import RedisDiscovery
""",
    discovery="RedisDiscovery(RedisConfig(url=sys.argv[1], ttl=1, poll=0.1, timeout=0.4), Metrics())",
)


async def until(events: Any, kind: WatchKind) -> list[WatchEvent]:
    """Read up to the first event of a kind, which is the last of the answer."""
    seen: list[WatchEvent] = []
    async with asyncio.timeout(10):
        while not seen or seen[-1].kind is not kind:
            seen.append(await anext(events))
    return seen


# Processes.


async def test_the_records_of_a_process_that_is_killed_vanish_and_those_of_others_stay(server: Any, make: Any) -> None:
    await records_end_with_their_processes(SCRIPT, server.url, make)


async def test_a_lease_stays_alive_while_the_event_loop_is_blocked(server: Any, make: Any) -> None:
    lease = await make().lease(1.2)
    await lease.put("a", b"1")
    key = f"dynamo:lease:{lease.id:x}"
    blocked = threading.Event()
    missing: list[float] = []

    def look_from_elsewhere() -> None:
        with redis.Redis(port=server.port) as client:
            while not blocked.wait(0.05):
                if not client.exists(key):
                    missing.append(time.monotonic())

    poller = threading.Thread(target=look_from_elsewhere)
    poller.start()
    # An engine that loads its weights without giving way.
    time.sleep(2.0)  # noqa: ASYNC251
    blocked.set()
    poller.join(5)

    assert missing == []
    assert not lease.lost.is_set()


async def test_a_lease_that_the_server_goes_on_refusing_is_lost_and_one_without_a_server_is_not(
    server: Any, make: Any
) -> None:
    refused = await make(lost_after=0.3).lease()
    server.kill()
    await asyncio.sleep(1.0)
    assert not refused.lost.is_set()

    server.start("--requirepass", "changed")
    async with asyncio.timeout(10):
        await refused.lost.wait()

    with pytest.raises(CannotConnect, match="lost"):
        await refused.put("a", b"1")


# A store that forgets.


async def test_an_emptied_store_keeps_the_view_until_leases_return(server: Any, make: Any) -> None:
    one, other = make(), make()
    lease = await one.lease()
    await lease.put("a", b"1")
    await lease.put("b", b"2")
    async with aclosing(other.watch("")) as events:
        await until(events, WatchKind.SYNCED)

        with redis.Redis(port=server.port) as client:
            client.flushall()
        seen = [event.kind for event in await until(events, WatchKind.FRESH)]
        await lease.put("c", b"3")
        last = await until(events, WatchKind.PUT)

    assert seen == [WatchKind.STALE, WatchKind.FRESH]
    assert last == [WatchEvent(WatchKind.PUT, "c", b"3")]


async def test_a_lease_that_does_not_return_to_an_emptied_store_is_gone(server: Any, make: Any) -> None:
    one, other = make(), make()
    await (await one.lease()).put("a", b"1")
    one._heartbeats.stop(5)
    async with aclosing(other.watch("")) as events:
        await until(events, WatchKind.SYNCED)

        with redis.Redis(port=server.port) as client:
            client.flushall()
        seen = await until(events, WatchKind.FRESH)

    assert [event.kind for event in seen] == [WatchKind.STALE, WatchKind.DELETE, WatchKind.FRESH]
    assert seen[1].key == "a"


async def test_after_a_wipe_a_dead_worker_is_gone_within_its_own_ttl(server: Any, make: Any) -> None:
    short = {"ttl": 1.0, "timeout": 0.4}
    dead, alive, watching = make(**short), make(**short), make(**short)
    await (await dead.lease()).put("dead", b"1")
    await (await alive.lease()).put("alive", b"1")
    dead._heartbeats.stop(5)
    with closing(Store(dead._settings)) as store:
        store.register(7, 60.0, {"a lease of a minute whose owner is gone": b""})
    async with aclosing(watching.watch("")) as events:
        await until(events, WatchKind.SYNCED)

        with redis.Redis(port=server.port) as client:
            client.flushall()
        seen = await until(events, WatchKind.DELETE)

    assert seen == [WatchEvent(WatchKind.STALE), WatchEvent(WatchKind.DELETE, "dead")]


def test_trying_out_a_server_leaves_nothing_that_outlives_a_lease(make_server: Any) -> None:
    server = make_server()
    with redis.Redis(port=server.port) as client:
        # It may register a lease and no more, so that trying out ends between the two.
        client.execute_command("ACL", "SETUSER", "dynamo", "on", ">secret", "~*", "&*", "+@all", "-exists")
        store = Store(RedisConfig(url=server.url, username="dynamo", password=SecretStr("secret"), ttl=4.0))
        with closing(store), pytest.raises(CannotConnect, match="too little"):
            store.probe()
        (lease,) = client.keys("dynamo:lease:*")

        assert 0 < client.pttl(lease) <= 4000


async def test_a_deleted_record_is_written_again(server: Any, make: Any) -> None:
    discovery = make()
    lease = await discovery.lease()
    await lease.put("a", b"1")
    async with aclosing(discovery.watch("")) as events:
        await until(events, WatchKind.SYNCED)
        with redis.Redis(port=server.port) as client:
            client.hdel(f"dynamo:lease:{lease.id:x}", "a")
            client.delete("dynamo:leases")

        async with asyncio.timeout(10):
            assert (await anext(events)).kind is WatchKind.DELETE
            assert await anext(events) == WatchEvent(WatchKind.PUT, "a", b"1")


async def test_change_notifications_resume_after_a_restart(server: Any, make: Any) -> None:
    writer, reader = make(), make(ttl=30, poll=15)
    async with aclosing(reader.watch("")) as events:
        await until(events, WatchKind.SYNCED)
        server.kill()
        server.start()
        # The listener connects again by itself, which is a reason to look.
        await writer.put_value("a", b"1")

        assert (await until(events, WatchKind.PUT))[-1].key == "a"


async def test_a_key_that_two_leases_put_is_the_last_ones_and_falls_back_to_the_other(make: Any) -> None:
    discovery = make()
    first, second = await discovery.lease(), await discovery.lease()
    await first.put("a", b"first")
    await second.put("a", b"second")
    async with aclosing(discovery.watch("")) as events:
        assert (await anext(events)).value == b"second"
        await until(events, WatchKind.SYNCED)

        await second.remove("a")

        assert await until(events, WatchKind.PUT) == [WatchEvent(WatchKind.PUT, "a", b"first")]


async def test_systems_with_different_prefixes_or_databases_do_not_see_each_other(make: Any) -> None:
    for settings in ({}, {"prefix": "other"}, {"database": 1}):
        await make(**settings).put_value("key", repr(settings).encode())

    for settings in ({}, {"prefix": "other"}, {"database": 1}):
        async with aclosing(make(**settings).watch("")) as events:
            seen = await until(events, WatchKind.SYNCED)
        assert [event.value for event in seen[:-1]] == [repr(settings).encode()]


# Who may use the server.


async def test_a_server_that_is_not_there_is_waited_for_and_then_named(make: Any) -> None:
    port = free_port()
    discovery = make(url=f"redis://127.0.0.1:{port}", start_timeout=0.2)

    with pytest.raises(CannotConnect, match=rf"discovery\.url: Redis at 127\.0\.0\.1:{port} does not serve"):
        await discovery.start()


async def test_a_server_that_comes_late_is_used(server: Any, make: Any) -> None:
    server.kill()
    discovery = make(start_timeout=20)
    starting = asyncio.create_task(discovery.start())
    await asyncio.sleep(0.1)
    await asyncio.to_thread(server.start)

    async with asyncio.timeout(20):
        await starting


@pytest.mark.parametrize("login", [{}, {"password": "wrong"}, {"username": "nobody", "password": "right"}])
async def test_a_wrong_login_is_an_error_of_the_configuration(
    make_server: Any, make: Any, login: dict[str, str]
) -> None:
    discovery = make(url=make_server("--requirepass", "right").url, **login)

    with pytest.raises(ConfigError, match=r"discovery\.password: .*refuses the login") as caught:
        await discovery.start()

    assert "wrong" not in str(caught.value).replace("WRONGPASS", "")


async def test_the_permissions_of_the_readme_suffice_and_fewer_are_reported(make_server: Any, make: Any) -> None:
    found = re.search(r"ACL SETUSER dynamo (.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    rules = found[1].replace("\\\n", " ").replace("…", "secret").split()
    server = make_server()
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "dynamo", *rules)
        client.execute_command("ACL", "SETUSER", "less", *rules, "-publish")
    allowed = make(url=server.url, username="dynamo", password="secret")
    await allowed.start()
    lease = await allowed.lease()
    await lease.put("a", b"1")
    async with aclosing(allowed.watch("")) as events:
        assert await anext(events) == WatchEvent(WatchKind.PUT, "a", b"1")
    await lease.aclose()

    with pytest.raises(ConfigError, match=r"discovery\.username: .*too little"):
        await make(url=server.url, username="less", password="secret").start()


async def test_a_database_that_does_not_exist_is_an_error_of_the_configuration(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"discovery\.database: "):
        await make(database=9999).start()


async def test_an_encrypted_server_is_used_only_if_its_certificate_is_trusted(
    make_server: Any, make: Any, tmp_path: Path
) -> None:
    folder = await asyncio.to_thread(make_certificates, tmp_path, redis="IP:127.0.0.1")
    own = ("--tls-cert-file", f"{folder}/redis.crt", "--tls-key-file", f"{folder}/redis.key")
    server = make_server(*own, "--tls-auth-clients", "no", tls=True)

    trusting = make(url=server.url, tls={"ca": f"{folder}/ca.crt"})
    await trusting.start()
    await (await trusting.lease()).put("a", b"1")
    async with aclosing(trusting.watch("")) as events:
        assert await anext(events) == WatchEvent(WatchKind.PUT, "a", b"1")

    with pytest.raises(ConfigError, match=r"discovery\.tls\.ca: "):
        await make(url=server.url).start()
    with pytest.raises(ConfigError, match=r"discovery\.tls\.ca: .*cannot be used"):
        await make(url=server.url, tls={"ca": str(tmp_path / "none.pem")}).start()


test_settings_that_cannot_be_meant_are_refused = refused_settings(
    RedisConfig,
    [
        ({"url": "redis://me:hunter2@host"}, "set `username` and `password`"),
        ({"url": "redis://host/3"}, "set `database`"),
        ({"url": "http://host"}, "neither redis://host:port nor"),
        ({"url": "redis://host:99999"}, "a port that is none"),
        ({"username": "me"}, "needs a `password`"),
        ({"ttl": 1, "heartbeat": 0.6, "timeout": 0.3}, "at most half of ttl"),
        ({"ttl": 1, "timeout": 2}, "timeout .* at most half of ttl"),
        ({"tls": {"cert": "a.pem"}}, "`cert` and `key` belong together"),
    ],
    secret="hunter2",
)


def test_an_address_may_leave_out_scheme_and_port() -> None:
    assert RedisConfig(url="[::1]").url == "redis://[::1]:6379"
    assert RedisConfig(url="valkey://store:1").port == 1
    assert RedisConfig(url="rediss://store").wants_tls
