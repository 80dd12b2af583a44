"""Limits of tenants over several frontends and a real Redis: two policies in one process stand for two frontends."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from dynamo_core import AdmissionServices, Permit, PreprocessedRequest, Principal, StopConditions
from dynamo_core.errors import ConfigError, ServiceOverloaded
from dynamo_core.protocol import Instance, ModelCard
from dynamo_plugin_admission_fair_queue.admission import FairQueueAdmission
from dynamo_plugin_admission_fair_queue.config import FairQueueConfig
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics
from dynamo_testing.servers.certificates import make_certificates
from pydantic import ValidationError

from plugins.conftest import until

DEADLINE = 30.0
LIMITS = {"a": {"concurrency": 2}}
README = Path(__file__).parents[1] / "README.md"


class House:
    """A frontend's admission, and everybody who asks there."""

    def __init__(self, **config: Any) -> None:
        self.metrics = Metrics()
        settings = FairQueueConfig.model_validate(config)
        self.admission = FairQueueAdmission(settings, AdmissionServices(self.metrics))
        self.pool = Pool("m", "aggregated")
        self.pool.add(Instance(instance_id=1), ModelCard(name="m", instance_id=1))

    async def ask(self, tenant: str = "a", tokens: int = 1) -> Permit:
        request = PreprocessedRequest(model="m", token_ids=[1] * tokens, stop_conditions=StopConditions(max_tokens=1))
        who = Principal(tenant=tenant)
        self.admission.precheck("m", who, (self.pool,))
        return await self.admission.admit(request, who, (self.pool,))

    async def waits(self, tenant: str = "a") -> asyncio.Task[Permit]:
        """Return one who asks and is not let in now."""
        asked = asyncio.create_task(self.ask(tenant))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asked.done()
        return asked

    def full(self, tenant: str = "a") -> bool:
        return self.admission._limits.full(tenant)

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"dynamo_admission_{name}", labels)

    @property
    def peers(self) -> float | None:
        return self.sample("shared_peers")

    @property
    def stale(self) -> float | None:
        return self.sample("shared_stale")


async def soon(asked: asyncio.Task[Permit]) -> Permit:
    async with asyncio.timeout(DEADLINE):
        return await asked


Make = Callable[..., Any]


@pytest.fixture
async def make(server: Any) -> AsyncIterator[Make]:
    """Start admissions on one server, as different processes would have them."""
    made: list[House] = []

    async def make(tenants: dict[str, Any] | None = None, max_wait: float = 30.0, **settings: Any) -> House:
        # Time enough for an answer on a busy machine.
        shared = {"url": server.url, "interval": 0.01, "ttl": 30.0, "timeout": 10.0} | settings
        house = House(tenants=tenants or LIMITS, max_wait=max_wait, shared=shared)
        made.append(house)
        await house.admission.start()
        return house

    yield make
    await asyncio.gather(*(house.admission.aclose() for house in made))


@pytest.fixture
async def both(make: Make) -> tuple[House, House]:
    """Return two who know of each other."""
    one, two = await make(), await make()
    await until(lambda: one.peers == two.peers == 1)
    return one, two


async def test_requests_of_one_frontend_block_the_other_until_they_end(
    both: tuple[House, House],
) -> None:
    one, two = both
    first, second = await one.ask(), await two.ask()
    await until(lambda: one.full() and two.full())
    waiting = await one.waits()
    other = await two.ask("others")

    second.release(1)

    third = await soon(waiting)
    await until(two.full)
    for permit in (first, third, other):
        permit.release(1)
    await until(lambda: not two.full())


