"""What Prometheus and Grafana are given is sound, and asks for metrics that a real deployment has."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo_testing.servers.ports import free_port

from tests.deploy.conftest import REPOSITORY
from tests.deploy.prometheus import PACK, RULES, Prometheus, promtool, rules_in, told
from tests.e2e.conftest import serve as serve

RUNBOOK = REPOSITORY / "docs" / "how-to" / "runbook.md"

CONFIG = """
admin: {port: %(admin)s}
router: {use: kv}
admission: [{use: token-capacity}, {use: fair-queue}]
extensions: [{use: feed}]
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
client: {drain_grace: 0}
workers:
  first: &worker
    model: {name: mock-model, migration_limit: 3}
    engine: {use: mocker, fixed_itl_ms: 10}
    engine_request_limit: 1
    request_queue_limit: 2
    grace_period: 0
  second: *worker
"""


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("observability_build", PACK / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def queries() -> dict[str, str]:
    """Return every query of a panel."""
    found = {}
    for path in sorted((PACK / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                found[f"{path.stem}: {panel['title']}, {target['legendFormat']}"] = target["expr"]
    return found


def metrics_of(query: str) -> set[str]:
    """Return the families that a query reads."""
    names = set(re.findall(r"\bdynamo_\w+", query))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def test_the_dashboards_are_those_that_the_tables_make() -> None:
    build = builder()

    assert {path.stem for path in (PACK / "grafana").glob("*.json")} == set(build.DASHBOARDS)
    for name in build.DASHBOARDS:
        assert (PACK / "grafana" / f"{name}.json").read_text() == build.text(name), "run deploy/observability/build.py"


def test_every_alert_has_an_entry_in_the_runbook_and_a_test() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    groups = yaml.safe_load((PACK / "prometheus" / "rules_test.yml").read_text())["tests"]
    fired = [test["alertname"] for group in groups for test in group["alert_rule_test"] if test["exp_alerts"]]

    rules = rules_in(RULES.read_text())
    names = [rule["alert"] for rule in rules]
    assert headings == names
    assert list(dict.fromkeys(fired)) == names
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/how-to/runbook.md#{rule['alert'].lower()}"


def test_promtool_finds_rules_and_configuration_sound() -> None:
    for words in (
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        promtool(*words, folder=RULES.parent)


@pytest.fixture
def deployment(serve: Any, tmp_path: Path) -> Any:
    admin = free_port()
    server = serve(CONFIG % {"admin": admin, "folder": tmp_path / "discovery"})
    assert server.until(lambda: len(server.instances()) == 2, 20)
    server.admin = f"127.0.0.1:{admin}"
    return server


def ask(server: Any, tokens: int = 5) -> int:
    body = {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "Say something. " * 20}],
        "max_tokens": tokens,
    }
    status: int = server.request("POST", "/v1/chat/completions", body)[0]
    return status


def test_every_query_uses_exported_metrics(deployment: Any) -> None:
    assert ask(deployment) == 200
    workers = told(deployment.admin, "/admin/workers")["workers"]
    pages = [f"http://{deployment.admin}/metrics", *(f"{worker['system_url']}/metrics" for worker in workers)]
    there: set[str] = set()
    for page in pages:
        with urllib.request.urlopen(page, timeout=10) as answer:
            there |= set(re.findall(r"^# TYPE (\S+)", answer.read().decode(), re.MULTILINE))

    asked = [*queries().values(), *(rule["expr"] for rule in rules_in(RULES.read_text()))]
    assert {query: metrics_of(query) - there for query in asked if metrics_of(query) - there} == {}


@pytest.fixture
def prometheus(deployment: Any, tmp_path: Path) -> Iterator[Prometheus]:
    workers = told(deployment.admin, "/admin/workers")["workers"]
    targets = {
        "dynamo-frontend": [deployment.admin],
        "dynamo-worker": [worker["system_url"].removeprefix("http://") for worker in workers],
    }
    jobs = [{"job_name": job, "static_configs": [{"targets": list_}]} for job, list_ in targets.items()]
    started = Prometheus(tmp_path, jobs)
    yield started
    started.close()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_real_prometheus_has_data_for_every_panel(deployment: Any, prometheus: Prometheus) -> None:
    missing = dict(queries())
    bodies = {
        "model": "mock-model",
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": 400,
        "stream": True,
    }
    deadline = time.monotonic() + 150
    moved = False
    while missing and time.monotonic() < deadline:
        # More than the workers take: some are refused. Once, a worker dies in the middle of an answer.
        crowd = [deployment.raw("POST", "/v1/chat/completions", bodies) for _ in range(6)]
        if not moved:
            assert crowd[0].recv(1)
            workers = told(deployment.admin, "/admin/workers")["workers"]
            os.kill(max(workers, key=lambda one: one["requests"] or 0)["pid"], signal.SIGKILL)
            moved = True
        time.sleep(1)
        for connection in crowd:
            connection.close()
        ask(deployment)
        for name, query in list(missing.items()):
            plain = query.replace("$__rate_interval", "30s").replace("$model", ".*")
            if prometheus.query(plain):
                del missing[name]

    assert missing == {}
