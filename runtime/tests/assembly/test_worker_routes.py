"""``/admin/workers``: which worker is meant, what is told of it, and why it cannot be changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from dynamo_core.errors import CannotConnect, DynamoError, Unavailable
from dynamo_core.protocol.records import CORDONED, DRAINING, Instance, ModelCard, WorkerStateReport, WorkerStateRequest
from dynamo_http.listener import Listener
from dynamo_runtime.assembly.worker_routes import WorkerRoutes


class Fleet:
    """The view of a frontend, and the workers that it asks: they take every state, and tell it at once."""

    def __init__(self) -> None:
        self.synced = True
        self.instances: dict[int, Instance] = {}
        self.requests: dict[int, int] = {}
        self.failures: dict[int, DynamoError] = {}
        self.asked: list[tuple[int, str | None]] = []
        #: Whether the view follows what workers have put.
        self.follows = True
        self._changed = asyncio.Event()

    def add(self, number: int, worker: str, replica: int = 0, **more: Any) -> None:
        self.instances[number] = Instance(instance_id=number, worker=worker, replica=replica, **more)

    def workers(self) -> list[tuple[ModelCard, Instance]]:
        return [(ModelCard(name="m", instance_id=number), one) for number, one in self.instances.items()]

    async def changed(self) -> None:
        await self._changed.wait()

    async def __call__(self, instance: Instance, endpoint: Any, request: Any, *, timeout: float) -> list[object]:
        assert isinstance(request, WorkerStateRequest)
        number = instance.instance_id
        self.asked.append((number, request.state))
        if number in self.failures:
            raise self.failures[number]
        if request.state is not None and self.follows:
            self.instances[number] = msgspec.structs.replace(instance, state=request.state)
        state = instance.state if request.state is None else request.state
        return [WorkerStateReport(state, self.requests.get(number, 0), False)]


class Asked:
    """The routes over a fleet, behind a listener."""

    def __init__(self, fleet: Fleet, client: aiohttp.ClientSession, url: str) -> None:
        self.fleet = fleet
        self._client = client
        self._url = url

    async def ask(self, method: str, path: str = "") -> tuple[int, Any]:
        async with self._client.request(method, f"{self._url}/admin/workers{path}") as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def routes() -> AsyncIterator[Asked]:
    fleet = Fleet()
    own = WorkerRoutes(cast(Any, fleet), fleet).routes()
    listener = Listener(
        "admin", host="127.0.0.1", port=0, routes=own, body_limit=1024, max_connections=10, idle_timeout=30
    )
    await listener.start()
    async with aiohttp.ClientSession() as client:
        yield Asked(fleet, client, listener.url)
    await listener.aclose()


async def test_all_workers_are_listed_by_name_with_their_facts(routes: Asked) -> None:
    fleet = routes.fleet
    fleet.add(3, "b", state=DRAINING, host="far", pid=9, system_url="http://far:1", version="0.1.0", started=1.5)
    fleet.add(2, "a", 1)
    fleet.add(1, "a")
    fleet.requests = {3: 4}
    fleet.failures[2] = CannotConnect("gone")

    status, body = await routes.ask("GET")

    assert status == 200
    told = [(one["id"], one["worker"], one["replica"], one["state"], one["requests"]) for one in body["workers"]]
    assert told == [
        (f"{1:016x}", "a", 0, "serving", 0),
        (f"{2:016x}", "a", 1, "serving", None),
        (f"{3:016x}", "b", 0, "draining", 4),
    ]
    assert body["workers"][2] == {
        **{"id": f"{3:016x}", "worker": "b", "replica": 0, "model": "m", "role": "aggregated", "state": "draining"},
        **{"requests": 4, "drained": False, "host": "far", "pid": 9, "system_url": "http://far:1"},
        **{"version": "0.1.0", "started": 1.5},
    }
    assert (body["workers"][0]["version"], body["workers"][0]["started"]) == (None, None)


@pytest.mark.parametrize("name", ["00000000000000ab", "00000000000000AB", "gpu-3", "GPU-3"])
@pytest.mark.parametrize(("action", "state"), [("cordon", "cordoned"), ("drain", "draining"), ("uncordon", "serving")])
async def test_a_worker_is_meant_by_its_id_or_its_name_and_replica(
    routes: Asked, name: str, action: str, state: str
) -> None:
    routes.fleet.add(0xAB, "gpu", 3)
    routes.fleet.add(0xCD, "gpu", 4)

    status, entry = await routes.ask("POST", f"/{name}/{action}")

    assert (status, entry["id"], entry["state"]) == (200, "00000000000000ab", state)
    assert (await routes.ask("GET", f"/{name}"))[1]["state"] == state
    assert {number for number, _ in routes.fleet.asked} == {0xAB}


async def test_a_name_without_a_replica_is_answered_with_the_replicas(routes: Asked) -> None:
    for number in range(10, 20):
        routes.fleet.add(number, "gpu", number - 10)
    routes.fleet.add(5, "cpu")

    status, body = await routes.ask("POST", "/GPU/cordon")

    assert status == 404
    assert body["message"].endswith("give one of gpu-0, gpu-1, gpu-2, gpu-3, gpu-4, gpu-5, gpu-6, gpu-7")


@pytest.mark.parametrize("name", ["gpus", "gpu-5", "ab", "00000000000000ff", "%1b%5b2J"])
async def test_an_unknown_worker_is_a_404_with_a_remedy(routes: Asked, name: str) -> None:
    routes.fleet.add(0xAB, "gpu", 3)

    for method, path in (("GET", f"/{name}"), ("POST", f"/{name}/drain")):
        status, body = await routes.ask(method, path)

        assert status == 404
        assert body["message"].isprintable()
        assert body["message"].endswith("is registered: give an id or NAME-REPLICA, as `dynamo workers` lists them")
    assert routes.fleet.asked == []


async def test_an_ambiguous_worker_name_is_a_409_with_the_ids(routes: Asked) -> None:
    routes.fleet.add(1, "gpu")
    routes.fleet.add(2, "gpu")

    status, body = await routes.ask("POST", "/gpu-0/cordon")

    assert status == 409
    assert body["message"] == ("2 workers are called 'gpu-0': give the id of one of 0000000000000001, 0000000000000002")
    assert routes.fleet.asked == []


async def test_an_unreachable_worker_is_an_error_with_the_reason(routes: Asked) -> None:
    routes.fleet.add(1, "gpu")
    routes.fleet.failures[1] = CannotConnect("instance 0000000000000001 does not serve 'worker_state' here")

    status, body = await routes.ask("POST", "/gpu-0/cordon")

    assert status == 503
    assert body["message"] == (
        "worker 0000000000000001 cannot be asked: instance 0000000000000001 does not serve 'worker_state' here"
    )


async def test_a_workers_store_error_is_passed_on(routes: Asked) -> None:
    routes.fleet.add(1, "gpu")
    routes.fleet.failures[1] = Unavailable("discovery does not take the record of worker gpu now")

    status, body = await routes.ask("POST", "/gpu-0/cordon")

    assert (status, body["message"]) == (503, "discovery does not take the record of worker gpu now")


async def test_worker_routes_are_503_before_the_first_snapshot(routes: Asked) -> None:
    routes.fleet.synced = False

    for method, path in (("GET", ""), ("GET", "/gpu-0"), ("POST", "/gpu-0/cordon")):
        status, body = await routes.ask(method, path)

        assert (status, body["message"]) == (503, "the first snapshot of discovery is not in yet")


async def test_a_state_change_is_answered_before_the_store_reports_it(
    routes: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_runtime.assembly.worker_routes.FOLLOW", 0.01)
    routes.fleet.add(1, "gpu")
    routes.fleet.follows = False

    status, entry = await routes.ask("POST", "/gpu-0/cordon")

    assert (status, entry["state"]) == (200, CORDONED)
