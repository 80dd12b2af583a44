"""One process reads its settings again: all that is live changes at once, or nothing, and what the API set stands."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dynamo_http.auth import hash_of
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_router_affinity.router import AffinityRouter
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.settings import load_settings
from dynamo_testing.servers.certificates import make_certificates

KEYS = [f"dyn-key-{number}-{'x' * 20}" for number in range(3)]
TOKEN = "operators-token-of-the-test"
CONFIG = """
frontend: {{port: 0 {frontend}}}
admin: {{port: 0, token: "${{file:{folder}/token}}"}}
auth: {{keys: [{keys}]}}
log: {{level: {level}}}
router: {{use: {router}}}
admission: {admission}
workers:
  mock: {{model: {{name: m}}, engine: {{use: mocker, speedup_ratio: 0}}, replicas: {replicas}}}
"""
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
PARTS = {
    "frontend": "",
    "keys": (0, 1),
    "level": "info",
    "router": "kv",
    "admission": "{use: none}",
    "replicas": 1,
}


class Running:
    """A process in this one, its config file, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: dict[str, Any] = dict(PARTS)
        (folder / "token").write_text(TOKEN)

    async def start(self, **parts: Any) -> None:
        self.write(**parts)
        self.application = Application(load_settings(self.folder / "config.yaml", env={}))
        await self.application.start()
        await self.application.ready()
        assert self.application.frontend_process is not None
        self.public, self.admin = self.application.frontend_process.parts.listeners.all

    def write(self, **parts: Any) -> None:
        self.parts |= parts
        entries = ", ".join(f"{{id: k{number}, hash: '{hash_of(KEYS[number])}'}}" for number in self.parts["keys"])
        text = CONFIG.format(**(self.parts | {"keys": entries, "folder": self.folder}))
        (self.folder / "config.yaml").write_text(text)

    async def ask(self, key: int = 0) -> int:
        headers = {"authorization": f"Bearer {KEYS[key]}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.public.url}/v1/chat/completions", json=BODY, headers=headers) as answer,
        ):
            await answer.read()
            return answer.status

    async def admin_asks(self, method: str, path: str, token: str = TOKEN, body: Any = None) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.admin.url}{path}", headers=headers, json=body) as answer,
        ):
            return answer.status, json.loads(await answer.read())

    async def reload(self, query: str = "", **parts: Any) -> tuple[int, Any]:
        self.write(**parts)
        return await self.admin_asks("POST", f"/admin/reload{query}")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    made = Running(tmp_path)
    yield made
    await made.application.stop(grace=False)


async def test_a_key_that_was_taken_out_is_refused_at_once_and_a_new_one_taken(running: Running) -> None:
    await running.start()
    assert [await running.ask(key) for key in range(3)] == [200, 200, 401]

    status, report = await running.reload(keys=(0, 2))

    assert (status, report["status"]) == (200, "applied")
    assert [await running.ask(key) for key in range(3)] == [200, 401, 200]
    assert [(row["key"], row["live"], row["old"] is None) for row in report["changes"]] == [
        ("auth.keys.k2", True, True),
        ("auth.keys.k1", True, False),
    ]


async def test_a_dry_run_lists_origins_and_live_keys_without_effect(running: Running) -> None:
    await running.start()

    status, report = await running.reload("?dry_run=1", keys=(0,), level="debug")

    assert (status, report["status"]) == (200, "checked")
    assert [(row["key"], row["live"]) for row in report["changes"]] == [("auth.keys.k1", True), ("log.level", True)]
    assert report["changes"][1] | {"origin": ""} == {
        "key": "log.level", "old": "info", "new": "debug", "origin": "", "live": True
    }  # fmt: skip
    assert report["changes"][1]["origin"].endswith("config.yaml:5")
    assert await running.ask(1) == 200


