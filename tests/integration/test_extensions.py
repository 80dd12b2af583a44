"""Extensions in real processes: what they see, what they serve, and that none of them harms a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from dynamo_core import (
    Extension,
    RequestAdmitted,
    RequestAttempted,
    RequestEvent,
    RequestFinished,
    RequestFirstToken,
    RequestReceived,
    RequestRouted,
)
from dynamo_core.errors import ConfigError, NotSupported
from dynamo_core.protocol import FrontendRecord
from dynamo_core.protocol.records import FRONTENDS
from dynamo_runtime.assembly import extensions as runtime_extensions
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.settings import load_settings

from tests.architecture.readers.registry import to_json
from tests.integration import extension_parts
from tests.integration.extension_parts import Asker, BesideWorkers, Lame, Recorder, Site, Stuck

CONFIG = """
frontend: {port: 0}
client: {drain_grace: 0, shutdown_timeout: 1}
router: {use: kv}
workers:
  mock: {model: {name: m}, engine: {use: mocker, speedup_ratio: 0}, replicas: 2, grace_period: 0}
"""
MANY = """
transport: {use: tcp}
discovery: {use: file, path: "%s", poll: 0.02, ttl: 2}
"""

Start = Callable[..., Any]
ExtensionT = TypeVar("ExtensionT", bound=Extension)


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Run a process of a config with these extensions, an entry each."""
    extension_parts.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    applications: list[Application] = []

    async def run(*entries: str, more: str = "", role: Role | None = None) -> Application:
        path = tmp_path / f"config-{len(applications)}.yaml"
        path.write_text(CONFIG + more + "\nextensions:\n" + "".join(f"- {{use: {entry}}}\n" for entry in entries))
        application = Application(load_settings(path, env={}), role)
        applications.append(application)
        await application.start()
        return application

    yield run
    for application in reversed(applications):
        await application.stop(grace=False)


async def ready(application: Application) -> Application:
    """Return once it sees both workers."""
    process = application.frontend_process
    assert process is not None
    await until(lambda: len(process.parts.models.instances()) == 2)
    return application


def extension(application: Application, cls: type[ExtensionT]) -> ExtensionT:
    frontend = application.frontend_process
    extensions = application.worker_process._extensions if frontend is None else frontend.parts.extensions
    made = extensions._made[cls.NAME]
    assert isinstance(made, cls)
    return made


