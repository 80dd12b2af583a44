"""The slot tracker as a process of its own: everything that its page promises, asked for over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_testing.ports import free_port

DEADLINE = 60.0
MODULE = "dynamo_plugin_router_slot_tracker"
OK = {"status": "ok"}
TOKEN = "a-token-that-is-long-enough"

names = (f"model-{number}" for number in count())


def resident(tracker: Tracker) -> int:
    """Return the kilobytes of memory that the process has."""
    status = Path(f"/proc/{tracker.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


class Tracker:
    """A running service. Without other options it listens on a free port of the loopback."""

    def __init__(self, *options: str, ready: str = "ready for requests", trust: ssl.SSLContext | None = None) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DYN_", "SLOT_TRACKER_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *(options or ("--host", "127.0.0.1", "--port", "0"))],
            env=kept | {"PYTHONUNBUFFERED": "1"},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._trust = trust
        self._lines: list[str] = []
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(self.found(ready + r" at https?://[\d.]+:(\d+)"))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grown:
                self._lines.append(line)
                self._grown.notify_all()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def found(self, pattern: str) -> str:
        """What the pattern's group matches in the log, once it does."""
        with self._grown:
            matched = self._grown.wait_for(
                lambda: re.search(pattern, self.log) or self.process.poll() is not None, DEADLINE
            )
        match = re.search(pattern, self.log)
        if match is None:
            self.end()
            pytest.fail(f"{pattern!r} is not in the log ({matched}):\n{self.log}")
        return match[1]

    @property
    def sync(self) -> str:
        """The endpoint on which replicas are told."""
        return self.found(r"replicas are told at (tcp://\S+)")

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        status, _, data = self.exchange(method, path, body, raw=raw, **headers)
        return status, json.loads(data) if data else None

    def exchange(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        if self._trust is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE, context=self._trust)
        try:
            data = raw if body is None else json.dumps(body).encode()
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json"} | given)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def get(self, path: str) -> Any:
        status, body = self.ask("GET", path)
        assert status == 200
        return body

    def register(self, model: str, worker_id: int = 7, **more: Any) -> tuple[int, Any]:
        facts = {"block_size": 16, "dp_start": 0, "dp_size": 1} | more
        return self.post("/register", worker_id=worker_id, model_name=model, **facts)

    def add(self, model: str, request_id: str = "req", hashes: Any = (), **more: Any) -> tuple[int, Any]:
        where = {"worker_id": 7, "dp_rank": 0} | more
        return self.post("/add", model_name=model, request_id=request_id, sequence_hashes=list(hashes), **where)

    def load(self, model: str) -> tuple[int, int]:
        """Prefill tokens and decode blocks of the one rank of a model."""
        [load] = self.get(f"/loads?model_name={model}")
        return load["active_prefill_tokens"], load["active_decode_blocks"]

    def potential(self, model: str, hashes: list[int], **more: Any) -> dict[tuple[int, int], dict[str, int]]:
        status, loads = self.post("/potential_loads", model_name=model, sequence_hashes=hashes, **more)
        assert status == 200
        return {(load["worker_id"], load["dp_rank"]): load for load in loads}

    def blocks(self, model: str, hashes: list[int]) -> int:
        return self.potential(model, hashes)[7, 0]["potential_decode_blocks"]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends the process; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5)
        finally:
            self._reader.join(5)
            assert self.process.stderr is not None
            self.process.stderr.close()


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """Returns once the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


Start = Callable[..., Tracker]


def _trackers() -> Iterator[Start]:
    running: list[Tracker] = []

    def start(*options: str, **how: Any) -> Tracker:
        running.append(Tracker(*options, **how))
        return running[-1]

    yield start
    codes = [tracker.end() for tracker in running if tracker.process.poll() is None]
    assert not any(codes), [tracker.log for tracker in running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts services that live as long as the test."""
    yield from _trackers()


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    """One service for all tests of the module, each with a model of its own."""
    for start in _trackers():
        yield start()


#: What the service `synced` is told at its start, in another order.
PEERS = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


@pytest.fixture(scope="module")
def synced() -> Iterator[Tracker]:
    """One service with synchronization, two peers that are not there, and no worker."""
    for start in _trackers():
        yield start(
            *local(*SYNC, "--replica-sync-advertise", "tcp://slot-tracker-a:8092"),
            *("--replica-sync-peers", ", ".join(reversed(PEERS))),
        )


@pytest.fixture(scope="module")
def three() -> Iterator[list[Tracker]]:
    """Three services with synchronization, which do not listen to each other but within a test."""
    for start in _trackers():
        yield [start(*local(*SYNC, "--metrics")) for _ in range(3)]


@pytest.fixture
def pair(three: list[Tracker]) -> Iterator[tuple[Tracker, Tracker]]:
    """A service that tells, and one that listens to it."""
    teller, listener, _ = three
    with listening(listener, teller):
        yield teller, listener


@pytest.fixture
def model(tracker: Tracker) -> str:
    """A model with worker 7, which has one rank."""
    name = next(names)
    assert tracker.register(name) == (201, OK)
    return name


def local(*options: str) -> tuple[str, ...]:
    return ("--host", "127.0.0.1", "--port", "0", *options)


SYNC = ("--replica-sync-bind", "tcp://127.0.0.1:*")


def listens(listener: Tracker, teller: Tracker) -> None:
    """Registers a peer, and returns once what it tells arrives: connections of ZMQ come about behind the back."""
    assert listener.post("/register_peer", url=teller.sync)[0] in (200, 201)
    probe = next(names)
    for one in (listener, teller):
        assert one.register(probe) == (201, OK)

    def heard() -> bool:
        assert teller.add(probe, next(names), [1])[0] == 201
        return listener.load(probe) != (0, 0)

    until(heard)


def known_to(*trackers: Tracker) -> str:
    """A model with worker 7 at each of these services."""
    model = next(names)
    for tracker in trackers:
        assert tracker.register(model) == (201, OK)
    return model


@contextmanager
def listening(listener: Tracker, teller: Tracker) -> Iterator[None]:
    """What the one tells arrives at the other within the block."""
    listens(listener, teller)
    try:
        yield
    finally:
        listener.post("/deregister_peer", url=teller.sync)


# The process.


