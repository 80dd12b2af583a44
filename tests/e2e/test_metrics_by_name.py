"""GET /metrics of running processes has the names, types and labels that dashboards ask for and that the page has."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port
from prometheus_client.parser import text_string_to_metric_families

from tests.architecture.metrics_page import rows

CONFIG = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 50}
    engine_request_limit: 1
    request_queue_limit: 2
"""

CHAT: dict[str, Any] = {"model": "mock-model", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}

MODEL = {"model"}
REQUEST = {"model", "endpoint", "request_type"}
WORKER = {"worker_id", "dp_rank", "worker_type"}

#: What the original's frontend has, without its prefix.
ORIGINAL: dict[str, tuple[str, set[str]]] = {
    "requests_total": ("counter", REQUEST | {"status", "error_type"}),
    "requests_started_total": ("counter", REQUEST),
    "inflight_requests": ("gauge", MODEL),
    "active_requests": ("gauge", MODEL),
    "queued_requests": ("gauge", MODEL),
    "request_duration_seconds": ("histogram", MODEL),
    "time_to_first_token_seconds": ("histogram", MODEL),
    "inter_token_latency_seconds": ("histogram", MODEL),
    "input_sequence_tokens": ("histogram", MODEL),
    "output_sequence_tokens": ("histogram", MODEL),
    "cached_tokens": ("histogram", MODEL),
    "output_tokens_total": ("counter", MODEL),
    "disconnected_clients": ("gauge", set()),
    "model_cancellation_total": ("counter", REQUEST),
    "model_rejection_total": ("counter", {"endpoint", "model"}),
    "model_migration_total": ("counter", {"model", "migration_type"}),
    "model_migration_duration_seconds": ("histogram", {"model", "migration_type", "outcome"}),
    "model_migration_max_seq_len_exceeded_total": ("counter", MODEL),
    "failures_total": ("counter", {"class", "reason"}),
    "model_ready": ("gauge", MODEL),
    "model_context_length": ("gauge", MODEL),
    "model_kv_cache_block_size": ("gauge", MODEL),
    "model_max_num_batched_tokens": ("gauge", MODEL),
    "model_max_num_seqs": ("gauge", MODEL),
    "model_total_kv_blocks": ("gauge", MODEL),
    "model_migration_limit": ("gauge", MODEL),
    "worker_active_decode_blocks": ("gauge", WORKER),
    "worker_active_prefill_tokens": ("gauge", WORKER),
    "worker_last_time_to_first_token_seconds": ("gauge", WORKER),
    "worker_last_inter_token_latency_seconds": ("gauge", WORKER),
    "worker_last_input_sequence_tokens": ("gauge", WORKER),
    "stage_duration_seconds": ("histogram", {"stage"}),
    "stage_requests": ("gauge", {"stage", "phase"}),
    "tokenize_seconds": ("histogram", set()),
    "template_seconds": ("histogram", set()),
    "tokenizer_latency_ms": ("histogram", {"operation"}),
    "tokenizer_cache_hits_total": ("counter", set()),
    "tokenizer_cache_misses_total": ("counter", set()),
    "event_loop_delay_seconds": ("histogram", set()),
    "event_loop_stall_total": ("counter", set()),
}
#: Those that have no line before a worker fails in mid-answer; their labels are tested where workers do.
SILENT = {name for name in ORIGINAL if "_migration_" in name} - {"model_migration_limit"}