async def test_changes_that_need_a_restart_are_listed_and_nothing_is_applied(running: Running) -> None:
    await running.start()

    status, report = await running.reload(replicas=2, router="round-robin", keys=(0,))

    assert (status, report["status"]) == (409, "refused")
    assert report["error"]["code"] == "reload_refused"
    assert report["message"] == "nothing was applied, since these need a restart: router.use, workers.mock.replicas"
    assert await running.ask(1) == 200


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"level": "loud"}, "config.yaml:5: log.level: expected 'debug', 'info', 'warning' or 'error', got 'loud'"),
        ({"router": "kv, temperature: -1"}, "config.yaml:6: router.temperature: must be at least 0, got -1"),
        ({"frontend": ", tls: {cert: no.pem}"}, "config.yaml:2: frontend.tls.cert: no.pem cannot be read"),
    ],
)
async def test_an_invalid_file_is_reported_with_its_line_and_nothing_is_applied(
    running: Running, parts: dict[str, Any], says: str
) -> None:
    await running.start()

    status, report = await running.reload(keys=(0,), **parts)

    assert (status, report["status"]) == (422, "invalid")
    assert says in report["message"]
    assert await running.ask(1) == 200


async def test_the_operators_token_is_read_again_from_its_file(running: Running) -> None:
    await running.start()
    (running.folder / "token").write_text("another-token-of-operators")

    _, report = await running.reload()

    assert [row["new"] for row in report["changes"]] == ["***"]
    assert (await running.admin_asks("POST", "/admin/reload"))[0] == 401
    status, report = await running.admin_asks("POST", "/admin/reload", "another-token-of-operators")
    assert (status, report["status"], report["changes"]) == (200, "unchanged", [])


async def test_the_last_key_and_the_token_cannot_be_taken_away_from_a_server_that_runs(running: Running) -> None:
    await running.start()

    status, report = await running.reload(keys=())

    assert (status, report["status"]) == (409, "refused")
    assert await running.ask(2) == 401


@pytest.mark.parametrize(
    ("section", "form"), [("router", "{}"), ("router.then", "affinity, then: {{use: {}}}")], ids=["alone", "wrapped"]
)
async def test_router_weights_change_in_the_routers_that_are_there_and_in_those_made_later(
    running: Running, section: str, form: str
) -> None:
    await running.start(router=form.format("kv"))
    frontend = running.application.frontend_process
    assert frontend is not None

    status, report = await running.reload(router=form.format("kv, temperature: 0.5, prefill_load_scale: 3"))

    assert status == 200
    assert [row["key"] for row in report["changes"]] == [f"{section}.temperature", f"{section}.prefill_load_scale"]
    (router,) = frontend.parts.models.routers()
    if isinstance(router, AffinityRouter):
        assert router._inner is not None
        router = router._inner
    assert isinstance(router, KvRouter)
    assert (router._weights.temperature, router._weights.prefill_load_scale) == (0.5, 3)
    assert frontend.parts.routers._picked[section].config == router.config
    assert await running.ask() == 200