def test_it_runs_without_any_other_service(tracker: Tracker) -> None:
    sockets = Path(f"/proc/{tracker.process.pid}/net/tcp")
    inodes = {
        target[8:-1]
        for descriptor in Path(f"/proc/{tracker.process.pid}/fd").iterdir()
        if (target := os.readlink(descriptor)).startswith("socket:[")
    }
    rows = [line.split() for line in sockets.read_text().splitlines()[1:]]
    own = [row for row in rows if row[9] in inodes]

    # It listens; it has no connection to anybody but those that asked it.
    assert [row[3] for row in own if row[3] == "0A"] == ["0A"]
    assert all(row[1].endswith(f":{tracker.port:04X}") for row in own)


def test_it_binds_all_addresses_on_8091_unless_told_otherwise() -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8091)) == 0:
            pytest.skip("something else listens on 8091")
    tracker = Tracker("--log-level", "info")
    try:
        assert tracker.port == 8091
        assert "open to the network on 0.0.0.0:8091" in tracker.log
        assert tracker.exchange("GET", "/health")[0] == 200
        assert tracker.register("m") == (201, OK)
    finally:
        assert tracker.end(signal.SIGINT) == 0


def test_the_port_can_be_chosen_and_a_taken_one_is_told_in_one_line(tracker: Tracker) -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--host", "127.0.0.1", "--port", str(tracker.port)],
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip

    assert done.returncode == 2
    assert "the port is in use; end the process that holds it, or choose another port with --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_a_command_of_dynamo_too(dynamo: Callable[..., Result]) -> None:
    done = dynamo("slot-tracker", "--help")

    assert done.exit_code == 0
    assert all(f"--replica-sync-{name}" in done.stdout for name in ("bind", "advertise", "peers"))


def test_health_has_an_empty_body_and_is_about_liveness_only(synced: Tracker) -> None:
    status, _, body = synced.exchange("GET", "/health")

    assert synced.get("/workers") == []
    assert (status, body) == (200, b"")


def test_ctrl_c_ends_it_in_order_and_the_registry_is_empty_after_a_restart(start: Start) -> None:
    place = ("--host", "127.0.0.1", "--port", str(free_port()))
    first = start(*place)
    assert first.register("m") == (201, OK)
    assert first.add("m") == (201, OK)
    assert first.end(signal.SIGINT) == 0

    second = start(*place)

    assert second.get("/workers") == []
    assert second.get("/loads") == []


def test_a_request_that_nobody_frees_expires(start: Start) -> None:
    tracker = start(*local("--expiry", "1"))
    tracker.register("m")
    assert tracker.add("m", "old", [1, 2], new_isl_tokens=5) == (201, OK)

    until(lambda: tracker.load("m") == (0, 0))

    # It may come again.
    assert tracker.add("m", "old") == (201, OK)


# Workers.


def test_a_worker_is_registered_once(tracker: Tracker) -> None:
    name = next(names)

    assert tracker.register(name, dp_size=2) == (201, OK)
    assert tracker.register(name, dp_start=2, dp_size=2) == (
        409,
        {"error": f"worker 7 already registered for model={name} tenant_id=default"},
    )
    assert [load["dp_rank"] for load in tracker.get(f"/loads?model_name={name}")] == [0, 1]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"block_size": 0}, "block_size must be greater than 0"),
        ({"dp_size": 0}, "dp_size must be greater than 0"),
        ({"dp_start": 4294967295, "dp_size": 1}, "dp range overflows u32: start=4294967295 size=1"),
        # What is wrong with the sizes comes first.
        ({"block_size": 0, "dp_size": 0, "dp_start": 4294967295}, "block_size must be greater than 0"),
    ],
)
def test_sizes_and_range_of_a_worker_are_checked(tracker: Tracker, facts: dict[str, int], text: str) -> None:
    name = next(names)

    assert tracker.register(name, **facts) == (400, {"error": text})
    assert tracker.get(f"/workers?model_name={name}") == []


def test_the_last_ranks_of_all_can_be_registered(tracker: Tracker) -> None:
    name = next(names)

    assert tracker.register(name, dp_start=4294967293, dp_size=2) == (201, OK)
    assert [load["dp_rank"] for load in tracker.get(f"/loads?model_name={name}")] == [4294967293, 4294967294]


def test_more_ranks_than_can_be_held_are_refused(tracker: Tracker) -> None:
    status, body = tracker.register(next(names), dp_size=4294967295)

    assert status == 400
    assert body["error"].startswith("dp_size 4294967295 is too large")


def test_bounds_on_tenants_and_hashes_are_400(start: Start) -> None:
    tracker = start(*local("--max-trackers", "2", "--max-hashes", "3"))
    for tenant in ("a", "b"):
        assert tracker.register("m", tenant_id=tenant) == (201, OK)

    status, body = tracker.register("m", tenant_id="c")
    assert (status, "at most 2 pairs of model and tenant" in body["error"]) == (400, True)

    for answer in (
        tracker.add("m", "r", range(4), tenant_id="a"),
        tracker.post("/potential_loads", model_name="m", tenant_id="a", sequence_hashes=[1] * 4),
    ):
        assert (answer[0], "sequence_hashes has 4 entries: at most 3" in answer[1]["error"]) == (400, True)
    assert tracker.add("m", "r", range(3), tenant_id="a") == (201, OK)


def test_memory_is_bounded_however_much_is_added(start: Start) -> None:
    tracker = start(*local("--max-held", "200000"))
    for tenant in ("flood", "other"):
        assert tracker.register("m", tenant_id=tenant) == (201, OK)

    def add(number: int) -> tuple[int, Any]:
        return tracker.add("m", f"r{number}", range(number * 2**40, number * 2**40 + 90_000), tenant_id="flood")

    assert add(1) == (201, OK)
    held = resident(tracker)
    refused = [add(number) for number in range(2, 20)]

    assert {status for status, _ in refused} == {429}
    key = {"model_name": "m", "tenant_id": "flood", "worker_id": 7, "dp_rank": 0}
    hashes = list(range(90_000))
    assert (
        tracker.exchange("POST", "/add", {**key, "request_id": "r", "sequence_hashes": hashes})[1]["retry-after"] == "1"
    )
    assert "--max-held" in refused[0][1]["error"]
    assert resident(tracker) < 2 * held
    assert tracker.add("m", "r", range(1000), tenant_id="other") == (201, OK)


