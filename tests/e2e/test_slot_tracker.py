"""The slot tracker as a process of its own: everything that its page promises, asked for over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from dynamo_testing.servers.ports import free_port

from tests.e2e.conftest import Process, clean_environment

DEADLINE = 60.0
MODULE = "dynamo_plugin_router_slot_tracker"
OK = {"status": "ok"}
TOKEN = "a-token-that-is-long-enough"

names = (f"model-{number}" for number in count())


def resident(tracker: Tracker) -> int:
    """Return the kilobytes of memory that the process has."""
    status = Path(f"/proc/{tracker.process.pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0])


class Tracker(Process):
    """A running service. Without other options it listens on a free port of the loopback."""

    def __init__(self, *options: str, ready: str = "ready for requests", trust: ssl.SSLContext | None = None) -> None:
        env = {key: value for key, value in clean_environment().items() if not key.startswith("SLOT_TRACKER_")}
        super().__init__(["-m", MODULE, *(options or ("--host", "127.0.0.1", "--port", "0"))], env)
        self._trust = trust
        self.port = int(self.found(ready + r" at https?://[\d.]+:(\d+)")[1])

    @property
    def sync(self) -> str:
        """The endpoint on which replicas are told."""
        return self.found(r"replicas are told at (tcp://\S+)")[1]

    def ask(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
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
        """Return prefill tokens and decode blocks of the one rank of a model."""
        [load] = self.get(f"/loads?model_name={model}")
        return load["active_prefill_tokens"], load["active_decode_blocks"]

    def potential(self, model: str, hashes: list[int], **more: Any) -> dict[tuple[int, int], dict[str, int]]:
        status, loads = self.post("/potential_loads", model_name=model, sequence_hashes=hashes, **more)
        assert status == 200
        return {(load["worker_id"], load["dp_rank"]): load for load in loads}

    def blocks(self, model: str, hashes: list[int]) -> int:
        return self.potential(model, hashes)[7, 0]["potential_decode_blocks"]


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    """Return once the condition holds."""
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
    """Start services that live as long as the test."""
    yield from _trackers()


@pytest.fixture(scope="module")
def tracker() -> Iterator[Tracker]:
    """Yield one service for all tests of the module, each with a model of its own."""
    for start in _trackers():
        yield start()


#: What the service `synced` is told at its start, in another order.
PEERS = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]


@pytest.fixture(scope="module")
def synced() -> Iterator[Tracker]:
    """Yield one service with synchronization, two peers that are not there, and no worker."""
    for start in _trackers():
        yield start(
            *local(*SYNC, "--replica-sync-advertise", "tcp://slot-tracker-a:8092"),
            *("--replica-sync-peers", ", ".join(reversed(PEERS))),
        )


@pytest.fixture(scope="module")
def synced_pair() -> Iterator[tuple[Tracker, Tracker]]:
    """Yield two services with synchronization, which do not listen to each other but within a test."""
    for start in _trackers():
        yield start(*local(*SYNC, "--metrics")), start(*local(*SYNC))


@pytest.fixture
def pair(synced_pair: tuple[Tracker, Tracker]) -> Iterator[tuple[Tracker, Tracker]]:
    """Yield a service that tells, and one that listens to it."""
    teller, listener = synced_pair
    with listening(listener, teller):
        yield teller, listener


def local(*options: str) -> tuple[str, ...]:
    return ("--host", "127.0.0.1", "--port", "0", *options)


SYNC = ("--replica-sync-bind", "tcp://127.0.0.1:*")


def listens(listener: Tracker, teller: Tracker) -> None:
    """Register a peer, and return once what it tells arrives: connections of ZMQ come about behind the back."""
    assert listener.post("/register_peer", url=teller.sync)[0] in (200, 201)
    probe = next(names)
    for one in (listener, teller):
        assert one.register(probe) == (201, OK)

    def heard() -> bool:
        assert teller.add(probe, next(names), [1])[0] == 201
        return listener.load(probe) != (0, 0)

    until(heard)


def known_to(*trackers: Tracker) -> str:
    """Return a model with worker 7 at each of these services."""
    model = next(names)
    for tracker in trackers:
        assert tracker.register(model) == (201, OK)
    return model


@contextmanager
def listening(listener: Tracker, teller: Tracker) -> Iterator[None]:
    """Yield once reports of the one arrive at the other."""
    listens(listener, teller)
    try:
        yield
    finally:
        listener.post("/deregister_peer", url=teller.sync)


# The process.


def test_the_slot_tracker_needs_no_other_service(tracker: Tracker) -> None:
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


def test_the_slot_tracker_binds_8091_on_all_addresses_by_default() -> None:
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


def test_the_port_is_an_option_and_one_in_use_is_one_line(tracker: Tracker) -> None:
    done = subprocess.run(
        [sys.executable, "-m", MODULE, "--host", "127.0.0.1", "--port", str(tracker.port)],
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip

    assert done.returncode == 2
    assert "the port is in use; end the process that holds it, or choose another port with --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_slot_tracker_is_a_dynamo_command(dynamo: Callable[..., Result]) -> None:
    done = dynamo("slot-tracker", "--help")

    assert done.exit_code == 0
    assert all(f"--replica-sync-{name}" in done.stdout for name in ("bind", "advertise", "peers"))


def test_ctrl_c_ends_it_in_order_and_the_registry_is_empty_after_a_restart(start: Start) -> None:
    place = ("--host", "127.0.0.1", "--port", str(free_port()))
    first = start(*place)
    assert first.register("m") == (201, OK)
    assert first.add("m") == (201, OK)
    assert first.end(signal.SIGINT) == 0

    second = start(*place)

    # Health is about liveness only.
    status, _, body = second.exchange("GET", "/health")
    assert (status, body) == (200, b"")
    assert second.get("/workers") == []
    assert second.get("/loads") == []


def test_an_unfreed_request_expires(start: Start) -> None:
    tracker = start(*local("--expiry", "1"))
    tracker.register("m")
    assert tracker.add("m", "old", [1, 2], new_isl_tokens=5) == (201, OK)

    until(lambda: tracker.load("m") == (0, 0))

    # It may come again.
    assert tracker.add("m", "old") == (201, OK)


# Calls.


#: The path, and the body of a POST. ``$m`` stands for a model that no other test has.
Call = tuple[str, Mapping[str, Any] | bytes | None]
#: A call, with the status and the answer that follow: all of it, or a part of the text of its error.
Step = tuple[Call, int, Any]


def register(worker_id: int | str = 7, model_name: str = "$m", **more: Any) -> Call:
    facts = {"block_size": 16, "dp_start": 0, "dp_size": 1} | more
    return "/register", {"worker_id": worker_id, "model_name": model_name, **facts}


def unregister(worker_id: int | str = 7, model_name: str = "$m", **more: Any) -> Call:
    return "/unregister", {"worker_id": worker_id, "model_name": model_name, **more}


def add(request_id: str = "r", hashes: Sequence[int] = (), **more: Any) -> Call:
    where = {"model_name": "$m", "worker_id": 7, "dp_rank": 0} | more
    return "/add", {"request_id": request_id, "sequence_hashes": list(hashes), **where}


def prefilled(request_id: str = "r", model_name: str = "$m") -> Call:
    return "/prefill_complete", {"model_name": model_name, "request_id": request_id}


def free(request_id: str = "r", model_name: str = "$m") -> Call:
    return "/free", {"model_name": model_name, "request_id": request_id}


def project(hashes: Sequence[int] = (), model_name: str = "$m", **more: Any) -> Call:
    return "/potential_loads", {"model_name": model_name, "sequence_hashes": list(hashes), **more}


def raw(path: str, text: str) -> Call:
    return path, text.encode()


def error(text: str) -> dict[str, str]:
    return {"error": text}


def worker(worker_id: int = 7, tenant_id: str = "default", model_name: str = "$m", **more: int) -> dict[str, Any]:
    facts = {"block_size": 16, "dp_start": 0, "dp_size": 1} | more
    return {"worker_id": worker_id, "model_name": model_name, "tenant_id": tenant_id, **facts}


def load(tokens: int = 0, blocks: int = 0, worker_id: int = 7, **more: Any) -> dict[str, Any]:
    row = {"model_name": "$m", "tenant_id": "default", "worker_id": worker_id, "dp_rank": 0} | more
    return {**row, "active_prefill_tokens": tokens, "active_decode_blocks": blocks}


def potential(tokens: int, blocks: int, requests: int, worker_id: int = 7, dp_rank: int = 0) -> dict[str, int]:
    row = {"worker_id": worker_id, "dp_rank": dp_rank, "active_requests": requests}
    return {**row, "potential_prefill_tokens": tokens, "potential_decode_blocks": blocks}


#: The loads and the workers of a test's model.
LOADS: Call = ("/loads?model_name=$m", None)
WORKERS: Call = ("/workers?model_name=$m", None)
REGISTERED: Step = (register(), 201, OK)
NOBODY = error("no slot tracker for model=$m-unknown tenant_id=default")
LARGEST = 2**32 - 1

WORKER_CALLS: dict[str, Sequence[Step]] = {
    "a worker is registered once, with the default tenant": (
        (register(dp_size=2), 201, OK),
        (register(dp_start=2, dp_size=2), 409, error("worker 7 already registered for model=$m tenant_id=default")),
        (LOADS, 200, [load(), load(dp_rank=1)]),
        (WORKERS, 200, [worker(dp_size=2)]),
    ),
    "sizes and range are checked, the sizes first": (
        (register(block_size=0, dp_size=0, dp_start=LARGEST), 400, error("block_size must be greater than 0")),
        (register(dp_size=0), 400, error("dp_size must be greater than 0")),
        (register(dp_start=LARGEST), 400, error(f"dp range overflows u32: start={LARGEST} size=1")),
        (register(dp_size=LARGEST), 400, f"dp_size {LARGEST} is too large"),
        (WORKERS, 200, []),
        (register(dp_start=LARGEST - 2, dp_size=2), 201, OK),
        (LOADS, 200, [load(dp_rank=LARGEST - 2), load(dp_rank=LARGEST - 1)]),
    ),
    "workers of a model and tenant have one block size": (
        REGISTERED,
        (
            register(8, block_size=32),
            409,
            error("block_size mismatch for model=$m tenant_id=default: existing=16, requested=32"),
        ),
        (register(8, block_size=32, tenant_id="other"), 201, OK),
    ),
    "ids of workers are scoped by model and tenant": (
        REGISTERED,
        (register(tenant_id="other"), 201, OK),
        (register(model_name="$m-2"), 201, OK),
        (add("r", [1, 2], tenant_id="other"), 201, OK),
        (LOADS, 200, [load(), load(0, 2, tenant_id="other")]),
    ),
    "unregistering removes the range and its requests at once": (
        (register(dp_size=2), 201, OK),
        (register(8), 201, OK),
        (add("r0", [1, 2], new_isl_tokens=9), 201, OK),
        (add("r1", [1, 2], dp_rank=1), 201, OK),
        (unregister(), 200, OK),
        (LOADS, 200, [load(worker_id=8)]),
        (register(dp_size=2), 201, OK),
        (LOADS, 200, [load(), load(dp_rank=1), load(worker_id=8)]),
        # The ids are free again.
        (add("r0"), 201, OK),
    ),
    "unregistering a worker that is not there is a 404": (
        REGISTERED,
        (unregister(70), 404, error("worker 70 not found for model=$m tenant_id=default")),
        (unregister(70, "$m-2"), 404, error("worker 70 not found for model=$m-2 tenant_id=default")),
    ),
    "a worker may be named by the text that other surfaces show": (
        (register("7f00000000000001"), 201, OK),
        (register(0x7F00000000000001), 409, "already registered"),
        (add(worker_id="7f00000000000001"), 201, OK),
        (project([1]), 200, [potential(0, 1, 1, 0x7F00000000000001)]),
        (unregister("7F00000000000001"), 200, OK),
    ),
    "both lists are sorted by model, tenant, worker and rank": (
        (register(10, tenant_id="t", dp_size=2), 201, OK),
        (register(9, tenant_id="t"), 201, OK),
        (register(11, tenant_id="a"), 201, OK),
        (WORKERS, 200, [worker(11, "a"), worker(9, "t"), worker(10, "t", dp_size=2)]),
        (
            LOADS,
            200,
            [
                load(worker_id=11, tenant_id="a"),
                *(load(worker_id=number, tenant_id="t", dp_rank=rank) for number, rank in ((9, 0), (10, 0), (10, 1))),
            ],
        ),
    ),
    "filters are independent": (
        *((register(1, f"$m-{model}", tenant_id=f"$m-{tenant}"), 201, OK) for model in "ba" for tenant in "yx"),
        (("/workers?tenant_id=$m-y", None), 200, [worker(1, "$m-y", "$m-a"), worker(1, "$m-y", "$m-b")]),
        (("/workers?model_name=$m-a", None), 200, [worker(1, "$m-x", "$m-a"), worker(1, "$m-y", "$m-a")]),
        (("/workers?model_name=$m-b&tenant_id=$m-x&other=1", None), 200, [worker(1, "$m-x", "$m-b")]),
        (
            ("/loads?tenant_id=$m-y", None),
            200,
            [load(worker_id=1, tenant_id="$m-y", model_name=f"$m-{model}") for model in "ab"],
        ),
        (("/loads?model_name=$m-nope", None), 200, []),
        (
            ("/loads?tenant_id=x&tenant_id=y", None),
            400,
            error("Failed to deserialize query string: duplicate field `tenant_id`"),
        ),
    ),
    "a model may have no name": ((register(model_name=""), 201, OK), (unregister(model_name=""), 200, OK)),
}

REQUEST_CALLS: dict[str, Sequence[Step]] = {
    "a request counts until it is freed": (
        REGISTERED,
        (add("r", [101, -22, 303], new_isl_tokens=48), 201, OK),
        (LOADS, 200, [load(48, 3)]),
        *[(prefilled(), 200, OK), (LOADS, 200, [load(0, 3)])] * 2,
        (free(), 200, OK),
        (LOADS, 200, [load()]),
        (free(), 200, OK),
        (free("nope"), 200, OK),
        (prefilled("nope"), 404, error("Request nope not found")),
    ),
    "freeing releases the tokens that are left to prefill": (
        REGISTERED,
        (add("a", [1], new_isl_tokens=48), 201, OK),
        (add("b", [1], new_isl_tokens=30), 201, OK),
        (add("c", [1]), 201, OK),
        (LOADS, 200, [load(78, 1)]),
        (free("a"), 200, OK),
        (LOADS, 200, [load(30, 1)]),
    ),
    "hashes must be given and may be none": (
        REGISTERED,
        (("/add", {"model_name": "$m", "request_id": "r", "worker_id": 7, "dp_rank": 0}), 422, "`sequence_hashes`"),
        (add(), 201, OK),
        (project(), 200, [potential(0, 0, 1)]),
    ),
    "hashes are all signed 64-bit numbers": (
        REGISTERED,
        (add("r", [-1, -(2**63), 2**63 - 1, 0]), 201, OK),
        (project([-1, -(2**63), 2**63 - 1, 0]), 200, [potential(0, 4, 1)]),
        *((add("other", [outside]), 422, "sequence_hashes") for outside in (2**63, -(2**63) - 1, 2**64 - 1)),
    ),
    "an id is taken while its request is active, which counts once": (
        REGISTERED,
        (add("r", [1]), 201, OK),
        (
            add("r", [2]),
            409,
            error("Request r already exists (assigned to worker WorkerWithDpRank { worker_id: 7, dp_rank: 0 })"),
        ),
        (LOADS, 200, [load(0, 1)]),
    ),
    "unknown models, workers and ranks are 404": (
        REGISTERED,
        (add(model_name="$m-unknown"), 404, NOBODY),
        (prefilled("r", "$m-unknown"), 404, NOBODY),
        (free("r", "$m-unknown"), 404, NOBODY),
        (project([], "$m-unknown"), 404, NOBODY),
        (add(worker_id=99), 404, error("Worker WorkerWithDpRank { worker_id: 99, dp_rank: 0 } not found")),
        (add(dp_rank=1), 404, "not found"),
        (add(tenant_id="other"), 404, "tenant_id=other"),
    ),
    "a call that comes before its add is forgotten": (
        REGISTERED,
        (free("late"), 200, OK),
        (prefilled("late"), 404, error("Request late not found")),
        (add("late", [1, 2], new_isl_tokens=5), 201, OK),
        (LOADS, 200, [load(5, 2)]),
    ),
}

LOAD_CALLS: dict[str, Sequence[Step]] = {
    "blocks of a common prefix count once": (
        REGISTERED,
        (add("a", [1, 2, 3]), 201, OK),
        (add("b", [1, 2, 4, 5]), 201, OK),
        (LOADS, 200, [load(0, 5)]),
        (free("a"), 200, OK),
        (LOADS, 200, [load(0, 4)]),
        (add("c", [9, 9, 9]), 201, OK),
        (LOADS, 200, [load(0, 5)]),
    ),
    "a projection adds only blocks after a common prefix": (
        REGISTERED,
        (add("r", [101, -22, 303]), 201, OK),
        *(
            (project(hashes), 200, [potential(0, blocks, 1)])
            for hashes, blocks in (
                ([101, -22, 303, 404], 4),
                ([-22, 101], 5),
                ([101, 303], 4),
                ([101, 5, 303], 5),
                ([5, 5], 4),
                ([], 3),
            )
        ),
    ),
    "projections are those of the document, one for each rank, and reserve nothing": (
        REGISTERED,
        (register(8, dp_start=4, dp_size=2), 201, OK),
        (add("r", [101, -22, 303], new_isl_tokens=48), 201, OK),
        *[
            (
                project([101, -22, 303, 404], new_isl_tokens=48),
                200,
                [potential(96, 4, 1), potential(48, 4, 0, 8, 4), potential(48, 4, 0, 8, 5)],
            )
        ]
        * 2,
        (add("s", [101]), 201, OK),
        (project([]), 200, [potential(48, 3, 2), potential(0, 0, 0, 8, 4), potential(0, 0, 0, 8, 5)]),
        (free("r"), 200, OK),
        (project([]), 200, [potential(0, 1, 1), potential(0, 0, 0, 8, 4), potential(0, 0, 0, 8, 5)]),
    ),
    "a worker may be gone between projection and add": (
        REGISTERED,
        (register(8), 201, OK),
        (project(), 200, [potential(0, 0, 0), potential(0, 0, 0, 8)]),
        (unregister(), 200, OK),
        (add(), 404, "not found"),
        (project(), 200, [potential(0, 0, 0, 8)]),
        (add(worker_id=8), 201, OK),
    ),
}


def misfit(text: str) -> str:
    return f"Failed to deserialize the JSON body into the target type: {text} at line 1 column "


BAD_CALLS: dict[str, Sequence[Step]] = {
    "malformed JSON is a 400 with its place": (
        (
            raw("/add", '{"model_name": '),
            400,
            error("Failed to parse the request body as JSON: unexpected end of the text at line 1 column 15"),
        ),
    ),
    "a wrong value is a 422 that names it": (
        *(
            (register(**change), 422, misfit(text))
            for change, text in (
                ({"dp_start": None}, "dp_start: expected `int`, got `null`"),
                ({"worker_id": "7"}, "worker_id: expected `str` matching regex '^[0-9a-fA-F]{16}$'"),
                ({"worker_id": 1.0}, "worker_id: expected `int | str`, got `float`"),
                ({"worker_id": -1}, "worker_id: expected `int` >= 0"),
                ({"worker_id": 2**64}, "worker_id: expected `int` <= 18446744073709551615"),
                ({"block_size": 2**32}, "block_size: expected `int` <= 4294967295"),
                ({"tenant_id": None}, "tenant_id: expected `str`, got `null`"),
                ({"model_name": 1}, "model_name: expected `str`, got `int`"),
            )
        ),
    ),
    "a missing field is a 422 that names it": (
        *(
            (
                ("/register", {name: value for name, value in worker().items() if name not in ("tenant_id", field)}),
                422,
                f"missing field `{field}` at line 1 column",
            )
            for field in ("worker_id", "model_name", "block_size", "dp_start", "dp_size")
        ),
    ),
    "a repeated field and minus zero are 422 and change nothing": (
        REGISTERED,
        (add("a", [1]), 201, OK),
        (raw("/free", '{"model_name":"$m","request_id":"a","request_id":"b"}'), 422, "duplicate field `request_id`"),
        (
            raw("/potential_loads", '{"model_name":"$m","sequence_hashes":[1,-0]}'),
            422,
            "sequence_hashes[1]: expected `int`, got `float`",
        ),
        (LOADS, 200, [load(0, 1)]),
    ),
    "unknown fields are ignored": ((register(more=1), 201, OK), (unregister(more=1), 200, OK)),
    "unknown routes are 404 and wrong methods 405": (
        (("/nope", None), 404, error("route not found")),
        (raw("/add/", "{}"), 404, error("route not found")),
        (("/register", None), 405, error("method not allowed")),
        (("/loads", {}), 405, error("method not allowed")),
        # They are there only if they are asked for.
        (("/metrics", None), 404, error("route not found")),
        (("/snapshot", None), 404, error("route not found")),
    ),
    "a body above 2 MiB is a 413": (
        REGISTERED,
        (raw("/free", '{"model_name":"$m","request_id":"r"}'.ljust(2_000_000)), 200, OK),
        (
            raw("/free", "{}".ljust(2 * 1024 * 1024 + 1)),
            413,
            error("Failed to buffer the request body: length limit exceeded"),
        ),
    ),
    "a body full of small hashes is refused unless the bound is raised": (
        REGISTERED,
        (add("r", [1] * 200_000), 400, "at most 131072 are taken"),
        # Hashes as they are, of 64 bits: more than these do not fit into a body.
        (add("r", range(2**62, 2**62 + 90_000)), 201, OK),
    ),
}


CASES = {**WORKER_CALLS, **REQUEST_CALLS, **LOAD_CALLS, **BAD_CALLS}


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_calls_are_answered_as_documented(tracker: Tracker, steps: Sequence[Step]) -> None:
    model = next(names)

    def named(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("$m", model))

    for (path, body), status, expected in steps:
        if isinstance(body, bytes):
            told = tracker.ask("POST", path, raw=body.replace(b"$m", model.encode()))
        elif body is None:
            told = tracker.ask("GET", named(path))
        else:
            told = tracker.ask("POST", path, named(body))
        assert told[0] == status, told
        if isinstance(expected, str):
            assert named(expected) in told[1]["error"]
        elif path == "/potential_loads" and status == 200:
            # Every rank is there, in whatever order.
            assert sorted(told[1], key=lambda row: (row["worker_id"], row["dp_rank"])) == expected
        else:
            assert told[1] == named(expected)


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


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/plain", 415),
        ("", 415),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.of-somebody+json", 200),
    ],
)
def test_the_content_type_must_be_json(tracker: Tracker, content_type: str, status: int) -> None:
    model = known_to(tracker)
    body = json.dumps({"model_name": model, "request_id": "r"}).encode()

    answer = tracker.ask("POST", "/free", raw=body, content_type=content_type)

    assert answer == (
        status,
        OK if status == 200 else {"error": "Expected request with `Content-Type: application/json`"},
    )


# Replicas.


def test_events_reach_the_replica_that_listens_and_go_no_other_way(synced_pair: tuple[Tracker, Tracker]) -> None:
    teller, listener = synced_pair
    model, unknown = known_to(teller, listener), known_to(teller)
    teller.add(model, "early", [1])
    with listening(listener, teller):
        listener.add(model, "here", [1, 2])
        teller.add(unknown, "r", [1])
        teller.add(model, "r", [101, -22, 303], new_isl_tokens=48)
        # What was told before it listened does not come, and a worker is not made of what is.
        until(lambda: listener.load(model) == (48, 5))
        assert (teller.get("/peers"), listener.get("/peers")) == ([], [teller.sync])
        assert listener.get(f"/workers?model_name={unknown}") == []
        teller.post("/prefill_complete", model_name=model, request_id="r")
        until(lambda: listener.load(model) == (0, 5))
        # Calls belong to the replica that took the request: elsewhere only that view changes.
        assert listener.post("/free", model_name=model, request_id="r") == (200, OK)
        assert (listener.load(model), teller.load(model)) == ((0, 2), (0, 4))
        teller.add(model, "s", [7])
        until(lambda: listener.load(model) == (0, 3))
        teller.post("/free", model_name=model, request_id="s")
        until(lambda: listener.load(model) == (0, 2))


def test_an_unreading_replica_slows_no_other(pair: tuple[Tracker, Tracker]) -> None:
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


def test_a_deregistered_peer_is_not_followed(pair: tuple[Tracker, Tracker]) -> None:
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
def test_impossible_options_are_one_line(dynamo: Callable[..., Result], options: tuple[str, ...], text: str) -> None:
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


def test_metrics_that_are_asked_for_show_loads_and_calls(synced_pair: tuple[Tracker, Tracker]) -> None:
    other, model = synced_pair[0], next(names)
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


def test_with_gaps_a_replica_recovers_lost_events(start: Start) -> None:
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
