"""Each alert fires in a real Prometheus while a real deployment has a fault, and neither before nor after."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.deploy.prometheus import RULES, Prometheus, rules_in
from tests.e2e.asking import PATH, Stream, chat, read_to_end
from tests.e2e.conftest import serve_for_module as serve_for_module

TOKEN = "operators-0123456789"

#: A model per fault, so that none is in the way of another.
CONFIG = """
admin: {port: %(admin)s, token: "%(token)s"}
router: {use: kv, alarm_secs: 0.5}
admission: {use: token-capacity, models: {full: {active_decode_blocks_threshold: 0.3}}}
extensions: [{name: faulty, use: "%(extension)s:Faulty"}]
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
client: {drain_grace: 0}
workers:
  moving:
    model: {name: moving, migration_limit: 3}
    engine: {use: mocker, fixed_itl_ms: 20}
    replicas: 2
    grace_period: 0
  fixed:
    model: {name: fixed}
    engine: {use: mocker, fixed_itl_ms: 20}
    grace_period: 0
  full:
    model: {name: full}
    engine: {use: mocker, fixed_itl_ms: 100, num_gpu_blocks: 16}
    grace_period: 0
  slow:
    model: {name: slow}
    engine: {use: mocker, speedup_ratio: 0.0015}
    grace_period: 0
  hanging:
    model: {name: hanging}
    engine: {use: mocker, fixed_itl_ms: 3600000}
    grace_period: 0
  silent:
    model: {name: silent}
    engine: {use: mocker, fixed_itl_ms: 1}
    enable_kv_routing: false
    grace_period: 0
"""
#: How many workers each model has.
MODELS = {"moving": 2, "fixed": 1, "full": 1, "slow": 1, "hanging": 1, "silent": 1}

EXTENSION = '''
import time

from aiohttp import web
from dynamo_core import Extension, HttpRoute, ListenerName

DYNAMO_API = 1


class Faulty(Extension):
    """Does what no extension should, when it is told to."""

    NAME = "faulty"

    def routes(self):
        for name in ("block", "subscribe", "close"):
            yield HttpRoute("POST", f"/admin/faulty/{name}", getattr(self, name), name, ListenerName.ADMIN)

    async def block(self, http):
        time.sleep(0.4)
        return web.Response()

    async def subscribe(self, http):
        self.unread = self.services.requests.subscribe(capacity=1)
        return web.Response()

    async def close(self, http):
        await self.unread.aclose()
        return web.Response()
'''

#: Eight blocks of a KV cache, of the sixteen that `full` has.
PROMPT = "Say something. " * 30
#: Tokens of an answer that outlasts what is done to its worker.
LONG = 100


def hastened(text: str) -> str:
    """Return rules whose durations are seconds, as nothing else of them may differ."""
    text = re.sub(r"^(\s+for:) \d+[mh]$", r"\1 1s", text, flags=re.MULTILINE)
    return re.sub(r"(\[|\boffset )\d+m", r"\g<1>5s", text)


def runs(pid: int) -> bool:
    """Return whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