def test_a_body_full_of_small_hashes_is_refused_unless_the_bound_is_raised(tracker: Tracker, model: str) -> None:
    status, body = tracker.add(model, "r", [1] * 200_000)

    assert (status, "at most 131072 are taken" in body["error"]) == (400, True)
    # Hashes as they are, of 64 bits: more than these do not fit into a body.
    assert tracker.add(model, "r", range(2**62, 2**62 + 90_000)) == (201, OK)


def test_workers_of_a_model_and_tenant_have_one_block_size(tracker: Tracker, model: str) -> None:
    assert tracker.register(model, 8, block_size=32) == (
        409,
        {"error": f"block_size mismatch for model={model} tenant_id=default: existing=16, requested=32"},
    )
    # Another tenant is another matter.
    assert tracker.register(model, 8, block_size=32, tenant_id="other") == (201, OK)


def test_worker_ids_are_scoped_by_model_and_tenant(tracker: Tracker, model: str) -> None:
    assert tracker.register(model, 7, tenant_id="other") == (201, OK)
    assert tracker.register(next(names), 7) == (201, OK)

    assert tracker.add(model, "r", [1, 2], tenant_id="other") == (201, OK)

    loads = tracker.get(f"/loads?model_name={model}")
    assert [(load["tenant_id"], load["active_decode_blocks"]) for load in loads] == [("default", 0), ("other", 2)]


def test_the_tenant_is_default_unless_given(tracker: Tracker, model: str) -> None:
    assert [worker["tenant_id"] for worker in tracker.get(f"/workers?model_name={model}")] == ["default"]


def test_unregistering_removes_the_range_and_its_requests_at_once(tracker: Tracker) -> None:
    name = next(names)
    tracker.register(name, dp_size=2)
    tracker.register(name, 8)
    for rank in (0, 1):
        assert tracker.add(name, f"r{rank}", [1, 2], dp_rank=rank, new_isl_tokens=9)[0] == 201

    assert tracker.post("/unregister", worker_id=7, model_name=name) == (200, OK)

    assert [load["worker_id"] for load in tracker.get(f"/loads?model_name={name}")] == [8]
    assert tracker.register(name, dp_size=2) == (201, OK)
    loads = tracker.get(f"/loads?model_name={name}")
    assert {(load["active_prefill_tokens"], load["active_decode_blocks"]) for load in loads} == {(0, 0)}
    # The ids are free again.
    assert tracker.add(name, "r0") == (201, OK)


def test_unregistering_who_is_not_there_is_404(tracker: Tracker, model: str) -> None:
    for name in (model, next(names)):
        assert tracker.post("/unregister", worker_id=70, model_name=name) == (
            404,
            {"error": f"worker 70 not found for model={name} tenant_id=default"},
        )


