from __future__ import annotations

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from dynamo_core.protocol.records import Instance
from dynamo_http.auth import ApiKeys, hash_of
from dynamo_http.health import health_routes, metrics_route, system_routes
from dynamo_http.listener import Listener
from dynamo_http.settings import AuthSettings
from dynamo_telemetry.metrics import Metrics

from libs.http.tests.serving import make


class Source:
    """A process as a test wants it to be."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.seen: list[Instance] = []
        self.ready = (False, "model m has 0 of 1 workers")
        self.broken: dict[str, str] = {}

    def instances(self) -> list[Instance]:
        return self.seen

    def failures(self) -> dict[str, str]:
        return self.broken

    def readiness(self) -> tuple[bool, str]:
        return self.ready


class Front:
    def __init__(self, listener: Listener, source: Source, metrics: Metrics, client: aiohttp.ClientSession) -> None:
        self.source = source
        self.metrics = metrics
        self._url = listener.url
        self._client = client

    async def get(self, path: str) -> tuple[int, dict[str, object]]:
        async with self._client.get(self._url + path) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> tuple[str, str]:
        async with self._client.get(self._url + path) as response:
            return response.headers["Content-Type"], await response.text()


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    source, metrics = Source(), Metrics()
    listener = make(*health_routes(source, host="here"), metrics_route(metrics.render))
    await listener.start()
    async with aiohttp.ClientSession() as client:
        yield Front(listener, source, metrics, client)
    await listener.aclose()


async def test_health_is_good_without_any_worker(front: Front) -> None:
    assert await front.get("/health") == (200, {"status": "healthy", "endpoints": [], "instances": []})


async def test_health_lists_endpoints_once_and_process_ids_of_this_host_only(front: Front) -> None:
    front.source.seen = [
        Instance(instance_id=1, worker="a", pid=11, host="here"),
        Instance(instance_id=2, worker="b", pid=22, host="there", state="cordoned"),
        Instance(instance_id=3, component="prefill", pid=33, host="here", state="draining"),
    ]

    status, body = await front.get("/health")

    backend, prefill = "dyn://dynamo.backend.generate", "dyn://dynamo.prefill.generate"
    assert status == 200
    assert body["endpoints"] == [backend, prefill]
    assert body["instances"] == [
        {"instance_id": f"{number:016x}", "worker": worker, "pid": pid, "host": host, "endpoint": at, "state": state}
        for number, worker, pid, host, at, state in (
            (1, "a", 11, "here", backend, "serving"),
            (2, "b", None, "there", backend, "cordoned"),
            (3, "", 33, "here", prefill, "draining"),
        )
    ]


async def test_only_trusted_requests_see_hosts_and_instances() -> None:
    source = Source()
    source.seen = [Instance(instance_id=123456, worker="a", pid=11, host="somewhere")]
    source.broken = {"ledger": "did not start: no disk"}
    keys = ApiKeys.load(AuthSettings.model_validate({"keys": [{"id": "a", "hash": hash_of("a key that is long")}]}), {})
    assert keys is not None
    routes = health_routes(source, host="here", process=lambda: {"pid": 7}, trusted=keys.knows)
    listener = make(*routes)
    await listener.start()
    async with aiohttp.ClientSession() as client:

        async def ask(**headers: str) -> tuple[int, str]:
            async with client.get(f"{listener.url}/health", headers=headers) as response:
                return response.status, await response.text()

        unknown = [await ask(), await ask(authorization="Bearer wrong")]
        known = [await ask(authorization="Bearer a key that is long"), await ask(**{"x-api-key": "a key that is long"})]
    await listener.aclose()

    for status, body in unknown:
        assert (status, json.loads(body)) == (
            200,
            {"status": "healthy", "endpoints": ["dyn://dynamo.backend.generate"]},
        )
    for status, body in known:
        assert status == 200
        assert json.loads(body)["instances"][0]["host"] == "somewhere"
        assert json.loads(body)["process"] == {"pid": 7}
        assert json.loads(body)["extensions"] == {"ledger": "did not start: no disk"}


async def test_a_failed_extension_is_named_and_the_process_is_healthy(front: Front) -> None:
    assert "extensions" not in (await front.get("/health"))[1]

    front.source.broken = {"ledger": "no disk"}
    status, body = await front.get("/health")

    assert (status, body["status"], body["extensions"]) == (200, "healthy", {"ledger": "no disk"})


async def test_a_stopping_process_reports_it_on_every_health_route(front: Front) -> None:
    front.source.ready = (True, "")
    front.source.shutting_down = True

    answers = [await front.get(path) for path in ("/health", "/live", "/ready")]

    assert [(status, body["status"]) for status, body in answers] == [(503, "shutting_down")] * 3


async def test_live_is_true_while_the_process_serves(front: Front) -> None:
    assert await front.get("/live") == (200, {"status": "live", "message": "Service is live"})


async def test_ready_reports_the_reason_when_not_ready(front: Front) -> None:
    before = await front.get("/ready")
    front.source.ready = (True, "")
    after = await front.get("/ready")

    assert before == (503, {"status": "notready", "message": "model m has 0 of 1 workers"})
    assert after == (200, {"status": "ready", "message": "Service is ready"})


async def test_metrics_are_served_as_prometheus_text(front: Front) -> None:
    front.metrics.counter("a_total", "A.").labels().inc()

    content_type, text = await front.text("/metrics")

    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert "a_total 1.0\n" in text


class Worker:
    """The workers of a process as a test wants them to be."""

    def __init__(self) -> None:
        self.starting = True
        self.state = (False, "worker w is starting")
        self.broken: dict[str, str] = {}

    def failures(self) -> dict[str, str]:
        return self.broken

    def endpoints(self) -> dict[str, bool]:
        return {"dynamo.backend.generate": self.state[0]}

    def states(self) -> dict[str, str]:
        return {"dynamo.backend.generate": "cordoned"}

    def readiness(self) -> tuple[bool, str]:
        return self.state


async def test_a_worker_is_alive_while_it_starts_and_ready_when_it_serves() -> None:
    worker = Worker()
    listener = make(*system_routes(worker))
    await listener.start()
    found = []
    async with aiohttp.ClientSession() as client:
        for starting, state in (
            (True, (False, "worker w is starting")),
            (False, (True, "ready")),
            (False, (False, "the engine of worker w does not answer")),
        ):
            worker.starting, worker.state = starting, state
            statuses = []
            for path in ("/live", "/health", "/ready"):
                async with client.get(listener.url + path) as answer:
                    statuses.append(answer.status)
                    body = await answer.json()
            found.append((statuses, body["status"], body["message"]))
        worker.broken = {"watch": "no device"}
        async with client.get(f"{listener.url}/health") as answer:
            body = await answer.json()
            states = body["states"]
            assert body["extensions"] == worker.broken
    await listener.aclose()

    assert found == [
        ([200, 503, 503], "notready", "worker w is starting"),
        ([200, 200, 200], "ready", "ready"),
        ([503, 503, 503], "notready", "the engine of worker w does not answer"),
    ]
    assert states == {"dynamo.backend.generate": "cordoned"}