class Deployment:
    """A running `dynamo serve`, and what its operators see of it."""

    def __init__(self, server: Any, admin: str) -> None:
        self.server = server
        self.admin = admin
        self._numbers = itertools.count()

    def operate(self, method: str, path: str, token: str = TOKEN) -> tuple[int, bytes]:
        """Ask the admin listener: the status and the body."""
        request = urllib.request.Request(f"http://{self.admin}{path}", method=method)
        request.add_header("authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def act(self, path: str) -> None:
        """Have the admin listener do something."""
        status, body = self.operate("POST", path)
        assert status == 200, body

    def ask(self, model: str) -> int:
        """Return the status of a short answer to a prompt that no cache has."""
        body = chat(model=model, max_tokens=2, messages=self._prompt())
        status: int = self.server.request("POST", PATH, body)[0]
        return status

    def stream(self, model: str, tokens: int) -> Stream:
        """Return an answer that has begun, to a prompt that no cache has."""
        stream = Stream(self.server, model=model, max_tokens=tokens, messages=self._prompt())
        stream.begun()
        return stream

    def workers(self, model: str) -> list[int]:
        """Return the processes that run a model; none while one of them is missing, or has died and is still listed."""
        listed = json.loads(self.operate("GET", "/admin/workers")[1])["workers"]
        pids = [worker["pid"] for worker in listed if worker["model"] == model]
        return pids if len(pids) == MODELS[model] and all(map(runs, pids)) else []

    def whole(self, model: str) -> list[int]:
        """Return the processes that run a model, once all of its workers are there."""
        found: list[int] = []

        def look() -> bool:
            found[:] = self.workers(model)
            return bool(found)

        assert self.server.until(look, 20), self.server.log
        return found

    def frontend(self) -> int:
        """Return the process of the frontend."""
        supervisor = self.server.process.pid
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        (found,) = [pid for pid in children if b"\0frontend\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(found)

    def _prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{next(self._numbers)}. {PROMPT}"}]


#: What is done again and again while the fault lasts.
Again = Callable[[], None]


def nothing() -> None:
    """Do nothing: the fault lasts by itself."""


@contextmanager
def frozen(processes: Callable[[Deployment], list[int]], deployment: Deployment) -> Iterator[Again]:
    """Make processes stand still."""
    pids = processes(deployment)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield nothing
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def killed(model: str, whole: bool, deployment: Deployment) -> Iterator[Again]:
    """Kill a worker in mid-answer, whenever all workers are there. `whole` is whether clients notice nothing."""

    def kill() -> None:
        pids = deployment.workers(model)
        if not pids:
            return
        streams = [deployment.stream(model, LONG) for _ in range(4)]
        os.kill(pids[0], signal.SIGKILL)
        answers = [read_to_end(stream.connection) for stream in streams]
        assert all(b"data: [DONE]" in answer for answer in answers) is whole
        assert deployment.server.until(lambda: not runs(pids[0]), 10)

    yield kill
    deployment.whole(model)


@contextmanager
def filled(more: bool, deployment: Deployment) -> Iterator[Again]:
    """Fill more of the only worker's cache than its threshold allows, and send `more` requests."""

    def ask() -> None:
        assert deployment.ask("full") == 503

    stream = deployment.stream("full", 10 * LONG)
    yield ask if more else nothing
    stream.close()


@contextmanager
def slow(deployment: Deployment) -> Iterator[Again]:
    """Let the prompt of a request take eleven seconds."""
    stream = Stream(deployment.server, model="slow", max_tokens=1)
    yield nothing
    stream.close()


@contextmanager
def hanging(deployment: Deployment) -> Iterator[Again]:
    """Let an engine take a request and give nothing."""
    stream = Stream(deployment.server, model="hanging")
    yield nothing
    stream.close()


@contextmanager
def cordoned(deployment: Deployment) -> Iterator[Again]:
    """Let an operator forget a worker."""
    deployment.act("/admin/workers/full-0/cordon")
    yield nothing
    deployment.act("/admin/workers/full-0/uncordon")


@contextmanager
def silent(deployment: Deployment) -> Iterator[Again]:
    """Let the KV router send requests to a worker that does not report its cache."""

    def ask() -> None:
        assert deployment.ask("silent") == 200

    yield ask


@contextmanager
def unread(deployment: Deployment) -> Iterator[Again]:
    """Let an extension not read its subscription."""

    def ask() -> None:
        assert deployment.ask("moving") == 200

    deployment.act("/admin/faulty/subscribe")
    yield ask
    deployment.act("/admin/faulty/close")


@contextmanager
def blocked(deployment: Deployment) -> Iterator[Again]:
    """Let an extension hold the event loop of the frontend now and then."""
    yield lambda: deployment.act("/admin/faulty/block")


@contextmanager
def unauthorized(deployment: Deployment) -> Iterator[Again]:
    """Let a program try tokens."""

    def ask() -> None:
        for _ in range(5):
            assert deployment.operate("GET", "/admin/workers", token="guessed-0123456789")[0] == 401

    yield ask


@dataclass(frozen=True)
class Fault:
    """What makes an alert fire, the labels that it then has beside those of its rule, and its summary."""

    made: Callable[[Deployment], AbstractContextManager[Again]]
    labels: dict[str, str]
    summary: str


ADDRESS = r"127\.0\.0\.1:\d+"
FAULTS = {
    "DynamoFrontendDown": Fault(
        partial(frozen, lambda deployment: [deployment.frontend()]),
        {"job": "dynamo-frontend", "instance": ADDRESS},
        f"Frontend {ADDRESS} does not answer Prometheus",
    ),
    "DynamoModelNotReady": Fault(
        partial(frozen, lambda deployment: deployment.whole("moving")),
        {"model": "moving"},
        "No frontend can serve model moving: it lacks workers",
    ),
    "DynamoErrorsHigh": Fault(
        partial(killed, "fixed", False), {"model": "fixed"}, r"[\d.]+% of the requests for fixed fail"
    ),
    "DynamoRequestsRefused": Fault(
        partial(filled, True), {"model": "full"}, "100% of the requests for full are refused for load"
    ),
    "DynamoRequestsMoved": Fault(
        partial(killed, "moving", True),
        {"model": "moving"},
        r"Workers of moving fail: [\d.]+m? requests a second move to others",
    ),
    "DynamoFirstTokenSlow": Fault(
        slow, {"model": "slow"}, r"One request in twenty for slow waits [12]\d(\.\d+)?s for its first token"
    ),
    "DynamoModelStandsStill": Fault(
        hanging, {"model": "hanging"}, "1 requests for hanging run, and nothing comes of them"
    ),
    "DynamoWorkersBusy": Fault(
        partial(filled, False),
        {"model": "full", "worker_type": "aggregated"},
        "All aggregated workers of full are over their thresholds",
    ),
    "DynamoWorkerOutOfService": Fault(
        cordoned,
        {"model": "full", "worker_id": "[0-9a-f]{16}", "state": "cordoned"},
        "Worker [0-9a-f]{16} of full has been cordoned for an hour",
    ),
    "DynamoKvEventsSilent": Fault(
        silent,
        {"model": "silent", "worker_type": "aggregated"},
        "Workers of silent tell the router nothing of their KV caches",
    ),
    "DynamoEventsLost": Fault(
        unread,
        {"instance": ADDRESS, "extension": "faulty"},
        f"Extension faulty of {ADDRESS} does not keep up, and loses request events",
    ),
    "DynamoEventLoopStalls": Fault(
        blocked,
        {"job": "dynamo-frontend", "instance": ADDRESS},
        f"The event loop of {ADDRESS} stands still again and again",
    ),
    "DynamoUnauthorizedRequests": Fault(
        unauthorized,
        {"instance": ADDRESS, "listener": "admin"},
        f"Many requests without a known key reach the admin listener of {ADDRESS}",
    ),
}


@pytest.fixture(scope="module")
def deployment(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "faulty.py").write_text(EXTENSION)
    (folder / "faulty.py").chmod(0o600)
    places = {"folder": folder / "discovery", "extension": folder / "faulty.py"}
    admin = free_port()
    started = Deployment(serve_for_module(CONFIG % {"admin": admin, "token": TOKEN, **places}), f"127.0.0.1:{admin}")
    for model in MODELS:
        started.whole(model)
    return started


@pytest.fixture(scope="module")
def prometheus(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Scrape the frontend as the operator's Prometheus does: with a token, and a label for the namespace."""
    job = {
        "job_name": "dynamo-frontend",
        "authorization": {"credentials": TOKEN},
        "static_configs": [{"targets": [deployment.admin], "labels": {"namespace": "dynamo"}}],
    }
    started = Prometheus(tmp_path_factory.mktemp("prometheus"), [job], hastened(RULES.read_text()))
    try:
        ready = "count(dynamo_frontend_model_ready == 1)"
        assert started.until(lambda: [one["value"][1] for one in started.query(ready)] == [str(len(MODELS))], 30)
        yield started
    finally:
        started.close()


def test_there_is_a_fault_for_each_alert() -> None:
    assert list(FAULTS) == [rule["alert"] for rule in rules_in(RULES.read_text())]


def test_the_rules_of_these_tests_are_the_real_ones_but_for_their_durations() -> None:
    real = RULES.read_text()

    def without_durations(text: str) -> list[dict[str, Any]]:
        return [{**rule, "for": None, "expr": re.split(r"\b\d+[smhd]\b", rule["expr"])} for rule in rules_in(text)]

    assert without_durations(hastened(real)) == without_durations(real)
    short = [one for rule in rules_in(hastened(real)) for one in re.findall(r"\b\d+[smhd]\b", rule["expr"])]
    assert set(short) == {"5s"}
    assert {rule["for"] for rule in rules_in(hastened(real))} == {"1s"}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
def test_each_alert_fires_exactly_while_its_fault_lasts(
    name: str, deployment: Deployment, prometheus: Prometheus
) -> None:
    fault = FAULTS[name]
    (rule,) = [rule for rule in rules_in(RULES.read_text()) if rule["alert"] == name]
    expected = {"alertname": name, "namespace": "dynamo", **rule["labels"]}

    assert prometheus.until(lambda: not prometheus.firing(name), 20), "it fires before the fault"
    with fault.made(deployment) as again:
        alerts = prometheus.until(lambda: prometheus.firing(name), 60, again)
    assert alerts, deployment.server.log
    (alert,) = alerts

    labels = dict(alert["labels"])
    assert {key: labels.pop(key, None) for key in expected} == expected
    assert set(labels) == set(fault.labels)
    assert {key: value for key, value in fault.labels.items() if not re.fullmatch(value, labels[key])} == {}
    assert re.fullmatch(fault.summary, alert["annotations"]["summary"]), alert["annotations"]
    assert alert["annotations"]["runbook"] == rule["annotations"]["runbook"]
    assert prometheus.until(lambda: not prometheus.firing(name), 30), "it fires after the fault"
