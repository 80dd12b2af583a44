"""What the pods of the chart run and are probed by, as processes here, with a stand-in for the cluster's API server.

The stand-in is that of the discovery's own tests. It grants what the chart's Role grants, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

REPOSITORY = Path(__file__).parents[2]

STAND_IN = REPOSITORY / "plugins" / "discovery" / "kubernetes" / "tests" / "kubernetes_stand_in.py"

Objects = list[dict[str, Any]]


def status(url: str) -> int:
    """Return what GET is answered with; 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def becomes(code: int, url: str, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if status(url) == code:
            return True
        time.sleep(0.05)
    return False


def metrics(url: str) -> set[str]:
    """Return the names of all metrics of a page."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return set(re.findall(r"^# TYPE (\w+) ", response.read().decode(), re.M))


class Pod:
    """The container of a Deployment as a process, and the addresses of its probes."""

    def __init__(self, deployment: dict[str, Any], config: Path, environment: dict[str, str], system_port: int) -> None:
        spec = deployment["spec"]["template"]["spec"]
        [own] = spec["containers"]
        self.seconds: int = spec["terminationGracePeriodSeconds"]
        self.probes = {
            name.removesuffix("Probe"): f"http://127.0.0.1:{system_port}{own[name]['httpGet']['path']}"
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        words = [str(config) if word == "/etc/dynamo/dynamo.yaml" else word for word in own["args"]]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_runtime.cli.main", *words], env=environment, stderr=subprocess.DEVNULL
        )

    def end(self) -> int:
        """End the process as a cluster does; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5)


@pytest.fixture
def objects(chart: Callable[..., Objects], example: Callable[[str], dict[str, Any]]) -> Objects:
    return chart(example("mocker"))


@pytest.fixture
def api(objects: Objects) -> Iterator[Any]:
    """Yield the stand-in, with the namespace and the pods of the deployment and the rights of its Role."""
    server = runpy.run_path(str(STAND_IN))["ApiServer"]()
    server.namespaces = {"dynamo"}
    [role] = [found for found in objects if found["kind"] == "Role"]
    server.tokens = {
        "pod": {(verb, kind) for rule in role["rules"] for verb in rule["verbs"] for kind in rule["resources"]}
    }
    asyncio.run(server.start())
    for part in ("frontend", "worker"):
        asyncio.run(server.put("pods", {"metadata": {"name": f"{part}-0"}}, "dynamo"))
    yield server
    asyncio.run(server.aclose())


@pytest.fixture
def pods(objects: Objects, api: Any, tmp_path: Path) -> Iterator[Callable[[str], Pod]]:
    """Start the pod of `frontend` or `worker` of the mocker example."""
    account = tmp_path / "serviceaccount"
    account.mkdir()
    (account / "token").write_text("pod")
    (account / "namespace").write_text("dynamo")
    [text] = [found["data"]["dynamo.yaml"] for found in objects if found["kind"] == "ConfigMap"]
    config = tmp_path / "dynamo.yaml"
    config.write_text(text)
    public = free_port(3)
    admin, worker = public + 1, public + 2
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")} | {
        "POD_IP": "127.0.0.1",
        "TRANSPORT_SECRET": "0123456789abcdef",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        # The ports of a pod are its own; here they are shared.
        "DYN_FRONTEND__HOST": "127.0.0.1",
        "DYN_FRONTEND__PORT": str(public),
        "DYN_ADMIN__HOST": "127.0.0.1",
        "DYN_ADMIN__PORT": str(admin),
        "DYN_TRANSPORT__BIND": "127.0.0.1:0",
        "DYN_WORKERS__MOCK__SYSTEM_HOST": "127.0.0.1",
        "DYN_WORKERS__MOCK__SYSTEM_PORT": str(worker),
        # What Kubernetes puts into a pod by itself.
        "DYN_DISCOVERY__URL": api.url,
        "DYN_DISCOVERY__SERVICE_ACCOUNT": str(account),
    }
    started: list[Pod] = []

    def start(part: str) -> Pod:
        [deployment] = [
            found
            for found in objects
            if found["kind"] == "Deployment" and found["metadata"]["labels"]["app.kubernetes.io/component"] == part
        ]
        own = environment | {"POD_NAME": f"{part}-0"}
        started.append(Pod(deployment, config, own, admin if part == "frontend" else worker))
        return started[-1]

    yield start
    for pod in started:
        if pod.process.poll() is None:
            pod.process.kill()
            pod.process.wait(5)


def test_a_frontend_is_alive_at_once_and_ready_when_a_worker_is(pods: Callable[[str], Pod], api: Any) -> None:
    frontend = pods("frontend")
    assert becomes(200, frontend.probes["startup"])
    assert status(frontend.probes["liveness"]) == 200
    assert status(frontend.probes["readiness"]) == 503

    worker = pods("worker")

    assert becomes(200, worker.probes["startup"])
    assert {status(url) for url in worker.probes.values()} == {200}
    assert becomes(200, frontend.probes["readiness"])
    # It was found through the API server, and its lease belongs to its pod.
    leases = [lease["metadata"] for lease in api.objects["leases", "dynamo"].values()]
    assert "worker-0" in {owner["name"] for lease in leases for owner in lease.get("ownerReferences", [])}


def test_the_metrics_of_the_autoscaler_are_exported(
    pods: Callable[[str], Pod], example: Callable[[str], dict[str, Any]]
) -> None:
    worker, frontend = pods("worker"), pods("frontend")
    assert becomes(200, frontend.probes["readiness"])
    scaled = example("nats-etcd")["workers"]["long_answers"]["autoscaling"]["metrics"][0]["pods"]["metric"]["name"]

    names = {pod: metrics(pod.probes["liveness"].removesuffix("/live") + "/metrics") for pod in (worker, frontend)}

    page = (REPOSITORY / "docs" / "how-to" / "deploy.md").read_text().partition("### Autoscaling")[2]
    rows = dict(re.findall(r"^\| `(dynamo_\w+)` \| (each worker|frontends)", page, re.M))
    assert scaled in rows
    for name, where in rows.items():
        assert name in names[worker if where == "each worker" else frontend], name


@pytest.mark.full
def test_a_terminating_pod_fails_readiness_first_and_exits_in_time(pods: Callable[[str], Pod]) -> None:
    worker, frontend = pods("worker"), pods("frontend")
    assert becomes(200, frontend.probes["readiness"])

    frontend.process.send_signal(signal.SIGTERM)
    # The grace in which it goes on serving those who have not noticed yet.
    assert becomes(503, frontend.probes["readiness"])

    assert frontend.process.wait(frontend.seconds) == 0
    assert worker.end() == 0
