"""Load shedding on both sides of the wire, against real processes: each threshold, met and exceeded."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_testing.servers.ports import free_port

from tests.e2e.brokers import Nats, Redis

ROOT = Path(__file__).parents[2]
BUSY = "Service temporarily unavailable: All workers are busy, please retry later"
REJECTIONS = "dynamo_frontend_model_rejection_total"
BLOCKS = "dynamo_frontend_worker_kv_blocks_active"

# Steps of 0.7 s, so that a prompt holds the blocks it has for forty seconds; `stuck` never ends a step.
CONFIG = """
admission: {use: token-capacity}
workers:
  one:
    model: {name: one}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100}
  other:
    model: {name: other}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100}
  pair:
    model: {name: pair}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100}
    replicas: 2
  ranks:
    model: {name: ranks}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100, data_parallel_size: 2}
  stuck:
    model: {name: stuck}
    engine:
      use: mocker
      fixed_itl_ms: 3600000
      block_size: 16
      num_gpu_blocks: 10000
      context_length: 20000
      max_num_batched_tokens: 500
  # Two sides: of one model the prompts take for ever, of the other the answers.
  first:
    model: {name: prompts}
    engine: {use: mocker, fixed_itl_ms: 3600000, block_size: 64, num_gpu_blocks: 200, kv_transfer_bandwidth: 0}
    disaggregation_mode: prefill
  second:
    model: {name: prompts}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100, kv_transfer_bandwidth: 0}
    disaggregation_mode: decode
  third:
    model: {name: answers}
    engine: {use: mocker, fixed_itl_ms: 1, block_size: 64, num_gpu_blocks: 200, kv_transfer_bandwidth: 0}
    disaggregation_mode: prefill
  fourth:
    model: {name: answers}
    engine: {use: mocker, fixed_itl_ms: 700, block_size: 64, num_gpu_blocks: 100, kv_transfer_bandwidth: 0}
    disaggregation_mode: decode
  # Limits of workers.
  capped:
    model: {name: capped}
    engine: {use: mocker, fixed_itl_ms: 3600000}
    engine_request_limit: 1
  small:
    model: {name: unequal}
    engine: {use: mocker, fixed_itl_ms: 400}
    engine_request_limit: 1
    request_queue_limit: 2
  large:
    model: {name: unequal}
    engine: {use: mocker, fixed_itl_ms: 400}
"""
MODELS = ["answers", "capped", "one", "other", "pair", "prompts", "ranks", "stuck", "unequal"]

#: Fills 50 blocks of 64 tokens, with room for 63 more in the last one.
PROMPT_50 = "a" * (49 * 64 + 1)


def completion(model: str, prompt: str = "a", **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 1} | more


class Overloaded:
    """A server, and what keeps its workers busy."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def set(self, model: str, **values: Any) -> dict[str, Any]:
        """Set thresholds, by the part of their names that differs, and return all of them."""
        names = {
            "blocks": "active_decode_blocks_threshold",
            "tokens": "active_prefill_tokens_threshold",
            "frac": "active_prefill_tokens_threshold_frac",
        }
        body = {"model": model} | {names[key]: value for key, value in values.items()}
        status, _, answer = self.server.request("POST", "/busy_threshold", body)
        assert status == 200, answer
        whole: dict[str, Any] = json.loads(answer)
        return whole

    def status(self, model: str, **more: Any) -> int:
        """Return the status of a short request."""
        status: int = self.server.request("POST", "/v1/completions", completion(model, **more))[0]
        return status

    def statuses(self, model: str, *, blocks: Iterable[float]) -> list[int]:
        """Return the status of one short request under each of these thresholds."""
        seen = []
        for share in blocks:
            self.set(model, blocks=share)
            seen.append(self.status(model))
        return seen

    @contextmanager
    def held(self, model: str, prompt: str) -> Iterator[None]:
        """Yield a request that goes on until the block is left; gone, with all it held, afterwards."""
        before = self.active(model)
        body = completion(model, prompt, max_tokens=500, stream=True, ignore_eos=True)
        connection = self.server.raw("POST", "/v1/completions", body)
        try:
            assert self.server.until(lambda: self.active(model) == before + 1, 10)
            yield
        finally:
            connection.close()
            assert self.server.until(lambda: self.active(model) <= before, 20), "what was held is not back"

    def active(self, model: str) -> float:
        active: float = self.server.metric("dynamo_frontend_active_requests", model=model)
        return active

    def blocks(self, count: int) -> None:
        """Return once the workers have told that they hold so many blocks in all."""
        assert self.server.until(lambda: self.server.metric(BLOCKS) == count, 10), self.server.metric(BLOCKS)