async def get(url: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.json()


async def text(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return await response.text()


async def chat(application: Application, **more: Any) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 3, **more}
    url = f"{application.url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        await response.read()
        return response.status


async def until(condition: Callable[[], bool]) -> None:
    """Return once something holds that no event tells of."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


async def events_until_the_end(recorder: Recorder) -> list[RequestEvent]:
    await until(lambda: any(isinstance(event, RequestFinished) for event in recorder.events))
    return recorder.events


# What they see.


async def test_an_extension_gets_all_events_of_a_request(start: Start) -> None:
    application = await ready(await start("recorder"))

    assert await chat(application) == 200

    events = await events_until_the_end(extension(application, Recorder))
    received, admitted, routed, attempted, first, finished = events
    assert isinstance(received, RequestReceived)
    assert isinstance(admitted, RequestAdmitted)
    assert isinstance(routed, RequestRouted)
    assert isinstance(attempted, RequestAttempted)
    assert isinstance(first, RequestFirstToken)
    assert isinstance(finished, RequestFinished)
    assert {event.request_id for event in events} == {finished.record.request_id}
    assert [event.time for event in events] == sorted(event.time for event in events)
    assert admitted.prompt_tokens == finished.record.prompt_tokens > 0
    assert (routed.model, routed.role, routed.router, routed.after) == ("m", "aggregated", "kv", "")
    assert routed.candidates is not None
    assert len(routed.candidates) == 2
    assert routed.instance_id in {one.instance_id for one in routed.candidates}
    assert (attempted.attempt_id, attempted.error) == (routed.attempt_id, "")
    assert routed.instance_id == attempted.instance_id == finished.record.instance_id


async def test_a_request_of_several_choices_is_one_request_with_a_call_for_each(start: Start) -> None:
    application = await ready(await start("recorder"))

    assert await chat(application, n=3) == 200

    events = await events_until_the_end(extension(application, Recorder))
    routed = [event for event in events if isinstance(event, RequestRouted)]
    assert len({event.call_id for event in routed}) == len(routed) == 3
    assert len({event.request_id for event in events}) == 1
    assert [type(event) for event in events].count(RequestAdmitted) == 1
    assert [type(event) for event in events].count(RequestFirstToken) == 1


async def test_an_extension_is_given_views_of_the_frontend(start: Start) -> None:
    application = await ready(await start("recorder", more="admin: {port: 0, token: a-token-that-is-long}"))
    services = extension(application, Recorder).services

    (pool,) = services.pools()
    assert (services.role, services.name, services.namespace) == ("frontend", "recorder", "dynamo")
    assert [model.name for model in services.models.list()] == ["m"]
    assert [pool.state(instance_id) for instance_id in pool.instances] == ["free", "free"]
    assert services.loads.used_blocks(next(iter(pool.instances)), 0, 16) == 0
    rows = {key: (value, origin) for key, value, origin in services.settings.rows()}
    assert rows["admin.token"][0] == "***"
    assert rows["router.use"][1].endswith(":4")
    assert services.thresholds.armed is False


# What they serve.


async def test_routes_are_served_on_their_listeners_under_their_guards(start: Start) -> None:
    token = "a-token-that-is-long"
    application = await ready(await start("site", more=f"admin: {{port: 0, token: {token}}}"))
    assert application.frontend_process is not None
    admin = application.frontend_process.parts.listeners.all[1].url

    assert await get(f"{application.url}/site") == (200, {"name": "site"})
    assert (await get(f"{application.url}/site/broken"))[0] == 500
    assert (await get(f"{application.url}/admin/site"))[0] == 404
    assert (await get(f"{admin}/admin/site"))[0] == 401
    assert await get(f"{admin}/admin/site", authorization=f"Bearer {token}") == (200, {"name": "site"})
    found = [(await get(f"{admin}/admin/open?token={one}"))[1] for one in ("wrong", token)]
    assert found == [{"known": known, "token": True} for known in (False, True)]


async def test_a_path_that_is_taken_stays_with_its_owner_and_the_extension_fails(start: Start) -> None:
    application = await ready(await start("clash", "site"))

    status, health = await get(f"{application.url}/health")
    assert status == 200
    assert "GET /health is served already" in health["extensions"]["clash"]
    assert (await get(f"{application.url}/clash"))[0] == 404
    assert (await get(f"{application.url}/site"))[0] == 200


# What they do wrong.


async def test_extensions_that_block_fail_or_never_read_lose_events_and_cost_no_request(start: Start) -> None:
    application = await ready(await start("stuck", "blocked", "raising", "deaf"))
    # One after the other, so that the readers that read once have read before the rest comes.
    assert await chat(application) == 200
    process = application.frontend_process
    assert process is not None
    await until(lambda: bool(process.parts.extensions.failures))

    answers = await asyncio.gather(*(chat(application, stream=number % 2 == 0) for number in range(20)))

    assert answers == [200] * 20
    health = (await get(f"{application.url}/health"))[1]
    assert health["extensions"] == {"raising": "OSError: the disk is full"}
    page = await text(f"{application.url}/metrics")
    for name in ("stuck", "blocked", "raising", "deaf"):
        (line,) = [one for one in page.splitlines() if f'events_dropped_total{{extension="{name}"}}' in one]
        assert float(line.split()[-1]) >= 20
    assert extension(application, Stuck).subscription.dropped >= 20


@pytest.mark.parametrize("name", ["lame", "unmakeable", "endless"])
async def test_an_extension_that_fails_to_start_is_named_and_the_rest_runs(
    start: Start, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(runtime_extensions, "START_TIME", 0.05)
    monkeypatch.setattr(runtime_extensions, "CLOSE_TIME", 0.05)
    application = await ready(await start(name, "recorder"))

    assert await chat(application) == 200
    health = (await get(f"{application.url}/health"))[1]
    assert health["status"] == "healthy"
    assert list(health["extensions"]) == [name]
    assert await events_until_the_end(extension(application, Recorder))


async def test_an_extension_that_fails_to_start_is_closed_with_503_routes(start: Start) -> None:
    application = await ready(await start("lame"))
    assert application.frontend_process is not None

    status, body = await get(f"{application.url}/lame")

    assert (status, body["error"]["message"]) == (503, "extension 'lame' does not run")
    assert extension(application, Lame).closed == 1
    assert not application.frontend_process.parts.request_events.active


# Where they run.


def worker() -> Role:
    return Role(False, ("mock",), 0)


async def test_an_extension_of_both_roles_runs_beside_a_worker_too(start: Start, tmp_path: Path) -> None:
    BesideWorkers.roles.clear()
    application = await start("beside, role: both", more=MANY % (tmp_path / "records"), role=worker())
    services = extension(application, BesideWorkers).services
    system = application.worker_process._system
    assert system is not None

    assert BesideWorkers.roles == ["worker"]
    assert (await get(f"{system.url}/health"))[1]["extensions"] == {"beside": "nothing to see here"}
    with pytest.raises(NotSupported, match="extension 'beside' runs beside a worker"):
        services.requests.subscribe()

    await start("beside, role: both", more=MANY % (tmp_path / "records"), role=Role(True, (), 0))
    assert BesideWorkers.roles == ["worker", "frontend"]


async def test_a_process_with_both_roles_runs_one_extension_object(start: Start) -> None:
    BesideWorkers.roles.clear()
    await start("beside, role: both", "beside, role: worker, name: other")

    assert sorted(BesideWorkers.roles) == ["frontend", "worker"]


async def test_a_worker_needs_no_extension_of_the_frontend(start: Start, tmp_path: Path) -> None:
    application = await start("not-installed", more=MANY % (tmp_path / "records"), role=worker())

    assert application.worker_process.failures() == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("asker, role: worker", r"'asker' cannot run in the role 'worker': set extensions\.asker\.role to 'frontend'"),
        ("asker, role: router", r"extensions\.asker\.role"),
        ("no-such", r"there is no extension 'no-such'"),
        ("asker, depth: 3", r"extensions\.asker\.depth|'depth'"),
    ],
)
async def test_a_wrong_entry_is_a_config_error_with_its_place(start: Start, entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        await start(entry)
    assert "config-0.yaml:" in str(error.value)


ADMIN = "admin: {port: 0}\n"


@pytest.mark.parametrize(
    ("entries", "more", "message"),
    [
        (["dashboard"], ADMIN, r"extensions\.dashboard: extension 'dashboard' needs the extension 'feed', which does"),
        (["dashboard", "feed, enabled: false"], ADMIN, r"extensions\.dashboard: .* add \{use: feed\} to extensions"),
        (
            ["dashboard, name: page", "feed"],
            "",
            r"extensions\.page: .* set admin\.port, such as 9090, or leave 'page'",
        ),
    ],
)
async def test_an_extension_with_missing_requirements_is_refused(
    start: Start, entries: list[str], more: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"config-0\.yaml:\d+: {message}"):
        await start(*entries, more=more)


async def test_a_required_extension_may_have_another_name(start: Start) -> None:
    application = await start("dashboard", "feed, name: watch", more=ADMIN)

    assert application.frontend_process.parts.extensions.failures == {}


# Calls between frontends.


@pytest.fixture
async def pair(start: Start, tmp_path: Path) -> tuple[Application, Application]:
    """Return two frontends of one deployment that know each other."""
    more = MANY % (tmp_path / "records")
    first, second = [await start("asker", more=more, role=Role(True, (), number)) for number in range(2)]
    peers = [extension(application, Asker).services.peers for application in (first, second)]
    await until(lambda: all(len(one.frontends()) == 2 for one in peers))
    return first, second


def own_id(application: Application) -> int:
    return extension(application, Asker).services.peers.own.frontend_id


async def test_a_peer_call_of_an_extension_gets_replies_from_both_frontends(
    pair: tuple[Application, Application],
) -> None:
    ids = {own_id(application) for application in pair}
    payload = {"deep": [1, None, True, b"x", {"a": 1.5}], "large": "x" * 1_000_000}

    for application in pair:
        replies = await extension(application, Asker).ask(payload)

        assert replies.replies == {one: {"id": one, "payload": payload} for one in ids}
        assert replies.missing == {}
        assert {one.frontend_id for one in replies.frontends} == ids
        assert sorted(one.replica or 0 for one in replies.frontends) == [0, 1]


@pytest.mark.parametrize("asks", [0, 1], ids=["another", "itself"])
async def test_a_frontend_that_hangs_is_named_when_the_time_is_over(
    pair: tuple[Application, Application], asks: int
) -> None:
    first, second = pair
    extension(second, Asker).hanging = True

    replies = await extension(pair[asks], Asker).ask("x", timeout=0.3)

    assert list(replies.replies) == [own_id(first)]
    assert list(replies.missing) == [own_id(second)]
    assert "0.3 s" in replies.missing[own_id(second)]


async def test_a_dead_frontend_is_named_until_its_record_expires(
    pair: tuple[Application, Application],
) -> None:
    first, second = pair
    gone = own_id(second)
    # As when the process dies: nothing is unregistered.
    await second._plane.transport.aclose()

    replies = await extension(first, Asker).ask("x")

    assert list(replies.replies) == [own_id(first)]
    assert list(replies.missing) == [gone]


async def test_a_frontend_that_was_stopped_is_forgotten(pair: tuple[Application, Application]) -> None:
    first, second = pair
    await second.stop(grace=False)
    peers = extension(first, Asker).services.peers
    await until(lambda: len(peers.frontends()) == 1)

    replies = await extension(first, Asker).ask("x")

    assert (list(replies.replies), replies.missing) == ([own_id(first)], {})


async def test_records_that_are_no_frontends_are_left_out_and_other_deployments_are_not_called(
    pair: tuple[Application, Application], caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = pair
    discovery, peers = first._plane.discovery, extension(first, Asker).services.peers
    stranger = FrontendRecord(frontend_id=5, namespace="elsewhere")
    third = FrontendRecord(frontend_id=6)
    records = {"dynamo/1": b"\xff", "dynamo/2": to_json(third), stranger.path: to_json(stranger)}
    async with await discovery.lease() as lease:
        for path, value in {**records, third.path: to_json(third)}.items():
            await lease.put(FRONTENDS + path, value)
        await until(lambda: len(peers.frontends()) == 3)

        replies = await peers.call_all("echo", timeout=10)

    assert len(replies.replies) == 2
    assert list(replies.missing) == [6]
    assert "CannotConnect" in replies.missing[6]
    warned = [record.getMessage() for record in caplog.records if "cannot be read and is left out" in record.message]
    assert any("v1/frontends/dynamo/1" in one for one in warned)
    assert any("the record of another frontend than its key says" in one for one in warned)
    assert not any("elsewhere" in one for one in warned)


async def test_a_handler_that_fails_is_named_with_its_error(pair: tuple[Application, Application]) -> None:
    replies = await extension(pair[0], Asker).ask("fail")

    assert replies.replies == {}
    assert {"Unknown: its handler failed: OSError: no echo"} == set(replies.missing.values())


async def test_a_single_process_frontend_answers_for_itself(start: Start) -> None:
    application = await ready(await start("asker", "site"))

    replies = await extension(application, Asker).ask((1, 2))

    assert replies.replies == {own_id(application): {"id": own_id(application), "payload": [1, 2]}}
    assert [one.frontend_id for one in replies.frontends] == [own_id(application)]
    # Another extension does not see the calls of this one.
    other = await extension(application, Site).services.peers.call_all("echo", timeout=5)
    assert "NotSupported" in other.missing[own_id(application)]
    asker = extension(application, Asker)
    with pytest.raises(ValueError, match="no plain value"):
        await asker.ask(object())
    with pytest.raises(ValueError, match="more than"):
        await asker.ask(b"x" * (16 * 1024 * 1024 + 1))
    with pytest.raises(ValueError, match="served already"):
        asker.services.peers.serve("echo", asker._echo)


async def test_without_extensions_a_frontend_registers_nothing(start: Start, tmp_path: Path) -> None:
    application = await start(more=MANY % (tmp_path / "records"), role=Role(True, (), 0))
    assert application.frontend_process is not None

    assert len(application.frontend_process.parts.peers._tasks) == 0
