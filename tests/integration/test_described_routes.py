"""The routes that a process serves, as its log and its description of itself tell them: all of them, and no others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dynamo_http import Listener
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.settings import load_settings

CONFIG = """
frontend: {port: 0}
workers:
  mock: {model: {name: m}, engine: {use: mocker}}
"""
ADMIN = "admin: {port: 0}\n"

Routes = set[tuple[str, str]]
Start = Callable[[str], Any]


@pytest.fixture
async def start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Start]:
    """Open the listeners of a config; they are returned."""
    applications = []
    caplog.set_level(logging.INFO)

    async def run(config: str) -> list[Listener]:
        (tmp_path / "config.yaml").write_text(config)
        application = Application(load_settings(tmp_path / "config.yaml", env={}))
        applications.append(application)
        await application.open()
        assert application.frontend_process is not None
        return application.frontend_process.parts.listeners.all

    yield run
    for application in applications:
        await application.stop(grace=False)


def routed(listener: Listener) -> Routes:
    """Return what the router of the library goes by. It answers HEAD wherever it answers GET."""
    routes = listener._runner.app.router.routes()
    return {(route.method, route.resource.canonical) for route in routes if route.resource and route.method != "HEAD"}


async def described(listener: Listener) -> Routes:
    async with aiohttp.ClientSession() as session, session.get(f"{listener.url}/openapi.json") as answer:
        paths = (await answer.json())["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


async def test_without_an_admin_listener_all_routes_are_described_at_the_public_one(start: Start) -> None:
    (public,) = await start(CONFIG)

    assert await described(public) == routed(public)
    assert {("GET", "/health"), ("GET", "/metrics"), ("POST", "/route/explain")} <= routed(public)


async def test_routes_for_operators_are_described_at_their_listener_only(start: Start) -> None:
    public, admin = await start(CONFIG + ADMIN)

    assert await described(public) == routed(public)
    assert await described(admin) == routed(admin)
    assert {("GET", "/metrics"), ("POST", "/busy_threshold"), ("DELETE", "/busy_threshold/{model}")} <= routed(admin)
    assert {("GET", "/admin/workers"), ("POST", "/admin/workers/{id}/drain")} <= routed(admin)
    assert {("GET", "/metrics"), ("GET", "/admin/workers")}.isdisjoint(routed(public))


async def test_the_start_up_log_names_every_route_of_every_listener(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    for listener in await start(CONFIG + ADMIN):
        (line,) = [
            message for message in caplog.messages if message.startswith(f"the {listener.name} listener serves ")
        ]
        told = {
            (method, path)
            for group in line.partition(" serves ")[2].split("; ")
            for method, _, paths in [group.partition(" ")]
            for path in paths.split(", ")
        }
        assert told == routed(listener)