@pytest.fixture(scope="module")
def running(serve_for_module: Callable[..., Any]) -> Overloaded:
    return Overloaded(serve_for_module(CONFIG))


@pytest.fixture
def house(running: Overloaded) -> Iterator[Overloaded]:
    """Yield the server without thresholds and without load; both are so again afterwards."""
    yield running
    for model in MODELS:
        assert running.server.request("DELETE", f"/busy_threshold/{model}")[0] == 200
    assert running.server.until(lambda: running.server.metric(BLOCKS) == 0, 20)


# The rules.


def test_worker_is_busy_above_its_share_of_blocks_whatever_other_models_do(house: Overloaded) -> None:
    with house.held("one", PROMPT_50), house.held("other", PROMPT_50):
        house.blocks(100)
        page = house.server.request("GET", "/metrics")[2].decode()
        # Without thresholds nobody is refused.
        assert house.status("one") == 200
        house.blocks(100)
        assert house.statuses("one", blocks=(0.5, 0.49)) == [200, 503]
        # Either threshold is enough, and each model has its own.
        house.set("one", tokens=100_000)
        assert (house.status("one"), house.status("other")) == (503, 200)

    assert len(re.findall(rf'^{BLOCKS}\{{dp_rank="0",worker_id="\w+"\}} 50\.0$', page, re.MULTILINE)) == 2
    assert re.search(r'^dynamo_frontend_worker_kv_blocks_total\{dp_rank="0",worker_id="\w+"\} 100\.0$', page, re.M)
    assert 'dynamo_frontend_model_total_kv_blocks{model="one"} 100.0' in page


def test_worker_is_busy_above_its_tokens_to_prefill(house: Overloaded) -> None:
    with house.held("stuck", "a" * 12_000):
        house.set("stuck", tokens=12_000, blocks=0.99)
        # Nothing ever ends here: to be let in is to be counted.
        with house.held("stuck", "a"):
            pass
        house.set("stuck", tokens=10_000)

        assert house.status("stuck") == 503


def test_tokens_may_be_bounded_by_a_fraction_of_a_steps_budget(house: Overloaded) -> None:
    house.set("stuck", frac=0.1)
    with house.held("stuck", "a" * 50):
        with house.held("stuck", "a"):
            assert house.status("stuck") == 503
        house.set("stuck", frac=0.098)

        assert house.status("stuck") == 503


def test_a_worker_is_busy_only_when_all_its_ranks_are(house: Overloaded) -> None:
    house.set("ranks", blocks=0.4)
    with house.held("ranks", PROMPT_50):
        house.blocks(50)
        # Ranks are taken in turn: after two short requests the next one goes to the rank that does nothing.
        one_rank = [house.status("ranks"), house.status("ranks")]
        with house.held("ranks", PROMPT_50.replace("a", "b")):
            house.blocks(100)

            assert (one_rank, house.status("ranks")) == ([200, 200], 503)


# The busy list.


def test_a_busy_worker_is_passed_over_while_another_is_free(house: Overloaded) -> None:
    house.set("pair", blocks=0.3)
    with house.held("pair", PROMPT_50):
        house.blocks(50)
        before = loads(house)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: house.status("pair", max_tokens=2), range(4)))
            during = loads(house)

        assert found == [200] * 4
        # The one that holds the long request has had no other.
        busy = max(before, key=lambda worker: before[worker])
        assert during[busy] <= before[busy] + 1


