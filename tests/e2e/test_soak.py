"""Twenty thousand mixed requests over tcp, to one frontend and one worker, whose engine fails in every way it can.

Afterwards the books of both processes agree with each other and with what the clients saw, nothing is held, and the
second half of the requests has cost no memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

REQUESTS = 20_000
CLIENTS = 64
#: Places in the engine and in the queue before it: fewer than clients, so that some are refused all the time.
PLACES, QUEUE = 40, 8
#: Seconds that a client waits for anything.
PATIENCE = 90.0
#: How much the resident memory of a process may grow from the third quarter of the requests to the last, as medians.
#: A kilobyte left behind by each request would be 5000; what caches and the allocator still take is a third of this.
GROWTH_KIB = 4000

#: The mocker with an engine's whole repertoire of failures, picked by a word in the prompt.
ENGINE = f"""
import asyncio
from contextlib import aclosing
from dynamo_core import BackendError, LLMEngineOutput, WorkerConfig, invalid_argument
from dynamo_runtime import run
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine

class Soaked(MockerEngine):
    NAME = "soaked"

    async def setup_metrics(self, metrics):
        await super().setup_metrics(metrics)
        self.begun, self.ended, self.raised = (
            metrics.counter(f"soak_{{name}}", "Requests.").labels() for name in ("begun", "ended", "raised")
        )

    async def generate(self, request, ctx):
        words = bytes(token for token in request.token_ids if token < 256).decode(errors="replace").split()
        self.begun.inc()
        try:
            if "refuse" in words:
                raise invalid_argument("the engine does not like it")
            if "silent" in words:
                await ctx.stopped()
                yield LLMEngineOutput.cancelled()
                return
            if "crash" in words:
                raise RuntimeError("a bug of the engine")
            if "census" in words:
                print("tasks", len(asyncio.all_tasks()), flush=True)
            sent = 0
            async with aclosing(super().generate(request, ctx)) as items:
                async for item in items:
                    if sent > 2 and "typed" in words:
                        raise BackendError.EngineShutdown("the accelerator is gone")
                    if sent > 2 and "text" in words:
                        yield LLMEngineOutput.error("out of luck")
                        return
                    if sent > 2 and "cut" in words:
                        return
                    yield item
                    sent += len(item.token_ids)
        except Exception:
            self.raised.inc()
            raise
        finally:
            self.ended.inc()

config = WorkerConfig(model_name="soaked")
limits = ["engine_request_limit={PLACES}", "request_queue_limit={QUEUE}", "grace_period=0.1"]
run(Soaked(MockerConfig(fixed_itl_ms=4.0), config), config, overrides=["workers.soaked." + limit for limit in limits])
"""

#: A plugin of the frontend that tells how many tasks there are when a request with that id has ended.
CENSUS = """
import asyncio, sys
from dynamo_core import hookimpl
DYNAMO_API = 1

@hookimpl
def dynamo_request_finished(record):
    if record.x_request_id == "census":
        print("tasks", len(asyncio.all_tasks()), file=sys.stderr, flush=True)