def test_workers_have_the_documented_fields_and_are_sorted(tracker: Tracker) -> None:
    a, b = (next(names) for _ in range(2))
    # As texts are sorted, whatever their numbers.
    a, b = sorted((a, b))
    for name, tenant, worker in ((b, "t", 1), (b, "a", 2), (a, "t", 10), (a, "t", 9)):
        assert tracker.register(name, worker, tenant_id=tenant, dp_size=2)[0] == 201

    def rows(path: str, *fields: str) -> list[tuple[Any, ...]]:
        """Those of all models, and of these two."""
        listed = tracker.get(path)
        everything = [tuple(one[field] for field in fields) for one in listed]
        assert everything == sorted(everything)
        return [row for row in everything if row[0] in (a, b)]

    assert {
        "worker_id": 9, "model_name": a, "tenant_id": "t", "block_size": 16, "dp_start": 0, "dp_size": 2,
    } in tracker.get("/workers")  # fmt: skip
    assert rows("/workers", "model_name", "tenant_id", "worker_id") == [
        (a, "t", 9), (a, "t", 10), (b, "a", 2), (b, "t", 1),
    ]  # fmt: skip
    assert rows("/loads", "model_name", "tenant_id", "worker_id", "dp_rank") == [
        (a, "t", 9, 0), (a, "t", 9, 1), (a, "t", 10, 0), (a, "t", 10, 1),
        (b, "a", 2, 0), (b, "a", 2, 1), (b, "t", 1, 0), (b, "t", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/workers", "/loads"])
def test_filters_are_independent(tracker: Tracker, path: str) -> None:
    own = next(names)
    for name in ("a", "b"):
        for tenant in ("x", "y"):
            tracker.register(f"{own}-{name}", tenant_id=f"{own}-{tenant}")

    def listed(query: str) -> list[str]:
        """Model and tenant of the workers of this test."""
        return [
            one["model_name"][-1] + one["tenant_id"][-1]
            for one in tracker.get(path + query.replace("=", f"={own}-"))
            if one["model_name"].startswith(f"{own}-")
        ]

    assert listed("") == ["ax", "ay", "bx", "by"]
    assert listed("?model_name=a") == ["ax", "ay"]
    assert listed("?tenant_id=y") == ["ay", "by"]
    assert listed("?model_name=b&tenant_id=x&other=1") == ["bx"]
    assert tracker.get(f"{path}?model_name=nope") == []
    assert tracker.ask("GET", f"{path}?tenant_id=x&tenant_id=y") == (
        400,
        {"error": "Failed to deserialize query string: duplicate field `tenant_id`"},
    )


# Requests.


def test_an_added_request_counts_until_it_is_freed(tracker: Tracker, model: str) -> None:
    assert tracker.add(model, "r", [101, -22, 303], new_isl_tokens=48) == (201, OK)
    assert tracker.load(model) == (48, 3)

    assert tracker.post("/prefill_complete", model_name=model, request_id="r") == (200, OK)
    assert tracker.load(model) == (0, 3)

    assert tracker.post("/free", model_name=model, request_id="r") == (200, OK)
    assert tracker.load(model) == (0, 0)


def test_freeing_releases_what_is_left_to_prefill(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [1], new_isl_tokens=48)

    assert tracker.post("/free", model_name=model, request_id="r") == (200, OK)

    assert tracker.load(model) == (0, 0)


def test_hashes_must_be_given_and_may_be_none(tracker: Tracker, model: str) -> None:
    body = {"model_name": model, "request_id": "r", "worker_id": 7, "dp_rank": 0}

    status, error = tracker.post("/add", **body)

    assert (status, "missing field `sequence_hashes`" in error["error"]) == (422, True)
    assert tracker.add(model, "r", []) == (201, OK)
    assert tracker.potential(model, [])[7, 0]["active_requests"] == 1


def test_hashes_are_all_signed_64_bit_numbers(tracker: Tracker, model: str) -> None:
    ends = [-1, -(2**63), 2**63 - 1, 0]
    assert tracker.add(model, "r", ends) == (201, OK)

    assert tracker.blocks(model, ends) == 4
    for outside in (2**63, -(2**63) - 1, 2**64 - 1):
        assert tracker.add(model, "other", [outside])[0] == 422


def test_a_prefix_is_shared_and_what_comes_after_it_is_not(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [101, -22, 303])

    assert tracker.blocks(model, [101, -22, 303, 404]) == 4
    assert tracker.blocks(model, [-22, 101]) == 5
    assert tracker.blocks(model, [101, 303]) == 4
    assert tracker.blocks(model, [101, 5, 303]) == 5
    assert tracker.blocks(model, [5, 101]) == 5
    assert tracker.blocks(model, []) == 3


def test_tokens_are_none_unless_given_and_then_count(tracker: Tracker, model: str) -> None:
    tracker.add(model, "a", [1])
    assert tracker.load(model) == (0, 1)

    tracker.add(model, "b", [1], new_isl_tokens=30)
    tracker.add(model, "c", [1], new_isl_tokens=12)
    assert tracker.load(model) == (42, 1)


def test_an_id_is_taken_while_its_request_is_active(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [1])

    assert tracker.add(model, "r", [2]) == (
        409,
        {"error": "Request r already exists (assigned to worker WorkerWithDpRank { worker_id: 7, dp_rank: 0 })"},
    )
    # Whoever repeats an /add whose answer was lost learns that it was taken, and it counts once.
    assert tracker.load(model) == (0, 1)


def test_unknown_models_and_ranks_are_404(tracker: Tracker, model: str) -> None:
    unknown = next(names)
    nobody = {"error": f"no slot tracker for model={unknown} tenant_id=default"}

    assert tracker.add(unknown) == (404, nobody)
    assert tracker.post("/prefill_complete", model_name=unknown, request_id="r") == (404, nobody)
    assert tracker.post("/free", model_name=unknown, request_id="r") == (404, nobody)
    assert tracker.post("/potential_loads", model_name=unknown, sequence_hashes=[]) == (404, nobody)
    assert tracker.add(model, worker_id=99) == (
        404,
        {"error": "Worker WorkerWithDpRank { worker_id: 99, dp_rank: 0 } not found"},
    )
    assert tracker.add(model, dp_rank=1)[0] == 404
    assert tracker.add(model, tenant_id="other")[0] == 404


def test_completing_again_changes_nothing_and_an_unknown_request_is_404(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [1], new_isl_tokens=5)

    for _ in range(2):
        assert tracker.post("/prefill_complete", model_name=model, request_id="r") == (200, OK)
        assert tracker.load(model) == (0, 1)
    assert tracker.post("/prefill_complete", model_name=model, request_id="nope") == (
        404,
        {"error": "Request nope not found"},
    )


def test_free_may_be_repeated_and_may_name_an_unknown_request(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [1])

    for request_id in ("r", "r", "nope"):
        assert tracker.post("/free", model_name=model, request_id=request_id) == (200, OK)
    assert tracker.load(model) == (0, 0)


def test_what_comes_before_its_add_is_forgotten(tracker: Tracker, model: str) -> None:
    assert tracker.post("/free", model_name=model, request_id="late") == (200, OK)
    assert tracker.post("/prefill_complete", model_name=model, request_id="late")[0] == 404

    tracker.add(model, "late", [1, 2], new_isl_tokens=5)

    assert tracker.load(model) == (5, 2)


# Loads.


def test_blocks_of_a_common_prefix_count_once(tracker: Tracker, model: str) -> None:
    tracker.add(model, "a", [1, 2, 3])
    tracker.add(model, "b", [1, 2, 4, 5])
    assert tracker.load(model) == (0, 5)

    tracker.post("/free", model_name=model, request_id="a")

    assert tracker.load(model) == (0, 4)


def test_a_repeated_hash_of_one_request_counts_once(tracker: Tracker, model: str) -> None:
    assert tracker.blocks(model, [5, 5, 5]) == 1

    tracker.add(model, "r", [5, 5, 5])

    assert tracker.load(model) == (0, 1)


def test_loads_have_the_documented_fields(tracker: Tracker, model: str) -> None:
    tracker.add(model, "r", [101, -22, 303], new_isl_tokens=48)

    assert tracker.get(f"/loads?model_name={model}") == [
        {
            "model_name": model, "tenant_id": "default", "worker_id": 7, "dp_rank": 0,
            "active_prefill_tokens": 48, "active_decode_blocks": 3,
        }
    ]  # fmt: skip


def test_projections_are_those_of_the_document(tracker: Tracker, model: str) -> None:
    tracker.register(model, 8, dp_start=4, dp_size=2)
    tracker.add(model, "r", [101, -22, 303], new_isl_tokens=48)

    loads = tracker.potential(model, [101, -22, 303, 404], new_isl_tokens=48)

    assert loads[7, 0] == {
        "worker_id": 7, "dp_rank": 0,
        "potential_prefill_tokens": 96, "potential_decode_blocks": 4, "active_requests": 1,
    }  # fmt: skip
    # Every rank is there, in whatever order.
    assert loads.keys() == {(7, 0), (8, 4), (8, 5)}
    assert loads[8, 4]["potential_prefill_tokens"] == 48
    assert loads[8, 4]["potential_decode_blocks"] == 4
    assert loads[8, 4]["active_requests"] == 0


def test_active_requests_are_those_that_are_active_now(tracker: Tracker, model: str) -> None:
    for number in range(3):
        tracker.add(model, f"r{number}", [1, 2])
        assert tracker.potential(model, [])[7, 0]["active_requests"] == number + 1
    tracker.post("/free", model_name=model, request_id="r1")
    assert tracker.potential(model, [])[7, 0]["active_requests"] == 2


def test_a_projection_reserves_nothing(tracker: Tracker, model: str) -> None:
    first = tracker.potential(model, [1, 2, 3], new_isl_tokens=10)

    assert tracker.potential(model, [1, 2, 3], new_isl_tokens=10) == first
    assert tracker.load(model) == (0, 0)


def test_a_worker_may_be_gone_between_projection_and_add(tracker: Tracker, model: str) -> None:
    tracker.register(model, 8)
    assert tracker.potential(model, [1]).keys() == {(7, 0), (8, 0)}
    tracker.post("/unregister", worker_id=7, model_name=model)

    assert tracker.add(model, "r", [1])[0] == 404

    assert tracker.potential(model, [1]).keys() == {(8, 0)}
    assert tracker.add(model, "r", [1], worker_id=8) == (201, OK)


def test_a_worker_may_be_named_by_the_text_that_other_surfaces_show(tracker: Tracker) -> None:
    """An operator copies it from `/health`; answers have the number, as the document says."""
    model, text = next(names), "7f00000000000001"
    where = {"model_name": model, "tenant_id": "default"}
    ranks = {"block_size": 16, "dp_start": 0, "dp_size": 1}

    assert tracker.post("/register", worker_id=text, **where, **ranks) == (201, OK)
    assert tracker.post("/register", worker_id=int(text, 16), **where, **ranks)[0] == 409
    assert tracker.add(model, "r", [1], worker_id=text) == (201, OK)
    assert {rank for rank, _ in tracker.potential(model, [1])} == {int(text, 16)}
    assert tracker.post("/unregister", worker_id=text.upper(), **where) == (200, OK)


# Errors.


def test_malformed_json_is_400(tracker: Tracker) -> None:
    status, body = tracker.ask("POST", "/add", raw=b'{"model_name": ')

    assert status == 400
    assert body == {"error": "Failed to parse the request body as JSON: unexpected end of the text at line 1 column 15"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dp_start": None}, "dp_start: expected `int`, got `null`"),
        ({"worker_id": "7"}, "worker_id: expected `str` matching regex '^[0-9a-fA-F]{16}$'"),
        ({"worker_id": 1.0}, "worker_id: expected `int | str`, got `float`"),
        ({"worker_id": -1}, "worker_id: expected `int` >= 0"),
        ({"worker_id": 2**64}, "worker_id: expected `int` <= 18446744073709551615"),
        ({"block_size": 2**32}, "block_size: expected `int` <= 4294967295"),
        ({"tenant_id": None}, "tenant_id: expected `str`, got `null`"),
        ({"model_name": 1}, "model_name: expected `str`, got `int`"),
    ],
)
def test_a_wrong_value_is_422_and_named(tracker: Tracker, change: dict[str, Any], text: str) -> None:
    body = {"worker_id": 7, "model_name": next(names), "block_size": 16, "dp_start": 0, "dp_size": 2} | change

    status, error = tracker.post("/register", **body)

    assert status == 422
    assert re.fullmatch(
        re.escape(f"Failed to deserialize the JSON body into the target type: {text}") + r" at line 1 column \d+",
        error["error"],
    )


@pytest.mark.parametrize("field", ["worker_id", "model_name", "block_size", "dp_start", "dp_size"])
def test_a_missing_field_is_422_and_named(tracker: Tracker, field: str) -> None:
    body = {"worker_id": 7, "model_name": next(names), "block_size": 16, "dp_start": 0, "dp_size": 2}
    del body[field]

    status, error = tracker.post("/register", **body)

    assert (status, f"missing field `{field}` at line 1 column" in error["error"]) == (422, True)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/free", '{"model_name":"MODEL","request_id":"a","request_id":"b"}', "duplicate field `request_id`"),
        (
            "/potential_loads",
            '{"model_name":"MODEL","sequence_hashes":[1,-0]}',
            "sequence_hashes[1]: expected `int`, got `float`",
        ),
    ],
)
def test_a_repeated_field_and_minus_zero_are_422(tracker: Tracker, model: str, path: str, body: str, text: str) -> None:
    tracker.add(model, "a", [1])

    status, error = tracker.ask("POST", path, raw=body.replace("MODEL", model).encode())

    assert (status, text in error["error"]) == (422, True)
    assert tracker.load(model) == (0, 1)