def loads(house: Overloaded) -> dict[str, float]:
    """Return KV blocks by worker."""
    text = house.server.request("GET", "/metrics")[2].decode()
    found = re.findall(rf'^{BLOCKS}\{{dp_rank="0",worker_id="(\w+)"\}} (\S+)$', text, re.MULTILINE)
    return {worker: float(value) for worker, value in found}


# The refusal.


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_completions": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "rerank": ("/v1/rerank", {"query": "hi", "documents": ["ho"]}),
}


def test_refused_request_gets_a_plain_503_is_counted_and_reserves_nothing(house: Overloaded) -> None:
    server = house.server

    def refused() -> list[float]:
        return [server.metric(REJECTIONS, model="stuck", endpoint=endpoint) for endpoint in ROUTES]

    before = refused()
    house.set("stuck", tokens=0)
    with house.held("stuck", "a"):
        for path, body in ROUTES.values():
            for more in ({}, {"stream": True}) if "completions" in path else ({},) * 2:
                status, headers, answer = server.request("POST", path, {"model": "stuck"} | body | more)
                assert (status, headers["content-type"]) == (503, "application/json")
                told = {key: value for key, value in json.loads(answer).items() if key != "error"}
                assert told == {"message": BUSY, "type": "service_unavailable", "code": 503}
                assert 1 <= int(headers["retry-after"]) <= 60
        assert server.until(lambda: house.active("stuck") == 1, 5)
        assert server.metric("dynamo_frontend_inflight_requests", model="stuck") == 1
        assert server.metric("dynamo_frontend_worker_active_prefill_tokens") == 1

    assert server.until(lambda: refused() == [count + 2 for count in before], 5)
    # An overload is told from a model that is not there.
    assert house.status("nobody") == 404


def test_all_choices_of_one_request_are_admitted_together(house: Overloaded) -> None:
    """The second answer finds the worker busy with the first: it waits, as the request has been let in."""
    house.set("one", blocks=0, tokens=0)

    status, _, body = house.server.request("POST", "/v1/completions", completion("one", n=2))

    assert status == 200, body
    assert len(json.loads(body)["choices"]) == 2


