"""When a frontend process that shares its port begins to accept: when it is ready, or after a while to say why not."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from dynamo_runtime.assembly import frontend_process
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.settings import LoadedSettings, load_settings

CONFIG = """
frontend: {port: 0, processes: 2}
client: {drain_grace: 0}
transport: {use: tcp}
discovery: {use: file, path: "%s"}
workers:
  mock: {model: {name: m}, engine: {use: mocker}, grace_period: 0}
"""

FRONTEND = Role(True, (), 1, processes=2)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedSettings:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG % (tmp_path / "discovery"))
    return load_settings(path, env={})


async def run(stack: AsyncExitStack, loaded: LoadedSettings, role: Role) -> Application:
    application = Application(loaded, role)
    await application.start()
    stack.push_async_callback(application.stop, grace=False)
    return application


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_a_frontend_joins_the_shared_port_once_ready(stack: AsyncExitStack, loaded: LoadedSettings) -> None:
    frontend = await run(stack, loaded, FRONTEND)
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(f"{frontend.url}/ready")

    await run(stack, loaded, Role(False, ("mock",), 0))
    async with asyncio.timeout(60):
        await frontend.ready()

    assert (await get(f"{frontend.url}/ready"))[0] == 200


async def test_an_unready_frontend_joins_after_a_while_to_report_it(
    stack: AsyncExitStack, loaded: LoadedSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_process, "JOIN_WAIT", 0.05)
    frontend = await run(stack, loaded, FRONTEND)

    async with asyncio.timeout(60):
        while True:
            try:
                status, answer = await get(f"{frontend.url}/ready")
            except aiohttp.ClientConnectorError:
                answer = "first snapshot"
            if "first snapshot" not in answer:
                break
            await asyncio.sleep(0.01)

    assert status == 503
    assert "model m has 0 of 1 workers" in answer


async def test_a_frontend_stopped_before_ready_never_accepts_on_the_shared_port(
    stack: AsyncExitStack, loaded: LoadedSettings
) -> None:
    frontend = await run(stack, loaded, FRONTEND)
    url = frontend.url

    await frontend.stop()

    with pytest.raises(aiohttp.ClientConnectorError):
        await get(f"{url}/ready")


async def test_health_names_the_answering_process_and_its_own_address(
    stack: AsyncExitStack, loaded: LoadedSettings
) -> None:
    await run(stack, loaded, Role(False, ("mock",), 0))
    frontend = await run(stack, loaded, FRONTEND)
    async with asyncio.timeout(60):
        await frontend.ready()

    async with aiohttp.ClientSession() as session, session.get(f"{frontend.url}/health") as response:
        process = (await response.json())["process"]

    assert process["replica"] == 1
    assert (await get(f"{process['system_url']}/metrics"))[0] == 200
    assert (await get(f"{process['system_url']}/ready"))[0] == 200
