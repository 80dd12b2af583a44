"""`dynamo serve` with two vLLM workers behind the kv router: real processes, some of which are killed.

The tests share the server and follow each other: each leaves it as the next one needs it.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_plugin_engine_vllm.child_processes import MARK
from dynamo_text.load import HF, load_tokenizer

#: A busy machine takes minutes for two engines.
START = 280.0

CONFIG = """
transport: {{use: tcp}}
discovery: {{use: file, path: "{folder}", ttl: 3}}
router: {{use: {router}}}
log: {{json: true, level: debug}}
client: {{drain_grace: 0}}
frontend: {{port: 0}}
workers:
  tiny:
    model: {{name: tiny, path: "{model}", migration_limit: 3}}
    engine:
      use: vllm
      max_model_len: 2048
      enforce_eager: true
      block_size: 32
      kv_cache_memory_bytes: 2097152
      max_num_seqs: 16
      shutdown_timeout: 5
    replicas: 2
    grace_period: 0
"""

PROMPTS = [[10 + (step * position) % 900 for position in range(40 + step)] for step in (1, 3, 7)]


class Server:
    """A running `dynamo serve`, in a process group of its own."""

    def __init__(self, config: Path) -> None:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dynamo_runtime.cli.main", "serve", str(config)],
            env=kept | {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(config.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def until(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, "".join(self.lines[-80:])
            assert self.process.poll() is None, "".join(self.lines[-80:])
            time.sleep(0.05)
        return found

    def wait_for_port(self) -> None:
        def told() -> int:
            found = [re.search(r"ready for requests at http://127\.0\.0\.1:(\d+)", line) for line in list(self.lines)]
            return next((int(match[1]) for match in found if match), 0)

        self.port = self.until(told, START)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = self.connect()
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, prompt: list[int], limit: int, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        status, answer = self.request("POST", "/v1/completions", body | more)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def pids(self) -> dict[int, int]:
        """Return the workers that the frontend sees: instance id and pid."""
        return {one["instance_id"]: one["pid"] for one in self.request("GET", "/health")[1]["instances"]}

    def served_by(self) -> list[int]:
        """Return the pids of the workers that were given requests, in order."""
        return [
            line["pid"] if "pid" in line else self.running(line["process"])
            for line in self.messages
            if "a request goes to engine" in line["message"]
        ]

    def running(self, part: str) -> int:
        """Return the pid that a part of the server was started with last."""
        found = [re.fullmatch(rf"{re.escape(part)} runs as pid (\d+)", line["message"]) for line in self.messages]
        return [int(match[1]) for match in found if match][-1]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()


def children(worker: int) -> dict[int, str]:
    """Return vLLM's processes of a worker, with their names, whether it lives or not."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={worker}-".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def bare(model: Path) -> list[list[int]]:
    """Return the answers of vLLM alone."""
    script = Path(__file__).with_name("bare.py")
    done = subprocess.run(
        [sys.executable, str(script), str(model), json.dumps(PROMPTS)], capture_output=True, text=True, timeout=200
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")] or [done.stderr]
    answers: list[list[int]] = json.loads(line.removeprefix("ANSWERS "))
    return answers


@pytest.fixture(scope="module")
def server(bare: list[list[int]], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("stack")
    router = "kv" if importlib.util.find_spec("dynamo_plugin_router_kv") is not None else "round-robin"
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(folder=folder / "discovery", model=model, router=router))
    server = Server(config)
    try:
        server.wait_for_port()
        server.until(lambda: len(server.pids()) == 2, START)
        yield server
    finally:
        server.end()


def test_the_whole_stack_generates_the_same_ids_as_vllm_alone(
    server: Server, bare: list[list[int]], model: Path
) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix == ".json"}
    tokenizer = load_tokenizer(HF, files)
    # Every token has bytes of its own, so the texts of the log-probabilities name the ids.
    ids: dict[str, int] = {}
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        try:
            ids.setdefault(data.decode(), token)
        except UnicodeDecodeError:
            ids["bytes:" + "".join(f"\\x{byte:02x}" for byte in data)] = token

    for prompt, expected in zip(PROMPTS, bare, strict=True):
        [choice] = server.complete(prompt, 24, logprobs=0, skip_special_tokens=False)["choices"]
        assert [ids[text] for text in choice["logprobs"]["tokens"]] == expected


