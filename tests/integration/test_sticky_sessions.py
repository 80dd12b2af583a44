"""The router `affinity`, alone and around others: what every router promises, and sessions through an application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import aiohttp
import pytest
from click.testing import CliRunner
from dynamo_core import PluginRef, PoolView, Principal, Route, RoutingRequest, ScoredRank
from dynamo_plugin_router_affinity.router import AffinityConfig, AffinityRouter
from dynamo_plugin_router_kv.config import KvConfig
from dynamo_plugin_router_kv.router import KvRouter
from dynamo_runtime.cli.main import cli
from dynamo_testing.router_kit import RouterFactory, RouterKit

CONFIG = """
frontend: {port: 0}
http: {session_header: x-session}
router: {use: affinity, then: {use: %s}}
workers:
  w:
    model: {name: m}
    engine: {use: mocker, speedup_ratio: 0, block_size: 16}
    replicas: 4
    grace_period: 0
"""

Serve = Callable[[str], Awaitable[str]]


class EachInItsSession(AffinityRouter):
    """Takes every request for one of a session of its own."""

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        return await super().route(_in_session(request), pool)

    def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
        return super().explain(_in_session(request), pool)


def _in_session(request: RoutingRequest) -> RoutingRequest:
    return replace(request, principal=Principal(session=request.request_id))


def around(cls: type[AffinityRouter], make_inner: RouterFactory) -> RouterFactory:
    config = AffinityConfig(then=PluginRef(use="inner"))
    return lambda services: cls(config, replace(services, inner=lambda ref: make_inner(services)))


@pytest.fixture(params=[AffinityRouter, EachInItsSession], ids=["without sessions", "with sessions"])
def cls(request: pytest.FixtureRequest) -> type[AffinityRouter]:
    kind: type[AffinityRouter] = request.param
    return kind


class TestAlone(RouterKit):
    @pytest.fixture
    def make_router(self, cls: type[AffinityRouter]) -> RouterFactory:
        return lambda services: cls(AffinityConfig(), services)


class TestAroundKv(RouterKit):
    CAN_PIN = True

    @pytest.fixture
    def make_router(self, cls: type[AffinityRouter]) -> RouterFactory:
        return around(cls, lambda services: KvRouter(KvConfig(seed=1), services))


@pytest.fixture
def serve(serve_config: Serve) -> Serve:
    """Serve four workers with this inner router; give the address."""

    async def start(inner: str) -> str:
        url = await serve_config(CONFIG % inner)
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            # A frontend is ready with the first of them.
            while True:
                async with http.get(f"{url}/admin/workers") as reply:
                    if len((await reply.json())["workers"]) == 4:
                        return url
                await asyncio.sleep(0.01)

    return start


async def explained(url: str, *words: str) -> list[str]:
    """Return the workers that `dynamo route explain` marks, and the router that it names."""
    result = await asyncio.to_thread(
        CliRunner().invoke, cli, ["route", "explain", "Hi", "--url", url, "--json", *words]
    )
    assert result.exit_code == 0, result.output
    (route,) = json.loads(result.output)["routes"]
    assert route["router"] == "affinity"
    return [rank["instance_id"] for rank in route["ranks"] if rank["best"]]


async def ask(url: str, session: str, count: int) -> None:
    """Send requests of a session, one after the other, each with a prompt of its own."""
    headers = {"x-session": session} if session else {}
    async with aiohttp.ClientSession() as http:
        for number in range(count):
            body = {"model": "m", "prompt": f"{number} of {session}", "max_tokens": 1}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()


def workers_of(log: pytest.LogCaptureFixture) -> set[str]:
    """Return the workers of the requests since the last call, as the access log has them."""
    lines = [vars(line)["fields"] for line in log.records if line.name == "dynamo.access"]
    log.clear()
    return {line["instance_id"] for line in lines if line.get("instance_id")}


@pytest.mark.parametrize("inner", ["round-robin", "kv"])
async def test_the_requests_of_a_session_go_to_one_worker_through_http(
    serve: Serve, inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dynamo.access")
    url = await serve(inner)
    workers = {}
    # So many that they do not all have one worker by chance.
    for session in map(str, range(1, 13)):
        await ask(url, session, 2)
        workers[session] = workers_of(caplog)
    await ask(url, "", 12)

    assert {len(found) for found in workers.values()} == {1}, workers
    assert len(set().union(*workers.values())) > 1
    assert len(workers_of(caplog)) > 1, "without a session the inner router chooses"


@pytest.mark.parametrize("inner", ["round-robin", "kv"])
async def test_route_explain_marks_the_worker_of_a_session(serve: Serve, inner: str) -> None:
    url = await serve(inner)

    marked = {session: await explained(url, "--session", session) for session in map(str, range(12))}

    assert {len(workers) for workers in marked.values()} == {1}, "one worker is marked"
    assert len({workers[0] for workers in marked.values()}) > 1, "sessions differ"
    assert len(await explained(url)) == (4 if inner == "kv" else 0), "without a session the inner router speaks"