def test_the_client_that_waits_gets_its_answer(house: Overloaded) -> None:
    house.set("one", blocks=0, tokens=0)
    with house.held("one", "a"):
        words = [sys.executable, str(ROOT / "examples" / "overload" / "client.py"), house.server.url, "one", "hi"]
        client = subprocess.Popen(
            [*words, "--max-tokens", "1"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert client.stderr is not None
        refused = client.stderr.readline()
    output, _ = client.communicate(timeout=50)

    assert "busy (503), again in" in refused
    assert (client.returncode, bool(output.strip())) == (0, True)


# /busy_threshold.


def test_thresholds_are_set_and_listed_as_in_the_original(house: Overloaded) -> None:
    assert house.set("one", blocks=0.85, tokens=10_000) == {
        "model": "one",
        "active_decode_blocks_threshold": 0.85,
        "active_prefill_tokens_threshold": 10_000,
        "active_prefill_tokens_threshold_frac": None,
    }

    status, _, body = house.server.request("GET", "/busy_threshold")
    assert (status, json.loads(body)) == (
        200,
        {
            "thresholds": [
                {
                    "model": "one",
                    "active_decode_blocks_threshold": 0.85,
                    "active_prefill_tokens_threshold": 10_000,
                }
            ]
        },
    )


def test_absent_thresholds_stay_and_null_switches_off(house: Overloaded) -> None:
    house.set("one", blocks=0.85, tokens=10_000, frac=2)

    assert house.set("one", tokens=5)["active_decode_blocks_threshold"] == 0.85
    assert house.set("one", blocks=None) == {
        "model": "one",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": 5,
        "active_prefill_tokens_threshold_frac": 2.0,
    }
    assert house.set("nobody") == dict.fromkeys(house.set("one"), None) | {"model": "nobody"}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (
            {"model": "nope", "active_decode_blocks_threshold": 0.5},
            404,
            "Model 'nope' not found. Thresholds can only be set for discovered models.",
        ),
        (
            {"model": "one", "active_decode_blocks_threshold": 1.5},
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.5",
        ),
        (
            {"model": "one", "active_prefill_tokens_threshold_frac": -1},
            400,
            "active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, got -1.0",
        ),
        ({"model": "one", "active_prefill_tokens_threshold": "x"}, 422, "Failed to deserialize the JSON body"),
        ({"active_prefill_tokens_threshold": 1}, 422, "Failed to deserialize the JSON body"),
        ({"model": "one", "active_decode_block_threshold": 1}, 422, "Failed to deserialize the JSON body"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused(house: Overloaded, body: Any, status: int, error: str) -> None:
    found, headers, answer = house.server.request("POST", "/busy_threshold", body)

    assert (found, headers["content-type"]) == (status, "application/json")
    assert json.loads(answer)["error"].startswith(error)


def test_thresholds_without_the_mode_do_nothing(serve: Callable[..., Any]) -> None:
    server = Overloaded(
        serve(
            CONFIG.replace("admission: {use: token-capacity}", ""),
            *("--active-decode-blocks-threshold", "0", "--active-prefill-tokens-threshold", "0"),
            *("--active-prefill-tokens-threshold-frac", "0"),
        )
    )
    with server.held("one", PROMPT_50):
        assert server.status("one") == 200

    assert json.loads(server.server.request("GET", "/busy_threshold")[2]) == {"thresholds": []}
    status, _, body = server.server.request("POST", "/busy_threshold", {"model": "one"})
    assert (status, "--admission-control token-capacity" in body.decode()) == (409, True)


def test_flags_arm_the_thresholds_and_the_status_is_configurable(serve: Callable[..., Any]) -> None:
    server = Overloaded(
        serve(
            CONFIG.replace("admission: {use: token-capacity}", ""),
            *("--admission-control", "token-capacity", "--active-prefill-tokens-threshold", "0"),
            env={"DYN_HTTP_OVERLOAD_STATUS_CODE": "529", "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.9"},
        )
    )
    with server.held("stuck", "a"):
        status, headers, body = server.server.request("POST", "/v1/completions", completion("stuck"))
    listed = json.loads(server.server.request("GET", "/busy_threshold")[2])["thresholds"]

    assert (status, json.loads(body)["code"], "retry-after" in headers) == (529, 529, True)
    assert [entry["model"] for entry in listed] == MODELS
    assert {entry["active_decode_blocks_threshold"] for entry in listed} == {0.9}


@pytest.mark.parametrize(
    ("words", "env", "fault"),
    [
        (["--active-decode-blocks-threshold", "1.5"], {}, "must be at most 1, got 1.5"),
        (["--active-prefill-tokens-threshold", "-1"], {}, "must be at least 0, got -1"),
        ([], {"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "-0.5"}, "must be at least 0, got -0.5"),
        (["--engine-request-limit", "0"], {}, "must be at least 1, got 0"),
        ([], {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "1"}, "must be at least 2, got 1"),
        ([], {"DYN_HTTP_OVERLOAD_STATUS_CODE": "500"}, "expected 503, 529 or 429, got '500'"),
    ],
)
def test_a_setting_that_cannot_be_ends_the_start(
    dynamo: Callable[..., Result], words: list[str], env: dict[str, str], fault: str
) -> None:
    done = dynamo("check", *words, env=env)

    assert done.exit_code == 2
    assert fault in done.stderr
    assert (words or list(env))[0] in done.stderr


# Two sides.


def test_tokens_bound_the_prefill_workers(house: Overloaded) -> None:
    model = "prompts"
    house.set(model, tokens=800)
    with house.held(model, "a" * 800):
        # Not over it yet: one more token is let in.
        with house.held(model, "a"):
            refused = house.status(model)
        house.set(model, tokens=801)
        with house.held(model, "a"):
            assert refused == 503


def test_the_block_threshold_measures_the_decode_workers_only(house: Overloaded) -> None:
    with house.held("answers", PROMPT_50):
        house.blocks(50)

        # The prefill worker could hold four times as much.
        assert house.statuses("answers", blocks=(0.5, 0.49)) == [200, 503]


# Several frontends.

APART = """
transport: {{use: tcp}}
discovery: {{use: file, path: "{folder}", ttl: 2}}
client: {{drain_grace: 0}}
admission: {{use: token-capacity}}
workers:
  mock:
    model: {{name: m}}
    engine: {{use: mocker, fixed_itl_ms: 20, block_size: 16, num_gpu_blocks: 1000}}
    system_port: {port}
    grace_period: 0
"""


def test_a_change_at_either_frontend_counts_at_both_under_load_and_loses_nothing(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    config = APART.format(folder=tmp_path / "discovery", port=free_port())
    serve(config, "--only", "workers.mock", ready="health and metrics of this process are")
    both = [Overloaded(serve(config, command="frontend")) for _ in range(2)]
    bodies: list[tuple[int, bytes]] = []
    stop = threading.Event()

    def load(house: Overloaded) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "ignore_eos": True}
        while not stop.is_set():
            status, _, answer = house.server.request("POST", "/v1/chat/completions", body)
            bodies.append((status, answer))

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(load, house) for house in both for _ in range(4)]
        try:
            for turn in range(2):
                changed, other = both[turn % 2], both[(turn + 1) % 2]
                tight = turn % 2 == 0
                wanted = changed.set("m", blocks=0 if tight else 0.9, tokens=turn)
                assert other.server.until(lambda: other.set("m") == wanted, 5)  # noqa: B023 - used in this turn only
                assert changed.set("m") == wanted
                before = [house.server.metric(REJECTIONS) for house in both]
                if tight:
                    # Each of them refuses, whoever was told.
                    for house, count in zip(both, before, strict=True):
                        assert house.server.until(lambda: house.server.metric(REJECTIONS) > count, 10)  # noqa: B023
        finally:
            stop.set()
        for client in clients:
            client.result(90)

    assert {status for status, _ in bodies} == {200, 503}
    whole = [json.loads(answer) for status, answer in bodies if status == 200]
    assert {answer["usage"]["completion_tokens"] for answer in whole} == {10}
    assert all(json.loads(answer)["message"] == BUSY for status, answer in bodies if status == 503)


# The worker's own limit.

CAPPED = """
workers:
  mock:
    model: {name: m}
    engine: {use: mocker, fixed_itl_ms: 400}
"""


def together(server: Any, count: int, model: str = "m", **more: Any) -> list[int]:
    """Return the statuses of so many requests that are sent at once, each of three steps.

    All arrive within the first.
    """
    body = completion(model, max_tokens=3, ignore_eos=True, **more)
    ready = threading.Barrier(count)

    def ask(_: int) -> int:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
        with connection:
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
            ready.wait(90)
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
            return int(connection.recv(65536).split()[1])

    with ThreadPoolExecutor(count) as pool:
        return sorted(pool.map(ask, range(count)))


FULL = pytest.mark.full
BROKERS: dict[str, type[Nats | Redis]] = {"nats": Nats, "redis": Redis}


@pytest.mark.parametrize(
    ("transport", "engine", "queue"),
    [
        ("inproc", 1, 2),
        pytest.param("inproc", 2, 3, marks=FULL),
        pytest.param("tcp", 1, 2, marks=FULL),
        pytest.param("tcp", 2, 3, marks=FULL),
        pytest.param("nats", 1, 2, marks=FULL),
        pytest.param("nats", 2, 3, marks=FULL),
        pytest.param("redis", 1, 2, marks=FULL),
        pytest.param("redis", 2, 3, marks=FULL),
    ],
)
def test_a_worker_takes_exactly_its_limit_and_its_queue(
    serve: Callable[..., Any], tmp_path: Path, transport: str, engine: int, queue: int
) -> None:
    config = CAPPED
    with ExitStack() as stack:
        if transport != "inproc":
            config += f'discovery: {{use: file, path: "{tmp_path / "discovery"}"}}\nclient: {{drain_grace: 0}}\n'
        if transport == "tcp":
            config += "transport: {use: tcp}\n"
        elif transport in BROKERS:
            broker = stack.enter_context(BROKERS[transport](tmp_path))
            where = f'servers: ["{broker.url}"]' if transport == "nats" else f'url: "{broker.url}"'
            config += f"transport: {{use: {transport}, {where}}}\n"
        limits = {"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": str(queue), "DYN_ENGINE_REQUEST_LIMIT": str(engine)}
        server = serve(config, env=limits)

        statuses = together(server, 6)

        served = engine + queue
        assert statuses == [200] * served + [503] * (6 - served)
        if transport == "inproc":
            assert server.until(lambda: server.metric("dynamo_rejection_request_total") == 6 - served, 5)
            assert server.until(lambda: server.metric("dynamo_engine_request") == 0, 5)
            assert server.metric("dynamo_request_queue") == 0
            assert server.metric(REJECTIONS, endpoint="completions", model="m") == 6 - served
        server.end()


def test_gauges_show_a_worker_at_its_limit(house: Overloaded) -> None:
    server, streamed = house.server, completion("capped", stream=True)

    def metric(name: str) -> float:
        value: float = server.metric(name, worker="capped-0")
        return value

    rejected = metric("dynamo_rejection_request_total")
    connections = [server.raw("POST", "/v1/completions", streamed) for _ in range(3)]

    assert server.until(lambda: metric("dynamo_request_queue") == 2, 10)
    assert metric("dynamo_engine_request") == 1
    assert metric("dynamo_rejection_request_total") == rejected
    # The queue takes 16 unless it is told otherwise.
    connections += [server.raw("POST", "/v1/completions", streamed) for _ in range(14)]
    assert server.until(lambda: metric("dynamo_request_queue") == 16, 10)
    status, headers, body = server.request("POST", "/v1/completions", completion("capped"))
    assert (status, json.loads(body)["message"], "retry-after" in headers) == (503, BUSY, True)
    for connection in connections:
        connection.close()
    assert server.until(lambda: metric("dynamo_engine_request") == 0, 20)


@pytest.mark.parametrize("queue_alone", [False, True], ids=["nothing", "the queue alone"])
def test_without_an_engine_limit_a_worker_refuses_no_request(
    house: Overloaded, serve: Callable[..., Any], queue_alone: bool
) -> None:
    server, model = house.server, "one"
    if queue_alone:
        server, model = serve(CAPPED.replace("400", "50"), env={"DYN_DYNAMO_REQUEST_QUEUE_LIMIT": "2"}), "m"

    assert together(server, 20, model) == [200] * 20
    assert server.metric("dynamo_rejection_request_total", worker="mock-0" if queue_alone else "one-0") == 0


def test_a_worker_that_is_full_leaves_its_requests_to_another(house: Overloaded) -> None:
    server = house.server

    def refusals_of_the_small_one() -> float:
        count: float = server.metric("dynamo_rejection_request_total", worker="small-0")
        return count

    before, refused = refusals_of_the_small_one(), server.metric(REJECTIONS, model="unequal")

    assert together(server, 12, "unequal") == [200] * 12
    # Half of them were for the small one. How many of these it refused depends on how close together they came; that it
    # is passed over for a while is shown in runtime/tests/dispatch/test_worker_pool.py.
    assert server.until(lambda: refusals_of_the_small_one() > before, 5)
    assert server.metric(REJECTIONS, model="unequal") == refused


# The router's queue.


def test_requests_wait_at_the_router_with_any_admission(serve: Callable[..., Any]) -> None:
    server = serve(
        CAPPED.replace("400", "1500"),
        *("--router-mode", "kv", "--router-queue-threshold", "0", "--admission-control", "none"),
    )
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(together, server, 2)

        # The worker has a prompt to compute, so that the other one waits, and is not refused.
        waiting = server.until(lambda: server.metric("dynamo_frontend_router_queue_pending_requests") == 1, 20)

        assert (waiting, asked.result(60)) == (True, [200, 200])
    assert server.metric(REJECTIONS) == 0


def test_the_queue_limit_has_no_flag(dynamo: Callable[..., Result]) -> None:
    told = dynamo("serve", "--help").stdout

    assert "--engine-request-limit" in told
    assert "--active-decode-blocks-threshold" in told
    assert "queue-limit" not in told