#: Frontend and worker with a plugin of every stage that has metrics and needs no server.
PROCESSES = """
admin: {port: %(admin)s}
frontend: {response_store: {use: memory}}
router: {use: kv}
admission: [{use: token-capacity}, {use: fair-queue}, {use: rate-limit, requests_per_minute: 1000}]
extensions: [{use: feed}]
transport: {use: tcp}
discovery: {use: file, path: "%(folder)s", ttl: 2}
client: {drain_grace: 0, share_loads: true}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 0}
    grace_period: 0
"""
#: Groups of the page whose plugins, settings or servers these processes do not have.
ELSEWHERE = {
    "Router affinity",
    "Router slot-tracker",
    "Limits over several frontends",
    "Engine vllm",
    "Transports nats and redis",
    "Slot tracker",
}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    """Return a frontend that has seen a bit of everything."""
    server = serve_for_module(CONFIG)
    assert server.request("POST", "/v1/chat/completions", CHAT)[0] == 200
    assert server.request("POST", "/v1/chat/completions", CHAT | {"temperature": 9})[0] == 400
    assert server.request("POST", "/v1/chat/completions", CHAT | {"model": "nope"})[0] == 404
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(server.request("POST", "/v1/chat/completions", CHAT | {"max_tokens": 10})[0])

    crowd = [threading.Thread(target=ask) for _ in range(8)]
    for client in crowd:
        client.start()
    for client in crowd:
        client.join(30)
    assert set(statuses) == {200, 503}
    leaver = server.raw("POST", "/v1/chat/completions", CHAT | {"max_tokens": 1000, "stream": True})
    assert leaver.recv(1)
    leaver.close()
    assert server.until(lambda: server.metric("dynamo_frontend_model_cancellation_total") == 1, 20)
    return server


def families_of(page: bytes) -> dict[str, Any]:
    """Return what a page shows, with the exact names."""
    text = page.decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    exact = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    # The parser takes `_total` from the names of counters.
    return {name: found.get(name) or found[name.removesuffix("_total")] for name in exact}


def labels_of(family: Any) -> set[frozenset[str]]:
    """Return the names of the labels of the lines of a metric, without that of buckets."""
    return {frozenset(sample.labels) - {"le"} for sample in family.samples}


@pytest.fixture(scope="module")
def families(server: Any) -> dict[str, Any]:
    return families_of(server.request("GET", "/metrics")[2])


@pytest.mark.parametrize("name", ORIGINAL)
def test_a_metric_has_the_type_and_the_labels_of_the_original(families: dict[str, Any], name: str) -> None:
    kind, labels = ORIGINAL[name]

    family = families[f"dynamo_frontend_{name}"]

    assert family.type == kind
    assert labels_of(family) == (set() if name in SILENT else {frozenset(labels)})


@pytest.fixture(scope="module")
def shown(serve_for_module: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what the pages of two processes show after a request, by the process."""
    admin = free_port()
    server = serve_for_module(PROCESSES % {"admin": admin, "folder": tmp_path_factory.mktemp("discovery")})
    assert server.until(lambda: len(server.instances()) == 1, 20)
    assert server.request("POST", "/v1/chat/completions", CHAT)[0] == 200

    def told(address: str) -> bytes:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return bytes(answer.read())

    (worker,) = json.loads(told(f"http://127.0.0.1:{admin}/admin/workers"))["workers"]
    pages = {"frontends": f"http://127.0.0.1:{admin}", "workers": worker["system_url"]}
    return {process: families_of(told(f"{address}/metrics")) for process, address in pages.items()}


@pytest.mark.parametrize("process", ["frontends", "workers"])
def test_a_process_shows_its_metrics_as_the_page_has_them_and_no_others(shown: Any, process: str) -> None:
    page = {name: row for name, row in rows().items() if process in row.pages and row.heading not in ELSEWHERE}

    assert shown[process].keys() == page.keys()
    for name, family in shown[process].items():
        assert (family.type, family.documentation) == (page[name].kind, page[name].meaning), name
        assert labels_of(family) <= {page[name].labels}, name
    assert sum(map(bool, map(labels_of, shown[process].values()))) > len(page) / 2


def test_the_metrics_match_the_requests_made(server: Any) -> None:
    def value(name: str, **labels: str) -> float:
        return float(server.metric(f"dynamo_frontend_{name}", **labels))

    assert server.until(lambda: value("active_requests") == 0, 20)
    assert value("model_ready", model="mock-model") == 1
    assert value("failures_total", **{"class": "NotFound", "reason": "not_found"}) == 1
    assert value("failures_total", **{"class": "InvalidRequest"}) == 1
    assert value("failures_total", **{"class": "CapacityExhausted"}) == value("model_rejection_total") > 0
    assert value("disconnected_clients") == 1
    assert value("worker_active_decode_blocks") == value("stage_requests") == 0
    done = value("requests_total", status="success")
    assert value("cached_tokens_count") == done
    assert value("template_seconds_count") == value("stage_duration_seconds_count", stage="preprocess") - 1
    assert value("worker_last_time_to_first_token_seconds", worker_type="aggregated") > 0
