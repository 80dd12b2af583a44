"""A service that starts with what another one has: all of it, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from dynamo_core import ServerTls
from dynamo_core.errors import ConfigError
from dynamo_http.auth import hash_of
from dynamo_plugin_router_slot_tracker.registry import Registry
from dynamo_plugin_router_slot_tracker.replication.replicas import SyncSettings
from dynamo_plugin_router_slot_tracker.schemas import Addition, Registration
from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings, listener_tls
from dynamo_plugin_router_slot_tracker.snapshot import BATCH

TOKEN = "a-token-that-is-long-enough"

WHOLE = (
    b'{"workers":[{"worker_id":7,"model_name":"m","block_size":16,"dp_start":0,"dp_size":1},'
    b'{"worker_id":7,"model_name":"m","block_size":16,"dp_start":0,"dp_size":1},'
    b'{"worker_id":8,"model_name":"m","block_size":32,"dp_start":0,"dp_size":1},'
    b'{"worker_id":9,"model_name":"n","block_size":16,"dp_start":0,"dp_size":0}]}\n'
    b'{"requests":[{"model_name":"m","tenant_id":"default","request_id":"r","worker_id":7,"dp_rank":0,'
    b'"sequence_hashes":[1,-2],"new_isl_tokens":5,"age":1.5},'
    b'{"model_name":"m","tenant_id":"default","request_id":"s","worker_id":8,"dp_rank":0,'
    b'"sequence_hashes":[],"new_isl_tokens":0,"age":0}]}\n'
    b'{"complete":true,"more":1}\n'
)


class Services:
    """Starts services that live as long as the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, **settings: Any) -> Service:
        service = Service(ServiceSettings(host="127.0.0.1", port=0, **settings))
        self._stack.push_async_callback(service.aclose)
        await service.start()
        return service

    async def peer(self, *pieces: bytes, status: int = 200) -> str:
        """Return the address of a server that answers with these pieces, one after the other."""

        async def handle(http: web.BaseRequest) -> web.StreamResponse:
            response = web.StreamResponse(status=status)
            await response.prepare(http)
            for piece in pieces:
                await response.write(piece)
                await asyncio.sleep(0)
            return response

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:
        yield Services(stack)


def fill(registry: Registry, workers: int, requests: int) -> None:
    for worker_id in range(workers):
        registry.register(Registration(worker_id=worker_id, model_name="m", block_size=16, dp_start=0, dp_size=2))
    for number in range(requests):
        registry.add(
            Addition(
                model_name="m",
                request_id=f"r{number}",
                worker_id=number % workers,
                dp_rank=number % 2,
                sequence_hashes=[1, -number, 2**63 - 1],
                new_isl_tokens=number,
            )
        )


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_more_than_one_line_is_taken(services: Services, token: str | None) -> None:
    first = await services.start(snapshot=True, token=token)
    fill(first.registry, 2 * BATCH + 1, 3 * BATCH + 1)

    second = await services.start(snapshot_from=(first.listener.url + "/",), token=token)

    assert second.registry.workers() == first.registry.workers()
    assert second.registry.loads() == first.registry.loads()
    assert len(second.registry.scope("m", "default").requests) == 3 * BATCH + 1


async def test_an_empty_service_has_an_empty_snapshot(services: Services) -> None:
    first = await services.start(snapshot=True)

    second = await services.start(snapshot_from=(first.listener.url,))

    assert second.registry.workers() == []


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_snapshot_is_read_in_any_pieces_and_invalid_entries_are_skipped(services: Services, size: int) -> None:
    url = await services.peer(*(WHOLE[at : at + size] for at in range(0, len(WHOLE), size)))

    service = await services.start(snapshot_from=(url,))

    assert [worker.worker_id for worker in service.registry.workers()] == [7]
    [load] = service.registry.loads()
    assert (load.active_prefill_tokens, load.active_decode_blocks) == (5, 2)


@pytest.mark.parametrize(
    ("pieces", "status"),
    [
        ([], 200),
        ([b'{"workers":[]}\n'], 200),
        ([WHOLE[:-2]], 200),
        ([WHOLE, b'{"workers":[]}\n'], 200),
        ([WHOLE], 404),
        ([b"nonsense\n", WHOLE], 200),
        ([b'{"requests":[{"request_id":1}]}\n', WHOLE], 200),
    ],
)
async def test_an_incomplete_snapshot_is_discarded(
    services: Services, pieces: list[bytes], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    url = await services.peer(*pieces, status=status)

    service = await services.start(snapshot_from=(url,))

    assert service.registry.workers() == []
    assert f"no snapshot from {url}" in caplog.text
    assert "no peer gave a snapshot: starting empty" in caplog.text


async def test_the_next_peer_is_asked_if_one_is_away(services: Services, caplog: pytest.LogCaptureFixture) -> None:
    first = await services.start(snapshot=True)
    fill(first.registry, 1, 1)

    second = await services.start(snapshot_from=("http://127.0.0.1:1", first.listener.url))

    assert second.registry.loads() == first.registry.loads()
    assert "no snapshot from http://127.0.0.1:1" in caplog.text


async def test_events_after_the_snapshot_are_applied(services: Services) -> None:
    anywhere = "tcp://127.0.0.1:*"
    first = await services.start(snapshot=True, sync=SyncSettings(anywhere))
    assert first.replicas is not None
    fill(first.registry, 1, 1)
    second = await services.start(
        snapshot_from=(first.listener.url,), sync=SyncSettings(anywhere, peers=(first.replicas.endpoint,))
    )
    assert second.replicas is not None
    number = 1
    async with asyncio.timeout(10):
        while not second.replicas.replication.counts.applied:
            number += 1
            one = Addition(model_name="m", request_id=f"r{number}", worker_id=0, dp_rank=0, sequence_hashes=[number])
            first.replicas.replication.added(one, first.registry.add(one))
            await asyncio.sleep(0.01)

    assert {"r0", f"r{number}"} <= set(second.registry.scope("m", "default").requests)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"snapshot_from": ("http://x",), "token": hash_of(TOKEN)}, "--token is a hash"),
        ({"tls": ServerTls(cert="/nowhere.pem")}, "--tls-cert: /nowhere.pem cannot be read"),
        ({"snapshot_from": ("http://x",), "snapshot_ca": "/nowhere.pem"}, "--snapshot-ca: /nowhere.pem cannot be used"),
    ],
)
async def test_impossible_snapshot_settings_are_config_errors(services: Services, settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await services.start(**settings)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((None, None, "x"), "--tls-client-ca is given without --tls-cert"),
        ((None, "x", None), "--tls-key is given without --tls-cert"),
    ],
)
def test_options_of_a_certificate_without_one_are_refused(files: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        listener_tls(*files)


async def test_the_service_can_be_closed_twice_and_without_a_start() -> None:
    service = Service(ServiceSettings(host="127.0.0.1", port=0, sync=SyncSettings("tcp://127.0.0.1:*")))

    await service.aclose()
    await service.aclose()