"""

FRONTEND = """
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
client: {drain_grace: 0.1, min_initial_workers: 0}
hooks: [census]
"""

#: Failures of the engine before its first token and after it, with the status that a client sees, or `lost` where it is
#: told that the worker was lost; of a stream that has begun it sees that it breaks off.
EARLY = {"refuse": "400", "crash": "500"}
LATE = {"typed": "lost", "text": "500", "cut": "lost"}
#: Those that are failures of the request and not of the worker.
OWN = ("crash", "text")
#: How often each kind of client comes.
KINDS = {
    "finish": 40,
    "leave early": 12,
    "leave midway": 12,
    **dict.fromkeys(EARLY | LATE, 5),
    "wrong": 5,
    "unknown": 5,
}

#: All that must be back at zero.
FRONTENDS = (
    "dynamo_frontend_active_requests",
    "dynamo_frontend_inflight_requests",
    "dynamo_frontend_queued_requests",
)
WORKERS = (
    "dynamo_component_inflight_requests",
    "dynamo_engine_request",
    "dynamo_request_queue",
    "dynamo_mocker_running_requests",
    "dynamo_mocker_waiting_requests",
    "dynamo_mocker_kv_used_blocks",
)


class Worker:
    """The worker's process."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        script = folder / "soaked.py"
        script.write_text(ENGINE)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        own = {"DYN_DISCOVERY__PATH": str(folder / "discovery"), "DYN_SYSTEM_PORT": str(self.port), "DYN_LOG": "error"}
        self.said, self.log = folder / "said", folder / "log"
        with self.said.open("w") as said, self.log.open("w") as log:
            self.process = subprocess.Popen([sys.executable, script], env=kept | own, stdout=said, stderr=log)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples of a metric whose labels contain these."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = [line for line in lines if re.match(rf"{name}[{{ ]", line)]
        wanted = [line for line in samples if all(f'{key}="{value}"' in line for key, value in labels.items())]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)

    def is_full(self) -> bool:
        """Return whether every place is taken, in a moment at least."""
        deadline = time.monotonic() + PATIENCE
        while self.metric("dynamo_request_queue") < QUEUE and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.metric("dynamo_request_queue") == QUEUE

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    if worker.process.poll() is None:
        worker.process.kill()
        worker.process.wait(5)


@pytest.fixture
def frontend(serve: Any, tmp_path: Path) -> Any:
    """Return a frontend that finds the worker, and has the plugin that counts tasks."""
    plugins = tmp_path / "plugins"
    info = plugins / "dynamo_plugin_hook_census-0.1.0.dist-info"
    info.mkdir(parents=True)
    (plugins / "dynamo_plugin_hook_census.py").write_text(CENSUS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dynamo-plugin-hook-census\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[dynamo]\nhook-census = dynamo_plugin_hook_census\n")
    path = os.pathsep.join([str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])])
    return serve(FRONTEND % (tmp_path / "discovery"), command="frontend", env={"PYTHONPATH": path})


@dataclass
class Memory:
    """The resident memory of both processes while requests end."""

    pids: list[int]
    #: How many requests had ended, and KiB per process.
    samples: list[tuple[int, list[int]]] = field(default_factory=list)

    def look(self, ended: int) -> None:
        self.samples.append((ended, [_resident_kib(pid) for pid in self.pids]))

    def growth(self, start: float, middle: float, end: float) -> list[float]:
        """Return KiB per process between the medians of two spans, which are given in shares of the requests."""
        bounds = [share * REQUESTS for share in (start, middle, end)]
        spans = [[rss for ended, rss in self.samples if low <= ended < high] for low, high in pairwise(bounds)]
        before, after = ([statistics.median(of) for of in zip(*span, strict=True)] for span in spans)
        return [late - early for early, late in zip(before, after, strict=True)]


def _resident_kib(pid: int) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1])