def test_unknown_fields_are_ignored_and_a_model_may_have_no_name(tracker: Tracker) -> None:
    assert tracker.register("", more=1) == (201, OK)
    assert tracker.post("/unregister", worker_id=7, model_name="", more=1) == (200, OK)


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("", 415),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.of-somebody+json", 200),
    ],
)
def test_the_content_type_must_be_json(tracker: Tracker, model: str, content_type: str, status: int) -> None:
    body = json.dumps({"model_name": model, "request_id": "r"}).encode()

    answer = tracker.ask("POST", "/free", raw=body, content_type=content_type)

    assert answer == (
        status,
        OK if status == 200 else {"error": "Expected request with `Content-Type: application/json`"},
    )


def test_a_body_above_2_mib_is_413(tracker: Tracker, model: str) -> None:
    head = json.dumps({"model_name": model, "request_id": "r"}).encode()
    limit = 2 * 1024 * 1024

    assert tracker.ask("POST", "/free", raw=head.ljust(limit)) == (200, OK)
    assert tracker.ask("POST", "/free", raw=head.ljust(limit + 1)) == (
        413,
        {"error": "Failed to buffer the request body: length limit exceeded"},
    )


def test_unknown_routes_are_404_and_wrong_methods_405(tracker: Tracker) -> None:
    assert tracker.ask("GET", "/nope") == (404, {"error": "route not found"})
    assert tracker.ask("POST", "/add/") == (404, {"error": "route not found"})
    assert tracker.ask("GET", "/register") == (405, {"error": "method not allowed"})
    assert tracker.exchange("GET", "/register")[1]["allow"] == "POST"
    assert tracker.ask("DELETE", "/loads") == (405, {"error": "method not allowed"})


# Replicas.