async def test_the_log_level_changes(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    # Puts the level back after the test.
    caplog.set_level(logging.INFO)
    await running.start()

    await running.reload(level="error")
    assert logging.getLogger().level == logging.ERROR
    await running.reload(level="info")
    assert logging.getLogger().level == logging.INFO


async def test_thresholds_set_by_the_api_survive_a_reload(running: Running) -> None:
    await running.start(admission="{use: token-capacity}")
    change = {"model": "m", "active_prefill_tokens_threshold": 10}
    assert (await running.admin_asks("POST", "/busy_threshold", body=change))[0] == 200

    _, report = await running.reload(
        admission="{use: token-capacity, active_prefill_tokens_threshold: 99, active_decode_blocks_threshold: 0.5}"
    )

    assert report["standing"] == [
        {"key": "admission.models.m.active_prefill_tokens_threshold", "value": 10, "origin": "api"}
    ]
    frontend = running.application.frontend_process
    assert frontend is not None
    thresholds = frontend.parts.thresholds.of("m")
    assert (thresholds.active_prefill_tokens_threshold, thresholds.active_decode_blocks_threshold) == (10, 0.5)
    assert frontend.parts.thresholds.of("other").active_prefill_tokens_threshold == 99


async def test_a_part_that_fails_takes_all_of_it_back(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    await running.start()

    async def fail(self: KvRouter, config: Any) -> None:
        if config.temperature:
            raise ValueError("not today")

    monkeypatch.setattr(KvRouter, "reconfigure", fail)

    status, report = await running.reload(keys=(0,), router="kv, temperature: 1")

    assert (status, report["status"]) == (500, "failed")
    assert report["processes"][0]["reason"] == "router cannot take its new settings: not today"
    assert await running.ask(1) == 200
    monkeypatch.undo()
    assert (await running.reload())[0] == 200
    assert await running.ask(1) == 401


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Return a router that takes its time: it has begun to take its settings, and it may go on."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(self: KvRouter, config: Any) -> None:
        begun.set()
        await go_on.wait()

    monkeypatch.setattr(KvRouter, "reconfigure", wait)
    return begun, go_on


async def test_two_reloads_at_once_do_not_mix(running: Running, slow: tuple[asyncio.Event, asyncio.Event]) -> None:
    await running.start()
    begun, go_on = slow
    first = asyncio.create_task(running.reload(router="kv, temperature: 1"))
    await begun.wait()

    status, report = await running.reload()
    go_on.set()

    assert (status, report["status"]) == (409, "busy")
    assert (await first)[1]["status"] == "applied"


async def test_a_client_that_leaves_does_not_cut_a_reload(
    running: Running, slow: tuple[asyncio.Event, asyncio.Event]
) -> None:
    await running.start()
    begun, go_on = slow
    asked = asyncio.create_task(running.reload(router="kv, temperature: 1", keys=(0,)))
    await begun.wait()
    asked.cancel()
    await asyncio.wait([asked])
    go_on.set()

    async with asyncio.timeout(60):
        while (await running.admin_asks("POST", "/admin/reload"))[1]["status"] != "unchanged":
            pass
    assert await running.ask(1) == 401


def certificate(folder: Path) -> ssl.SSLContext:
    """Make a new certificate where the config names it; what trusts no other."""
    make_certificates(folder, tls="IP:127.0.0.1")
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


async def test_a_new_certificate_is_for_new_connections_and_open_ones_go_on(running: Running) -> None:
    trust = await asyncio.to_thread(certificate, running.folder)
    tls = f", tls: {{cert: {running.folder}/tls.crt, key: {running.folder}/tls.key}}"
    await running.start(frontend=tls)
    headers = {"authorization": f"Bearer {KEYS[0]}"}

    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask(context: ssl.SSLContext) -> int:
            async with session.get(f"{running.public.url}/v1/models", ssl=context) as answer:
                await answer.read()
                return answer.status

        assert await ask(trust) == 200
        fresh = await asyncio.to_thread(certificate, running.folder)
        status, report = await running.reload()

        assert (status, [row["key"] for row in report["changes"]]) == (200, ["frontend.tls.cert", "frontend.tls.key"])
        # The same connection as before, since the old certificate would be refused on a new one.
        assert await ask(trust) == 200
        assert await ask(fresh) == 200
    async with aiohttp.ClientSession(headers=headers) as session:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(trust)


@pytest.mark.parametrize("word", ["yes", "2"])
async def test_a_dry_run_is_not_guessed_from_a_word_that_may_mean_either(running: Running, word: str) -> None:
    await running.start()

    status, answer = await running.reload(f"?dry_run={word}", keys=(0,))

    assert (status, answer["error"]["param"]) == (400, "dry_run")
    assert await running.ask(1) == 200


async def test_every_entry_of_a_list_of_admissions_takes_its_own(running: Running) -> None:
    both = "[{{use: fair-queue, max_queue: {0}}}, {{use: token-capacity, active_prefill_tokens_threshold: {1}}}]"
    await running.start(admission=both.format(5, 10))

    status, report = await running.reload(admission=both.format(7, 20))

    assert (status, [row["key"] for row in report["changes"]]) == (
        200, ["admission.fair-queue.max_queue", "admission.token-capacity.active_prefill_tokens_threshold"]
    )  # fmt: skip
    frontend = running.application.frontend_process
    assert frontend is not None
    assert frontend.parts.admission.plugins["admission.fair-queue"].config.max_queue == 7  # type: ignore[attr-defined]
    assert frontend.parts.thresholds.of("m").active_prefill_tokens_threshold == 20
    assert await running.ask() == 200


async def test_an_engine_gets_its_declared_live_settings(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    async def reconfigure(self: MockerEngine, config: Any) -> None:
        taken.append(config.speedup_ratio)

    monkeypatch.setattr(MockerEngine, "reconfigure", reconfigure)
    monkeypatch.setattr(MockerConfig, "LIVE", frozenset({"speedup_ratio"}))
    await running.start(replicas=2)
    config = running.folder / "config.yaml"
    config.write_text(config.read_text().replace("speedup_ratio: 0", "speedup_ratio: 3"))

    status, report = await running.admin_asks("POST", "/admin/reload")

    assert (status, report["status"]) == (200, "applied")
    assert taken == [3, 3]
