"""Limits over several frontends and a real Redis: two policies in one process stand for two frontends."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import redis
from dynamo_core.errors import ConfigError, RateLimited, ServiceOverloaded

from plugins.conftest import until

DEADLINE = 15.0
README = Path(__file__).parents[1] / "README.md"
#: A burst that no test lives long enough to see filled up.
FEW: dict[str, Any] = {"requests_per_minute": 0.5, "burst_requests": 20}
#: An idle frontend asks the server after a third of `ttl`, and notices so that it is away.
QUICK: dict[str, Any] = {"ttl": 6.0, "timeout": 3.0}

Make: TypeAlias = Callable[..., Any]


def reached(*frontends: Any) -> Callable[[], bool]:
    return lambda: all(one.sample("rate_limit_stale") == 0 for one in frontends)


def away(*frontends: Any) -> Callable[[], bool]:
    return lambda: all(one.sample("rate_limit_stale") == 1 for one in frontends)


@pytest.fixture
async def make(server: Any, make_frontend: Callable[..., Any]) -> AsyncIterator[Make]:
    """Start admissions on one server, as different processes would have them."""
    made: list[Any] = []

    async def make(shared: dict[str, Any] | None = None, **config: Any) -> Any:
        # Time enough for an answer on a busy machine.
        settings = {"url": server.url, "ttl": 30.0, "timeout": 10.0} | (shared or {})
        frontend = make_frontend(shared=settings, **config)
        made.append(frontend)
        await frontend.admission.start()
        return frontend

    yield make
    await asyncio.gather(*(frontend.admission.aclose() for frontend in made))
    assert [frontend.admission.held for frontend in made] == [0] * len(made)


async def granted(frontends: Any, clients: int, each: int) -> int:
    """Return how many requests of so many clients at the same time are let in."""

    async def client(frontend: Any) -> int:
        count = 0
        for _ in range(each):
            try:
                await frontend.answer()
            except RateLimited:
                continue
            count += 1
        return count

    return sum(await asyncio.gather(*(client(frontends[number % len(frontends)]) for number in range(clients))))


async def test_two_frontends_together_admit_exactly_the_limit_to_64_clients(make: Make) -> None:
    both = [await make(**FEW), await make(**FEW)]

    assert await granted(both, 64, 3) == 20
    assert sum(one.sample("rate_limited_total", rule="key", limit="requests") for one in both) == 64 * 3 - 20


async def test_64_clients_of_two_frontends_are_never_more_at_once_than_the_limit(make: Make) -> None:
    both = [await make(concurrent_requests=4), await make(concurrent_requests=4)]
    out, most, done = 0, 0, 0

    async def client(frontend: Any) -> None:
        nonlocal out, most, done
        for _ in range(10):
            try:
                permit = await frontend.ask()
            except RateLimited:
                continue
            out += 1
            most = max(most, out)
            await asyncio.sleep(0)
            out -= 1
            done += 1
            permit.release(1)

    await asyncio.gather(*(client(both[number % 2]) for number in range(64)))

    assert most <= 4
    assert done >= 4
    permits: list[Any] = []
    while len(permits) < 4:
        # The server hears of the last releases with the next message.
        try:
            permits.append(await both[0].ask())
        except RateLimited:
            continue
    for permit in permits:
        permit.release(0)


async def test_tokens_of_an_answer_at_one_frontend_are_owed_at_the_other_and_at_a_later_one(make: Make) -> None:
    one, two = await make(tokens_per_minute=60), await make(tokens_per_minute=60)
    (await one.ask(prompt=10)).release(100_000)
    await until(lambda: not one.admission._sharing._changed)
    late = await make(tokens_per_minute=60)

    for frontend in (one, two, late):
        refused = await frontend.refused()
        assert refused.retry_after > 90_000
        assert refused.limits["remaining-tokens"] == "0"


async def test_a_client_that_leaves_during_the_redis_call_is_refunded(make: Make, server: Any) -> None:
    frontend = await make(concurrent_requests=1, tokens_per_minute=0.001, burst_tokens=100, **FEW)
    server.freeze()
    asked = asyncio.create_task(frontend.ask(prompt=100))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    server.resume()

    assert asked.cancelled()
    await until(lambda: not frontend.admission._sharing._changed)
    (await frontend.ask(prompt=100)).release(0)
    assert (await frontend.refused()).limits["remaining-requests"] == "19"


async def test_requests_of_a_frontend_that_was_killed_count_no_more_after_a_while(make: Make) -> None:
    settings = {"ttl": 1.0, "timeout": 0.5}
    one, two = [await make(settings, concurrent_requests=1) for _ in range(2)]
    permit = await one.ask()
    await two.refused()
    # As if the process ended: nothing is told any more.
    await one.admission._sharing._tasks.aclose()

    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                (await two.ask()).release(0)
            except RateLimited:
                await asyncio.sleep(0.05)
            else:
                break
    permit.release(0)


async def test_a_request_that_takes_long_counts_for_as_long(make: Make, server: Any) -> None:
    one, two = [await make({"ttl": 0.9, "timeout": 0.4}, concurrent_requests=1) for _ in range(2)]
    permit = await one.ask()
    told: set[str] = set()
    with redis.Redis(port=server.port, decode_responses=True) as client:
        (key,) = client.scan_iter()

        def more() -> bool:
            told.update(value for field, value in client.hgetall(key).items() if field.startswith("n"))
            return len(told) >= 6

        await until(more)
    await two.refused()
    permit.release(0)


async def test_a_closing_frontend_releases_everything_and_its_records_expire(make: Make, server: Any) -> None:
    one, two = [await make({"ttl": 3600.0}, concurrent_requests=1) for _ in range(2)]
    permit = await one.ask("secret-key", tenant="secret-tenant")
    await two.refused("secret-key")

    await one.admission.aclose()

    (await two.ask("secret-key")).release(0)
    permit.release(0)
    with redis.Redis(port=server.port, decode_responses=True) as client:
        keys = list(client.scan_iter())
        assert keys
        assert all(client.pttl(key) > 0 for key in keys)
        assert "secret" not in str([(key, client.hgetall(key)) for key in keys])


async def test_each_frontend_limits_alone_without_redis_and_reports_afterwards(
    make: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    both = [await make(QUICK, **FEW), await make(QUICK, **FEW)]
    assert await granted(both[:1], 1, 5) == 5
    with caplog.at_level(logging.INFO):
        server.kill()
        await until(away(*both))
        # The documented bound: what is left here, and for each other frontend its own burst.
        assert await granted(both, 64, 3) == 15 + 20
        server.start()
        await until(reached(*both))
        await until(lambda: not any(one.admission._sharing._changed for one in both))

    # The server came back empty: of its burst of 20, 35 are spent.
    assert (await both[0].refused()).retry_after > 14 * 120
    told = [record.getMessage() for record in caplog.records if "shared" in record.getMessage()]
    assert len([text for text in told if "each frontend keeps them for itself" in text]) == 2
    assert told.count("rate limits are shared again") == 2


async def test_on_outage_allow_admits_every_request(make: Make, server: Any) -> None:
    frontend = await make(QUICK | {"on_outage": "allow"}, concurrent_requests=5, **FEW)
    server.kill()
    await until(away(frontend))

    assert await granted([frontend], 10, 10) == 100
    held = [await frontend.ask() for _ in range(10)]
    server.start()
    await until(reached(frontend))

    # They cost nothing, but they run.
    assert (await frontend.refused()).limits["remaining-requests"] == "20"
    for permit in held:
        permit.release(50)
    assert await granted([frontend], 1, 30) >= 19


async def test_on_outage_refuse_rejects_limited_requests(make: Make, server: Any) -> None:
    frontend = await make(QUICK | {"on_outage": "refuse"}, limits=[{"keys": ["a"], **FEW}])
    held = await frontend.ask()
    server.kill()
    await until(away(frontend))

    with pytest.raises(ServiceOverloaded, match="cannot be checked now"):
        frontend.precheck()
    await frontend.answer("b")
    held.release(3)
    server.start()
    await until(reached(frontend))
    await frontend.answer()
    assert frontend.sample("rate_limited_total", rule="", limit="outage") == 1


@pytest.mark.parametrize(("policy", "outcome"), [("local", None), ("allow", None), ("refuse", ServiceOverloaded)])
async def test_a_hanging_redis_follows_the_outage_policy(
    policy: str, outcome: type[Exception] | None, make: Make, server: Any
) -> None:
    frontend = await make({"on_outage": policy, "timeout": 0.2}, **FEW)
    server.freeze()

    answers = await asyncio.gather(*(frontend.answer() for _ in range(5)), return_exceptions=True)

    assert [None if answer is None else type(answer) for answer in answers] == [outcome] * 5
    server.resume()
    await until(reached(frontend))
    await frontend.answer()


async def test_a_frontend_starts_and_serves_before_redis_is_there(make: Make, server: Any) -> None:
    server.kill()
    frontend = await make(concurrent_requests=1)
    assert frontend.sample("rate_limit_stale") == 1
    permit = await frontend.ask()
    server.start()
    await until(reached(frontend))
    other = await make(concurrent_requests=1)

    await other.refused()
    permit.release(0)


async def test_a_server_that_was_emptied_or_lost_its_scripts_is_used_again(make: Make, server: Any) -> None:
    one, two = [await make({"ttl": 0.9, "timeout": 0.4}, concurrent_requests=1) for _ in range(2)]
    permit = await one.ask()
    with redis.Redis(port=server.port) as client:
        client.flushall()
        client.script_flush()
        # It is told again of what runs.
        await until(lambda: client.dbsize() > 0)

    await two.refused()
    permit.release(0)


async def test_a_wrong_password_blocks_no_request_and_is_logged_once(
    make: Make, make_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    strict = make_server("--requirepass", "right")
    frontend = await make({"url": strict.url, "password": "hunter2"}, **FEW)
    await frontend.answer()
    await until(lambda: frontend.admission._sharing._failures > 2)

    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"Redis at 127.0.0.1:{strict.port} refuses the login" in told
    assert "hunter2" not in caplog.text + repr(frontend.admission.config)


async def test_the_permissions_of_the_readme_suffice_and_fewer_are_reported(
    make: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, text = README.read_text().partition("ACL SETUSER dynamo ")
    rules = text.partition("```")[0].replace("\\\n", "").replace("…", "secret").split()
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "dynamo", *rules)
        client.execute_command("ACL", "SETUSER", "less", *rules, "-hset")
    login = {"username": "dynamo", "password": "secret"}
    for database in (0, 1):
        both = [await make(login | {"database": database}, concurrent_requests=2, **FEW) for _ in range(2)]
        assert await granted(both, 4, 10) == 20
        await until(lambda pair=both: not any(one.admission._sharing._changed for one in pair))  # type: ignore[misc]
    assert not caplog.records

    less = await make(login | {"username": "less"}, **FEW)
    await less.answer()

    assert "lets the user do too little" in caplog.text


async def test_prefixes_databases_and_rules_keep_counts_apart(make: Make) -> None:
    for shared in ({}, {"prefix": "other"}, {"database": 1}):
        assert await granted([await make(shared, **FEW)], 1, 25) == 20
    assert await granted([await make(limits=[{"name": "second", **FEW}])], 1, 25) == 20


async def test_foreign_values_in_a_bucket_do_no_harm(make: Make, server: Any) -> None:
    frontend = await make(concurrent_requests=5, **FEW)
    await frontend.answer()
    with redis.Redis(port=server.port) as client:
        (key,) = client.scan_iter()
        for mapping in (
            {"requests": "x", "at": "y", "nstranger": "many"},
            {"requests": "inf", "tokens": "1e999", "nstranger": "9 -"},
            {"requests": "5", "at": "99999999999", "nstranger": "9 1"},
        ):
            client.hset(key, mapping=mapping)
            await frontend.answer()
        client.delete(key)
        client.rpush(key, "a list")
        await frontend.answer()
        assert client.hget(key, "nstranger") is None


def test_without_the_library_shared_limits_are_one_clear_error(
    make_frontend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo_plugin_admission_rate_limit.store", None)

    with pytest.raises(
        ConfigError, match=r"admission\.shared: .*pip install 'dynamo-plugin-admission-rate-limit\[redis\]'"
    ):
        make_frontend(shared={"url": "redis://host"})


def test_limits_of_one_frontend_do_not_load_the_library() -> None:
    program = "import dynamo_plugin_admission_rate_limit.admission, sys; sys.exit('redis' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0