def test_lifecycle_events_reach_a_replica(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    model = known_to(teller, listener)

    teller.add(model, "r", [101, -22, 303], new_isl_tokens=48)
    until(lambda: listener.load(model) == (48, 3))
    assert listener.blocks(model, [101, -22, 303, 404]) == 4
    teller.post("/prefill_complete", model_name=model, request_id="r")
    until(lambda: listener.load(model) == (0, 3))
    teller.post("/free", model_name=model, request_id="r")
    until(lambda: listener.load(model) == (0, 0))


def test_peers_are_directional(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    model = known_to(teller, listener)

    listener.add(model, "here", [1, 2])
    teller.add(model, "there", [3])
    until(lambda: listener.load(model) == (0, 3))

    assert teller.load(model) == (0, 1)
    assert teller.get("/peers") == []
    assert listener.get("/peers") == [teller.sync]


def test_three_replicas_that_all_listen_agree(three: list[Tracker]) -> None:
    with ExitStack() as stack:
        for one, other in permutations(three, 2):
            stack.enter_context(listening(one, other))
        agree_on_random_calls(three)


def agree_on_random_calls(three: Sequence[Tracker]) -> None:
    model = next(names)
    for one in three:
        for worker in range(4):
            assert one.register(model, worker)[0] == 201
    drawn = random.Random(8)
    active: list[tuple[Tracker, str]] = []
    for number in range(300):
        # Calls for one request stay with the replica that took it.
        if active and drawn.random() < 0.45:
            one, request_id = active.pop(drawn.randrange(len(active)))
            one.post("/free", model_name=model, request_id=request_id)
            continue
        one, request_id = drawn.choice(three), f"r{number}"
        hashes = list(range(drawn.randrange(8)))
        facts = {"worker_id": drawn.randrange(4), "new_isl_tokens": drawn.randrange(50)}
        assert one.add(model, request_id, hashes, **facts)[0] == 201
        active.append((one, request_id))
        if drawn.random() < 0.5:
            one.post("/prefill_complete", model_name=model, request_id=request_id)

    def loads(one: Tracker) -> Any:
        return one.get(f"/loads?model_name={model}")

    until(lambda: loads(three[0]) == loads(three[1]) == loads(three[2]))
    for one, request_id in active:
        one.post("/free", model_name=model, request_id=request_id)
    for one in three:
        until(lambda one=one: all(load["active_decode_blocks"] == 0 for load in loads(one)))  # type: ignore[misc]


def test_replicas_never_make_workers_and_drop_what_does_not_fit(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    # Unknown model; another block size; unknown worker; unknown rank; and one that fits, which comes last.
    unknown, sizes, workers, ranks, fits = (next(names) for _ in range(5))
    teller.register(unknown)
    teller.register(sizes)
    listener.register(sizes, block_size=32)
    teller.register(workers)
    listener.register(workers, 8)
    teller.register(ranks, dp_size=2)
    listener.register(ranks)
    teller.register(fits)
    listener.register(fits)
    for name in (unknown, sizes, workers):
        assert teller.add(name, "r", [1])[0] == 201
    assert teller.add(ranks, "r", [1], dp_rank=1)[0] == 201
    assert teller.add(fits, "r", [1])[0] == 201

    until(lambda: listener.load(fits) == (0, 1))

    assert listener.get(f"/workers?model_name={unknown}") == []
    for name in (sizes, workers, ranks):
        assert listener.load(name) == (0, 0)


def test_what_was_told_before_a_replica_listens_does_not_come(three: list[Tracker]) -> None:
    teller, listener, _ = three
    model = known_to(teller, listener)
    teller.add(model, "early", [1, 2])
    with listening(listener, teller):
        teller.add(model, "late", [3])
        until(lambda: listener.load(model) != (0, 0))

    assert listener.load(model) == (0, 1)


def test_calls_belong_to_the_replica_that_took_the_add(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    model = known_to(teller, listener)
    teller.add(model, "r", [1])
    until(lambda: listener.load(model) == (0, 1))

    # The other one forgets its own view of it; the first one is not told, as it does not listen.
    assert listener.post("/free", model_name=model, request_id="r") == (200, OK)

    assert listener.load(model) == (0, 0)
    assert teller.load(model) == (0, 1)


def test_a_replica_that_does_not_read_slows_nobody(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    model = next(names)
    teller.register(model)
    listener.process.send_signal(signal.SIGSTOP)
    try:
        for number in range(500):
            assert teller.add(model, f"r{number}", range(200)) == (201, OK)
        assert teller.potential(model, [])[7, 0]["active_requests"] == 500
    finally:
        listener.process.send_signal(signal.SIGCONT)


def test_peers_are_managed_while_it_runs(synced: Tracker) -> None:
    mine, other = "tcp://127.0.0.1:3", "tcp://slot-tracker-c:8092"

    # Nobody needs to be there.
    assert synced.post("/register_peer", url=other) == (201, OK)
    assert synced.post("/register_peer", url=mine) == (201, OK)
    assert synced.post("/register_peer", url=mine) == (200, OK)
    assert synced.get("/peers") == [*PEERS, mine, other]
    assert synced.post("/deregister_peer", url=mine) == (200, OK)
    assert synced.post("/deregister_peer", url=mine) == (404, {"error": "peer not found"})
    assert synced.get("/peers") == [*PEERS, other]
    assert synced.post("/deregister_peer", url=other) == (200, OK)


def test_a_peer_that_was_dropped_is_not_heard_any_more(pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = pair
    model = known_to(teller, listener)
    with listening(teller, listener):
        assert listener.post("/deregister_peer", url=teller.sync) == (200, OK)
        teller.add(model, "r", [1])
        # What goes the other way shows that time has passed.
        listener.add(model, "s", [2, 3])
        until(lambda: teller.load(model) == (0, 3))

    assert listener.load(model) == (0, 2)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://x:1", "invalid ZMQ endpoint `http://x:1`: unsupported scheme `http`"),
        ("x:1", "invalid ZMQ endpoint `x:1`: missing scheme"),
        ("tcp://x", "invalid ZMQ endpoint `tcp://x`: missing TCP port"),
        ("tcp://x:0", "invalid ZMQ endpoint `tcp://x:0`: invalid TCP port"),
        ("tcp://x/y:1", "invalid ZMQ endpoint `tcp://x/y:1`: invalid host"),
        ("ipc:///tmp/socket", "invalid ZMQ endpoint `ipc:///tmp/socket`: unsupported scheme `ipc`"),
        ("inproc://x", "invalid ZMQ endpoint `inproc://x`: unsupported scheme `inproc`"),
        ("tcp://*:9", "failed to register replica peer `tcp://*:9`"),
        ("tcp://slot-tracker-a:8092", "peer endpoint matches this replica's advertised endpoint"),
    ],
)
def test_an_endpoint_that_cannot_be_a_peers_is_400(synced: Tracker, url: str, text: str) -> None:
    assert synced.post("/register_peer", url=url) == (400, {"error": text})
    assert synced.get("/peers") == PEERS


def test_without_synchronization_there_are_no_peers(tracker: Tracker) -> None:
    disabled = (409, {"error": "replica sync is disabled"})

    assert tracker.post("/register_peer", url="tcp://x:1") == disabled
    assert tracker.post("/deregister_peer", url="tcp://x:1") == disabled
    assert tracker.get("/peers") == []


def test_peers_can_be_given_at_the_start(synced: Tracker) -> None:
    assert synced.get("/peers") == PEERS


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("--replica-sync-peers", "tcp://x:1"),
            "--replica-sync-advertise and --replica-sync-peers require --replica-sync-bind",
        ),
        (
            ("--replica-sync-advertise", "tcp://x:1"),
            "--replica-sync-advertise and --replica-sync-peers require --replica-sync-bind",
        ),
        ((*SYNC, "--replica-sync-peers", "x:1"), "--replica-sync-peers: invalid ZMQ endpoint `x:1`: missing scheme"),
        (("--replica-sync-bind", "tcp://192.0.2.1:9"), "--replica-sync-bind: tcp://192.0.2.1:9 cannot be bound"),
        (("--tls-key", "x"), "--tls-key is given without --tls-cert"),
        (("--token", "short"), "--token: has fewer than 16 characters"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(
    dynamo: Callable[..., Result], options: tuple[str, ...], text: str
) -> None:
    done = dynamo("slot-tracker", *local(*options))

    assert done.exit_code == 2
    assert f"dynamo: {text}" in done.stderr


# Beyond the document.


def test_with_a_token_only_health_is_open(start: Start) -> None:
    tracker = start(*local("--token", TOKEN, "--metrics"))

    assert tracker.exchange("GET", "/health")[0] == 200
    for method, path in (("GET", "/loads"), ("POST", "/add"), ("GET", "/metrics"), ("GET", "/peers")):
        status, body = tracker.ask(method, path)
        assert status == 401
        assert body.keys() == {"error"}
    assert tracker.ask("GET", "/loads", authorization=f"Bearer {TOKEN}x")[0] == 401
    assert tracker.ask("GET", "/loads", authorization=f"Bearer {TOKEN}") == (200, [])


def test_without_a_token_no_page_of_another_site_writes(tracker: Tracker) -> None:
    body = {"worker_id": 7, "model_name": next(names), "block_size": 16, "dp_start": 0, "dp_size": 1}
    foreign: dict[str, Any] = {"Origin": "http://evil.example"}

    for page in (foreign, {"Host": "evil.example", **foreign}):
        status, answer = tracker.ask("POST", "/register", body, **page)
        assert (status, answer.keys()) == (403, {"error"})
    assert tracker.ask("POST", "/register", body)[0] == 201


def test_metrics_and_snapshots_are_off_unless_asked_for(tracker: Tracker, three: list[Tracker]) -> None:
    assert tracker.ask("GET", "/metrics") == (404, {"error": "route not found"})
    assert tracker.ask("GET", "/snapshot") == (404, {"error": "route not found"})
    other, model = three[0], next(names)
    other.register(model)
    counted = ('calls_total{route="/add",status="201"}', 'replica_events{kind="published"}')

    def numbers() -> dict[str, float]:
        text = other.exchange("GET", "/metrics")[2].decode()
        found = re.findall(r"^dynamo_slot_tracker_(\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    before = numbers()
    other.add(model, "r", [1, 2], new_isl_tokens=7)
    # They are made anew after a second.
    until(lambda: numbers().get(f'active_decode_blocks{{model="{model}",tenant_id="default"}}') == 2)
    after = numbers()

    assert after[f'active_prefill_tokens{{model="{model}",tenant_id="default"}}'] == 7
    assert [after[name] - before.get(name, 0) for name in counted] == [1, 1]


def test_over_tls_with_a_snapshot_of_a_peer(start: Start, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"],
        check=True, capture_output=True, cwd=tmp_path,
    )  # fmt: skip
    cert = str(tmp_path / "tls.crt")
    guarded = ("--token", TOKEN, "--tls-cert", cert, "--tls-key", str(tmp_path / "tls.key"))
    trust = ssl.create_default_context(cafile=cert)
    first = start(*local(*SYNC, "--snapshot", *guarded), trust=trust)
    header: dict[str, Any] = {"authorization": f"Bearer {TOKEN}"}
    worker = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 1}
    assert first.ask("POST", "/register", worker, **header)[0] == 201
    for number in range(300):
        body = {"model_name": "m", "request_id": f"r{number}", "worker_id": 7, "dp_rank": 0}
        body |= {"sequence_hashes": [-1, number], "new_isl_tokens": 2}
        assert first.ask("POST", "/add", body, **header)[0] == 201

    second = start(
        *local(*SYNC, "--replica-sync-peers", first.sync, *guarded),
        "--snapshot-from", f"https://127.0.0.1:1,https://127.0.0.1:{first.port}", "--snapshot-ca", cert,
        trust=trust,
    )  # fmt: skip

    assert "no snapshot from https://127.0.0.1:1" in second.log
    assert second.ask("GET", "/loads", **header) == first.ask("GET", "/loads", **header)
    # What happens from now on is told.
    until(lambda: second.ask("GET", "/peers", **header) == (200, [first.sync]))

    def told() -> bool:
        request_id = next(names)
        first.ask(
            "POST", "/add", body | {"request_id": request_id, "sequence_hashes": [request_id.__hash__() >> 8]}, **header
        )
        return bool(second.ask("GET", "/loads", **header)[1][0]["active_decode_blocks"] > 301)

    until(told)
    free = {"model_name": "m", "request_id": "r0"}
    before = second.ask("GET", "/loads", **header)[1][0]["active_prefill_tokens"]
    first.ask("POST", "/free", free, **header)
    until(lambda: bool(second.ask("GET", "/loads", **header)[1][0]["active_prefill_tokens"] != before))


def test_with_gaps_a_replica_that_lost_events_comes_back_to_what_is_active(start: Start) -> None:
    options = local(*SYNC, "--replica-sync-gaps", "--metrics")
    teller, listener = start(*options), start(*options)
    listens(listener, teller)
    for one in (teller, listener):
        one.register("m")
    for number in range(56):
        assert teller.add("m", f"r{number}", range(1000 * number, 1000 * number + 1000))[0] == 201
    until(lambda: listener.load("m") == (0, 56_000))

    # None of these events arrives.
    assert listener.post("/deregister_peer", url=teller.sync) == (200, OK)
    for number in range(53):
        teller.post("/free", model_name="m", request_id=f"r{number}")
    assert listener.load("m") == (0, 56_000)
    assert listener.post("/register_peer", url=teller.sync) == (201, OK)

    until(lambda: listener.load("m") == teller.load("m") == (0, 3_000))
    assert "events of replica" in listener.log
    assert "dynamo_slot_tracker_replica_repairs" in listener.exchange("GET", "/metrics")[2].decode()
    # Clients ask for nothing else than before.
    assert listener.ask("GET", "/snapshot") == (404, {"error": "route not found"})


# The router.


def test_a_frontend_routes_through_it_and_leaves_nothing(start: Start, serve: Any) -> None:
    tracker = start(*local("--metrics"))
    config = f"""
frontend: {{use: openai}}
router: {{use: slot-tracker, url: "http://127.0.0.1:{tracker.port}", timeout: 5}}
workers:
  mock: {{model: {{name: mock-model}}, engine: {{use: mocker, speedup_ratio: 0}}, replicas: 2, grace_period: 0}}
"""
    server = serve(config)
    until(lambda: len(tracker.get("/workers")) == 2)
    body = {"model": "mock-model", "messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 3}

    for _ in range(5):
        assert server.request("POST", "/v1/chat/completions", body)[0] == 200

    assert server.metric("dynamo_router_slot_tracker_decisions_total", source="service") == 5

    def calls(route: str) -> bool:
        text = tracker.exchange("GET", "/metrics")[2].decode()
        status = 201 if route == "/add" else 200
        return f'dynamo_slot_tracker_calls_total{{route="{route}",status="{status}"}} 5.0' in text

    until(lambda: calls("/add") and calls("/free"))
    assert {(load["active_prefill_tokens"], load["active_decode_blocks"]) for load in tracker.get("/loads")} == {(0, 0)}
    # Without the service the answers go on.
    tracker.end()
    assert server.request("POST", "/v1/chat/completions", body)[0] == 200
    assert server.until(
        lambda: server.metric("dynamo_router_slot_tracker_decisions_total", source="load") == 1, DEADLINE
    )


def test_requests_that_end_while_the_service_hangs_leave_nothing_there(tracker: Tracker, serve: Any) -> None:
    model = next(names)
    config = f"""
frontend: {{use: openai}}
router: {{use: slot-tracker, url: "http://127.0.0.1:{tracker.port}", pause: 2}}
workers:
  mock: {{model: {{name: {model}}}, engine: {{use: mocker, fixed_itl_ms: 50}}, grace_period: 0}}
"""
    server = serve(config)
    until(lambda: len(tracker.get(f"/workers?model_name={model}")) == 1)
    body = {"model": model, "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 4000}
    streams = [server.raw("POST", "/v1/chat/completions", body | {"stream": True}) for _ in range(8)]
    until(lambda: tracker.potential(model, []).popitem()[1]["active_requests"] == 8)

    tracker.process.send_signal(signal.SIGSTOP)
    try:
        for stream in streams[:4]:
            stream.close()
        assert server.until(lambda: "does not answer" in server.log, DEADLINE)
        # What ends now is not even tried.
        for stream in streams[4:]:
            stream.close()
        assert server.until(lambda: server.metric("dynamo_frontend_inflight_requests") == 0, DEADLINE)
    finally:
        tracker.process.send_signal(signal.SIGCONT)

    until(lambda: tracker.potential(model, []).popitem()[1]["active_requests"] == 0)
    assert tracker.load(model) == (0, 0)


# Many calls.


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal numbers both begin."""
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


class Model:
    """What should come out, worked out anew from the list of requests."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.active: dict[str, tuple[int, tuple[int, ...], int]] = {}

    def loads(self) -> list[tuple[int, int, int]]:
        rows = []
        for rank in range(self.ranks):
            here = [(hashes, tokens) for where, hashes, tokens in self.active.values() if where == rank]
            blocks = {value for hashes, _ in here for value in hashes}
            rows.append((sum(tokens for _, tokens in here), len(blocks), len(here)))
        return rows

    def potential(self, hashes: list[int]) -> list[int]:
        rows = []
        for rank in range(self.ranks):
            held = {value for where, own, _ in self.active.values() if where == rank for value in own}
            prefix = max((common(hashes, own) for where, own, _ in self.active.values() if where == rank), default=0)
            rows.append(len(held) + len(hashes) - prefix)
        return rows


@pytest.mark.full
def test_ten_thousand_random_calls_come_out_as_a_simple_model_says(start: Start) -> None:
    tracker, model, drawn = start(), Model(4), random.Random(4)
    assert tracker.register("m", dp_size=4)[0] == 201
    connection = http.client.HTTPConnection("127.0.0.1", tracker.port, timeout=DEADLINE)

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    for _ in range(10_000):
        request_id = f"r{drawn.randrange(60)}"
        key = {"model_name": "m", "request_id": request_id}
        held = model.active.get(request_id)
        match drawn.choice(("add", "add", "prefill", "free", "project")):
            case "add":
                rank, tokens = drawn.randrange(4), drawn.choice((0, drawn.randrange(1000)))
                hashes = [drawn.randrange(3) for _ in range(drawn.randrange(4))] + list(
                    range(drawn.randrange(-20, 0), 0)
                )
                hashes = list(dict.fromkeys(hashes))
                body = key | {"worker_id": 7, "dp_rank": rank, "sequence_hashes": hashes, "new_isl_tokens": tokens}
                assert call("POST", "/add", body)[0] == (201 if held is None else 409)
                if held is None:
                    model.active[request_id] = (rank, tuple(hashes), tokens)
            case "prefill":
                assert call("POST", "/prefill_complete", key)[0] == (404 if held is None else 200)
                if held is not None:
                    model.active[request_id] = (*held[:2], 0)
            case "free":
                assert call("POST", "/free", key) == (200, OK)
                model.active.pop(request_id, None)
            case _:
                hashes = list(range(drawn.randrange(-20, 0), drawn.randrange(3)))
                status, answer = call(
                    "POST", "/potential_loads", {"model_name": "m", "sequence_hashes": hashes, "new_isl_tokens": 5}
                )
                assert status == 200
                loads = sorted(answer, key=lambda load: load["dp_rank"])
                assert [load["potential_decode_blocks"] for load in loads] == model.potential(hashes)
                assert [(load["potential_prefill_tokens"] - 5, load["active_requests"]) for load in loads] == [
                    (tokens, requests) for tokens, _, requests in model.loads()
                ]
                answer = call("GET", "/loads")[1]
                assert [(load["active_prefill_tokens"], load["active_decode_blocks"]) for load in answer] == [
                    (tokens, blocks) for tokens, blocks, _ in model.loads()
                ]
    connection.close()