def test_a_repeated_prompt_is_routed_to_the_worker_with_its_cache(server: Server) -> None:
    if importlib.util.find_spec("dynamo_plugin_router_kv") is None:
        pytest.skip("there is no kv router")
    for number in range(4):
        prompt = [20 + number] * 5 + [(11 * position) % 900 for position in range(200)]
        first = server.complete(prompt, 4)
        assert first["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
        server.until(lambda: True)
        # What the worker tells of its cache takes a moment.
        time.sleep(0.5)
        again = server.complete(prompt, 4)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert server.until(lambda: len(server.served_by()) % 2 == 1 and server.served_by()[-2:])
        one, other = server.served_by()[-2:]
        assert one == other


class Stream:
    """A streamed answer that is being read."""

    def __init__(self, server: Server, prompt: list[int], limit: int) -> None:
        self._connection = server.connect()
        body = {"model": "tiny", "prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self.events = 0

    def read(self, events: int) -> None:
        """Read that many events."""
        while events:
            line = self._response.readline()
            assert line, "the stream ended"
            if line.startswith(b"data: "):
                assert b'"error"' not in line, line
                events -= 1

    def rest(self) -> tuple[int, str]:
        """Read to the end: the number of tokens, and how the answer ended."""
        lines = [line[6:] for line in self._response.read().split(b"\n") if line.startswith(b"data: ")]
        self._connection.close()
        assert lines[-1] == b"[DONE]", lines[-1]
        chunks = [json.loads(line) for line in lines[:-1]]
        assert all("error" not in chunk for chunk in chunks), chunks[-1]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        return chunks[-1]["usage"]["completion_tokens"], [reason for reason in reasons if reason][-1]


def test_a_stream_goes_on_elsewhere_when_vllms_process_is_killed_and_the_worker_starts_anew(server: Server) -> None:
    # Known before, for the stream lasts a second or two.
    cores = {
        worker: pid
        for worker in server.pids().values()
        for pid, name in children(worker).items()
        if name.startswith("VLLM::Engine")
    }
    before = len(server.served_by())
    stream = Stream(server, [33] * 50, 1950)
    stream.read(1)
    worker = server.until(lambda: server.served_by()[before:])[0]

    os.kill(cores[worker], signal.SIGKILL)

    assert stream.rest() == (1950, "length")
    assert len(server.served_by()) == before + 2
    assert server.served_by()[-1] != worker
    server.until(lambda: worker not in server.pids().values())
    server.until(lambda: any("has died" in line["message"] for line in server.messages))
    server.until(lambda: not children(worker))


def test_a_worker_that_is_killed_leaves_no_process_of_vllms(server: Server) -> None:
    # The one that is being started anew, while vLLM loads the model.
    [other] = server.pids().values()

    def starting() -> int:
        pids = {server.running(f"workers.tiny-{replica}") for replica in range(2)} - {other}
        return next((pid for pid in pids if len(children(pid)) > 1), 0)

    worker = server.until(starting, 120)

    os.kill(worker, signal.SIGKILL)

    server.until(lambda: not children(worker))
    assert len(children(other)) > 1


def test_ctrl_c_finishes_the_stream_and_leaves_no_process(server: Server) -> None:
    stream = Stream(server, [44] * 50, 1950)
    stream.read(1)

    os.killpg(server.process.pid, signal.SIGINT)

    assert stream.rest() == (1950, "length")
    workers = {int(match[1]) for line in server.messages if (match := re.search(r"runs as pid (\d+)", line["message"]))}
    server.process.wait(90)
    deadline = time.monotonic() + 15
    while left := [pid for worker in workers for pid in children(worker)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