async def test_tokens_that_are_spent_at_one_frontend_are_missing_at_the_other_and_at_one_that_comes_later(
    make: Make,
) -> None:
    tenants = {"a": {"tokens_per_second": 10, "burst_tokens": 10}}
    one, two = await make(tenants), await make(tenants)
    await until(lambda: one.peers == two.peers == 1)
    (await one.ask(tokens=100_000)).release(0)

    limits = two.admission._limits
    await until(lambda: limits.ready_at("a", asyncio.get_running_loop().time()) > asyncio.get_running_loop().time())
    late = await make(tenants)

    for house in (one, two, late):
        with pytest.raises(ServiceOverloaded, match="used up its tokens"):
            await house.ask()
        assert house.sample("refusals_total", model="m", tenant="a", reason="rate") == 1


KILLED = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[2])
from test_fair_queue_shared import House

async def main():
    house = House(**json.loads(sys.argv[1]))
    await house.admission.start()
    held = [await house.ask(), await house.ask()]
    print("holds", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


async def test_a_killed_frontends_requests_expire(make: Make, server: Any) -> None:
    two = await make(ttl=1.5, timeout=0.7)
    shared = f'{{"url": "{server.url}", "interval": 0.01, "ttl": 1.5, "timeout": 0.7}}'
    config = f'{{"tenants": {{"a": {{"concurrency": 2}}}}, "shared": {shared}}}'
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, config, str(Path(__file__).parent),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            assert await process.stdout.readline() == b"holds\n"
        await until(two.full)
        waiting = await two.waits()
        process.kill()

        (await soon(waiting)).release(1)
        await until(lambda: two.peers == 0)
        with redis.Redis(port=server.port) as client:
            await until(lambda: client.zcard("dynamo:limits:frontends") == 1)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_unchanged_report_is_renewed_before_it_expires(make: Make, server: Any) -> None:
    one, two = await make(ttl=1.5, timeout=0.7), await make(ttl=1.5, timeout=0.7)
    held = [await one.ask(), await one.ask()]
    told: set[float] = set()
    with redis.Redis(port=server.port) as client:
        while len(told) < 10:
            known = len(told)
            await until(lambda: len(told | scores(client)) > known)  # noqa: B023 - asked before it changes
            told |= scores(client)

    await until(two.full)
    for permit in held:
        permit.release(1)


def scores(client: Any) -> set[float]:
    """Return the scores once each frontend has reported."""
    return {score for _, score in client.zrange("dynamo:limits:frontends", 0, -1, withscores=True)}


async def test_a_closing_frontend_frees_its_share_at_once(make: Make, server: Any) -> None:
    one, two = await make(ttl=3600.0), await make(ttl=3600.0)
    held = [await one.ask(), await one.ask()]
    await until(two.full)
    waiting = await two.waits()

    await one.admission.aclose()

    (await soon(waiting)).release(1)
    for permit in held:
        permit.release(1)
    with redis.Redis(port=server.port) as client:
        assert all(client.pttl(key) > 0 for key in client.scan_iter()), "everything expires"


async def test_requests_are_served_over_the_last_view_while_redis_is_away_and_frontends_agree_when_it_is_back_empty(
    both: tuple[House, House], server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = both
    held = [await one.ask(), await one.ask()]
    await until(two.full)
    with caplog.at_level(logging.INFO):
        server.kill()
        await until(lambda: one.stale == two.stale == 1)
        (await two.ask("others")).release(1)
        waiting = await two.waits()
        server.start()
        await until(lambda: one.stale == two.stale == 0)
        # Nothing was free in between, although the server knows nothing at first.
        assert not waiting.done()
        held.pop().release(1)

        (await soon(waiting)).release(1)
    for permit in held:
        permit.release(1)
    told = [record.getMessage() for record in caplog.records if "shared" in record.getMessage()]
    assert len([text for text in told if "are not shared for now" in text]) == 2
    assert told.count("limits of tenants are shared again") == 2


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_limits_hold_for_each_frontend_when_redis_stays_away(how: str, make: Make, server: Any) -> None:
    one, two = await make(ttl=1.2, timeout=0.5), await make(ttl=1.2, timeout=0.5)
    held = [await one.ask(), await one.ask()]
    await until(two.full)
    waiting = await two.waits()

    if how == "killed":
        server.kill()
    else:
        server.freeze()

    held += [await soon(waiting), await two.ask()]
    assert (two.peers, two.full()) == (0, True)
    await until(lambda: one.stale == two.stale == 1)
    if how == "hangs":
        server.resume()
        await until(lambda: (one.peers, two.peers, one.stale, two.stale) == (1, 1, 0, 0))
    for permit in held:
        permit.release(1)


async def test_a_frontend_starts_and_serves_before_redis_is_there(make: Make, server: Any) -> None:
    server.kill()
    one, two = await make(), await make()
    permit = await one.ask()
    server.start()

    await until(lambda: one.peers == two.peers == 1)
    await until(lambda: two.admission._limits._peer_running.get("a") == 1)
    permit.release(1)


async def test_a_wrong_password_blocks_no_request_and_is_logged_once(
    make: Make, make_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = make_server("--requirepass", "right").url
    with caplog.at_level(logging.DEBUG):
        one = await make(url=url, password="hunter2")
        permits = [await one.ask(), await one.ask()]
        assert one.full()
        await until(lambda: one.admission._sharing._failures > 2)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]

    assert one.stale == 1
    assert len(warnings) == 1
    assert re.search(r"Redis at 127\.0\.0\.1:\d+ refuses the login", warnings[0].getMessage())
    assert "hunter2" not in caplog.text + repr(one.admission.config)
    for permit in permits:
        permit.release(1)
    right = [await make(url=url, password="right") for _ in range(2)]
    await until(lambda: all(house.peers == 1 for house in right))


async def test_a_server_that_echoes_commands_does_not_leak_the_password(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async def repeat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = (await reader.read(1000)).decode().split()
        writer.write(f"-ERR unknown command, with args beginning with: {sent}\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(repeat, "127.0.0.1", 0) as odd:
        with caplog.at_level(logging.DEBUG):
            await make(url=f"redis://127.0.0.1:{odd.sockets[0].getsockname()[1]}", password="hunter2")

    assert "with args beginning with" in caplog.text
    assert "hunter2" not in caplog.text


async def test_the_permissions_of_the_readme_suffice_and_fewer_are_reported(
    make: Make, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = re.search(r"ACL SETUSER dynamo (.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    rules = found[1].replace("\\\n", " ").replace("…", "secret").split()
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "dynamo", *rules)
        client.execute_command("ACL", "SETUSER", "less", *rules, "-getrange")
    for database in (0, 1):
        allowed = [await make(username="dynamo", password="secret", database=database) for _ in range(2)]
        await until(lambda pair=allowed: all(house.peers == 1 for house in pair))  # type: ignore[misc]
    assert not caplog.records

    less = await make(username="less", password="secret")

    assert "lets the user do too little" in caplog.text
    with redis.Redis(port=server.port) as client:
        client.execute_command("ACL", "SETUSER", "less", "+getrange")
    await until(lambda: (less.peers, less.stale) == (2, 0))


async def test_prefixes_and_databases_keep_systems_apart(make: Make) -> None:
    alone = [await make(prefix="other"), await make(database=1)]
    pair = [await make(), await make()]
    await until(lambda: all(house.peers == 1 for house in pair))
    permits = [await pair[0].ask(), await pair[0].ask()]
    await until(pair[1].full)

    assert [house.peers for house in alone] == [0, 0]
    assert not any(house.full() for house in alone)
    for permit in permits:
        permit.release(1)


async def test_foreign_records_in_the_store_are_ignored(
    both: tuple[House, House], server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = both
    with redis.Redis(port=server.port) as client:
        seconds, micros = client.time()
        now = seconds * 1_000_000 + micros
        for name, data in (("f" * 16, b"x" * 1_000_000), ("0" * 16, b"{}"), ("1" * 16, b""), ("é" * 5, b"-")):
            client.set(f"dynamo:limits:frontend:{name}", data)
            client.zadd("dynamo:limits:frontends", {name: now})
        client.rpush(f"dynamo:limits:frontend:{'2' * 16}", "a list")
        client.zadd("dynamo:limits:frontends", {"2" * 16: now, "3" * 16: "+inf"})
    await until(lambda: caplog.text.count("is left out") == 4 and all(house.peers == 1 for house in both))
    permits = [await one.ask(), await one.ask()]
    await until(two.full)

    assert one.stale == two.stale == 0
    assert len(caplog.records) == 4, "one for each stranger that is heard, in each frontend"
    for permit in permits:
        permit.release(1)


async def test_an_encrypted_server_is_used_only_if_its_certificate_is_trusted(
    make: Make, make_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = await asyncio.to_thread(make_certificates, tmp_path, redis="IP:127.0.0.1")
    own = ("--tls-cert-file", f"{folder}/redis.crt", "--tls-key-file", f"{folder}/redis.key")
    url = make_server(*own, "--tls-auth-clients", "no", tls=True).url

    pair = [await make(url=url, tls={"ca": f"{folder}/ca.crt"}) for _ in range(2)]
    await until(lambda: all(house.peers == 1 for house in pair))
    strict = await make(url=url)

    assert strict.stale == 1
    assert "certificate verify failed" in caplog.text


def test_a_certificate_that_cannot_be_used_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("none")

    with pytest.raises(ConfigError, match=r"admission\.shared\.tls\.ca: .*PEM"):
        House(shared={"url": "rediss://host", "tls": {"ca": str(broken)}})
    with pytest.raises(ConfigError, match=r"admission\.shared\.tls: .*PEM"):
        House(shared={"url": "redis://host", "tls": {"cert": str(broken), "key": str(broken)}})


ABSENT = """
import asyncio, sys
from dynamo_core.contracts.admission import AdmissionServices
from dynamo_core.errors import ConfigError
from dynamo_telemetry.metrics import Metrics
from dynamo_plugin_admission_fair_queue.admission import FairQueueAdmission
from dynamo_plugin_admission_fair_queue.config import FairQueueConfig

async def main():
    admission = FairQueueAdmission(FairQueueConfig(), AdmissionServices(Metrics()))
    await admission.start()
    await admission.aclose()
    print("redis" in sys.modules)
    # As if it were not installed.
    sys.modules["redis"] = None
    try:
        FairQueueAdmission(FairQueueConfig(shared={"url": "redis://host"}), AdmissionServices(Metrics()))
    except ConfigError as error:
        print(error)

asyncio.run(main())
"""


def test_the_library_is_needed_only_for_sharing_and_its_absence_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True, timeout=30, check=True)
    loaded, told = done.stdout.splitlines()

    assert loaded == "False"
    assert told.startswith("admission.shared: ")
    assert "pip install 'dynamo-plugin-admission-fair-queue[redis]'" in told


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "url"),
        ({"url": "redis://me:hunter2@host"}, "set `username` and `password`"),
        ({"url": "redis://host/3"}, "set `database`"),
        ({"url": "http://host"}, "neither redis://host:port nor"),
        ({"url": "redis://host:99999"}, "a port that is none"),
        ({"url": "host?x=1"}, "is not redis://host:port"),
        ({"url": "host", "username": "me"}, "needs a `password`"),
        ({"url": "host", "ttl": 1, "timeout": 0.6}, "timeout .* at most half of ttl"),
        ({"url": "host", "ttl": 1, "timeout": 0.5, "interval": 0.6}, "interval .* at most half of ttl"),
        ({"url": "host", "tls": {"cert": "a.pem"}}, "`cert` and `key` belong together"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        FairQueueConfig.model_validate({"shared": settings})
    assert "hunter2" not in str(caught.value.errors(include_input=False))


def test_an_address_may_leave_out_scheme_and_port() -> None:
    def shared(url: str) -> Any:
        return FairQueueConfig.model_validate({"shared": {"url": url}}).shared

    assert shared("[::1]").url == "redis://[::1]:6379"
    assert shared("valkey://store:1").port == 1
    assert shared("rediss://store").wants_tls