class Crowd:
    """The clients, and what became of each: how often, by kind and outcome."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.outcomes: Counter[tuple[str, str]] = Counter()

    @property
    def ended(self) -> int:
        return self.outcomes.total()

    def seen(self, *kinds: str, outcome: str | None = None) -> int:
        """Return how many clients of these kinds (none: of all) saw that outcome (None: any)."""
        return sum(
            count
            for (kind, what), count in self.outcomes.items()
            if (not kinds or kind in kinds) and outcome in (None, what)
        )

    async def run(self, count: int, look: Callable[[], None]) -> None:
        """Run so many requests of all kinds. `look` is called from time to time."""
        dice = random.Random(count)
        left = count

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                [kind] = dice.choices(list(KINDS), list(KINDS.values()))
                self.outcomes[kind, await self._one(kind, dice)] += 1

        async def watch() -> None:
            while left > 0:
                look()
                await asyncio.sleep(0.2)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client())
            group.create_task(watch())

    async def fill(self, full: Callable[[], bool], refused: int) -> None:
        """Take every place, send `refused` more requests, and give the places back before their first token."""
        body = {"model": "soaked", "prompt": "silent", "max_tokens": 9, "stream": True}
        writers = [(await self._send(body))[1] for _ in range(PLACES + QUEUE)]
        assert await asyncio.to_thread(full), "some found no place"
        for stream in (True, False) * (refused // 2):
            self.outcomes["too many", await self._ask({**body, "stream": stream})] += 1
        for writer in writers:
            writer.close()
            self.outcomes["leave early", "left"] += 1

    async def _one(self, kind: str, dice: random.Random) -> str:
        """Return one client, and what became of it: a status, `broken` for a stream without its end, or `left`."""
        body = {
            "model": "nobody" if kind == "unknown" else "soaked",
            "prompt": f"{'silent' if kind == 'leave early' else kind} " + "x " * dice.randint(1, 200),
            "max_tokens": dice.randint(1, 40) if kind == "finish" else 1000,
            "stream": kind == "leave midway" or dice.random() < 0.5,
            "temperature": 9 if kind == "wrong" else 1,
        }
        if not kind.startswith("leave"):
            return await self._ask(body)
        reader, writer = await self._send(body)
        try:
            if kind == "leave early":
                await asyncio.sleep(dice.uniform(0.01, 0.1))
                return "left"
            async with asyncio.timeout(PATIENCE):
                head = await reader.readuntil(b"\r\n")
                status = head.split()[1].decode()
                if status == "200":
                    await reader.readuntil(b"data: ")
            return "left" if status == "200" else status
        finally:
            writer.close()

    async def _ask(self, body: dict[str, Any]) -> str:
        reader, writer = await self._send(body)
        try:
            async with asyncio.timeout(PATIENCE):
                try:
                    answer = await reader.read()
                except ConnectionResetError:
                    return "broken"
        finally:
            writer.close()
        status = answer.split(b" ", 2)[1].decode()
        if status == "200" and body["stream"] and b"data: [DONE]" not in answer:
            assert b'"error"' in answer, "a stream ends without a word"
            return "broken"
        return "lost" if status == "503" and b"was lost" in answer else status

    async def _send(self, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        return reader, writer


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_after_a_flood_of_mixed_requests_the_books_agree_and_nothing_is_held(frontend: Any, worker: Worker) -> None:
    assert frontend.until(lambda: b"soaked" in frontend.request("GET", "/v1/models")[2], 20)
    crowd = Crowd(frontend.port)
    memory = Memory([frontend.process.pid, worker.process.pid])

    asyncio.run(crowd.fill(worker.is_full, refused=32))
    assert frontend.until(lambda: not held(frontend, worker), 5), held(frontend, worker)
    before = census(frontend, worker)
    asyncio.run(crowd.run(REQUESTS - crowd.ended, lambda: memory.look(crowd.ended)))

    # Two seconds to stop what nobody wants any more, and one for the cache of /metrics.
    assert frontend.until(lambda: not held(frontend, worker), 5), held(frontend, worker)
    assert_clients_saw_what_belongs_to_their_kind(crowd)
    assert_the_books_agree(crowd, frontend, worker)
    # At most, as the connection that asked for the first census may have counted in it: its end is seen a moment later.
    assert frontend.until(lambda: no_more(census(frontend, worker), before), 5), (before, census(frontend, worker))
    assert max(memory.growth(0.5, 0.75, 1)) < GROWTH_KIB, memory.samples[:: len(memory.samples) // 20]
    frontend.end()
    assert (frontend.process.returncode, worker.end()) == (0, 0)
    assert_only_the_engines_own_failures_are_logged(crowd, frontend.log, worker.log.read_text())


def held(frontend: Any, worker: Worker) -> dict[str, float]:
    """Return the gauges that are not at zero."""
    values = {name: side.metric(name) for side, names in ((frontend, FRONTENDS), (worker, WORKERS)) for name in names}
    return {name: value for name, value in values.items() if value}


def census(frontend: Any, worker: Worker) -> dict[str, int]:
    """Return tasks and open files of both processes while they answer one request."""
    body = {"model": "soaked", "prompt": "census", "max_tokens": 9}
    status, _, answer = frontend.request("POST", "/v1/completions", body, **{"x-request-id": "census"})
    assert status == 200, answer
    told = re.compile(r"^tasks (\d+)$", re.MULTILINE)
    assert frontend.until(lambda: len(told.findall(frontend.log)) == len(told.findall(worker.said.read_text())), 5)
    pids = {"frontend": frontend.process.pid, "worker": worker.process.pid}
    return {
        "frontend's tasks": int(told.findall(frontend.log)[-1]),
        "worker's tasks": int(told.findall(worker.said.read_text())[-1]),
        **{f"{name}'s files": len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
    }


def no_more(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(now[name] <= count for name, count in before.items())


def assert_clients_saw_what_belongs_to_their_kind(crowd: Crowd) -> None:
    expected = {("finish", "200"), ("leave early", "left"), ("leave midway", "left"), ("wrong", "400")}
    expected |= {("unknown", "404"), ("too many", "503"), *EARLY.items(), *LATE.items()}
    expected |= {(kind, "broken") for kind in LATE}
    # Whoever comes to the engine may be refused for load instead.
    refused = {(kind, "503") for kind in ("finish", "leave midway", *EARLY, *LATE)}

    assert crowd.outcomes.keys() - refused == expected
    assert crowd.ended == REQUESTS


def assert_the_books_agree(crowd: Crowd, frontend: Any, worker: Worker) -> None:
    """Assert that each request is counted once, by its outcome, and alike on both sides.

    What is left open is the fate of those who left early: their client cannot tell how far they came.
    """
    early = crowd.seen("leave early")
    # One that asked how many tasks there are.
    censuses = frontend.log.count("\ntasks ")
    failed = sum(crowd.seen(*OWN, outcome=outcome) for outcome in ("500", "broken"))
    lost = sum(crowd.seen("typed", "cut", outcome=outcome) for outcome in ("lost", "broken"))
    wrong, refused_by_engine = crowd.seen("wrong"), crowd.seen("refuse", outcome="400")

    started = frontend.metric("dynamo_frontend_requests_started_total")
    assert 0 <= REQUESTS + censuses - crowd.seen("unknown") - started <= early
    ended = {
        kind: frontend.metric("dynamo_frontend_requests_total", error_type=kind)
        for kind in ("", "validation", "internal", "unavailable", "overload", "cancelled")
    }
    assert sum(ended.values()) == frontend.metric("dynamo_frontend_requests_total") == started
    assert ended[""] == crowd.seen("finish", outcome="200") + censuses
    assert ended["validation"] == wrong + refused_by_engine
    assert ended["internal"] == failed
    assert ended["unavailable"] == lost
    assert 0 <= ended["overload"] - crowd.seen(outcome="503") <= early
    assert ended["overload"] == frontend.metric("dynamo_frontend_model_rejection_total")
    assert ended["cancelled"] == frontend.metric("dynamo_frontend_model_cancellation_total")
    assert ended["cancelled"] == frontend.metric("dynamo_frontend_disconnected_clients")
    assert frontend.metric("dynamo_frontend_request_duration_seconds_count") == started

    taken = worker.metric("dynamo_component_requests_total")
    rejected = worker.metric("dynamo_rejection_request_total")
    begun = worker.metric("soak_begun")
    assert 0 <= started - wrong - taken - rejected <= early
    assert 0 <= rejected - ended["overload"] <= early
    # The others left while they waited for a place in the engine.
    assert 0 <= taken - begun <= early
    assert worker.metric("dynamo_component_request_duration_seconds_count") == taken
    assert worker.metric("soak_ended") == begun
    # An answer that has no end is an error too, though the engine raised none.
    unfinished = crowd.seen("cut", outcome="lost") + crowd.seen("cut", outcome="broken")
    told = crowd.seen("text", outcome="500") + crowd.seen("text", outcome="broken")
    assert worker.metric("soak_raised") == refused_by_engine + failed + lost - unfinished - told
    assert worker.metric("dynamo_component_errors_total") == refused_by_engine + failed + lost - told
    cancelled = worker.metric("dynamo_component_cancellation_total")
    assert cancelled == worker.metric("dynamo_mocker_aborted_requests")
    assert crowd.seen("leave midway", outcome="left") <= cancelled <= ended["cancelled"]


def assert_only_the_engines_own_failures_are_logged(crowd: Crowd, frontend: str, worker: str) -> None:
    failed = sum(crowd.seen(*OWN, outcome=outcome) for outcome in ("500", "broken"))

    # One entry each: what clients were told is the server's fault, and where exactly the engine has its bug.
    assert frontend.count("Z ERROR ") == failed
    assert worker.count("Z ERROR ") == worker.count("RuntimeError: a bug of the engine")
    assert worker.count("Z ERROR ") == crowd.seen("crash", outcome="500")
