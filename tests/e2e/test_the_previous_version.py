"""Workers of the previous version with this frontend, and the reverse: a fleet is never changed all at once.

The previous version is the newest tag that is an ancestor of this commit, or what `DYNAMO_PREVIOUS` names; without one
there is nothing to compare with, and the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.brokers import Servers

ROOT = Path(__file__).parents[2]
CONFIG = """
transport: %s
discovery: %s
client: {drain_grace: 0}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
    replicas: 1
    grace_period: 0.5
"""
REQUESTS = 200
TOKENS = 24

pytestmark = pytest.mark.full


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout


def previous() -> str | None:
    """The commit of the version before this one."""
    named = os.environ.get("DYNAMO_PREVIOUS")
    if named:
        return named
    try:
        return git("describe", "--tags", "--abbrev=0", "HEAD^").decode().strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which commands are those of the previous version."""
    commit = previous()
    if commit is None:
        pytest.skip("there is no previous version: no tag before this commit, and DYNAMO_PREVIOUS is not set")
    folder = tmp_path_factory.mktemp("previous")
    subprocess.run(["tar", "-x", "-C", folder], input=git("archive", commit), check=True, timeout=60)
    sources = [folder / "core" / "src", *sorted(folder.glob("libs/*/src")), *sorted(folder.glob("plugins/*/*/src"))]
    return {"PYTHONPATH": os.pathsep.join(map(str, sources))}


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[[Path, dict[str, str]], None]]:
    """Starts a worker by itself; it ends with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def start(config: Path, env: dict[str, str]) -> None:
        words = [sys.executable, "-m", "dynamo_runtime.cli.main", "worker", "mock", str(config)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DYN_")}
        running.append(subprocess.Popen(words, env=kept | env, stderr=subprocess.DEVNULL))

    yield start
    for process in running:
        process.terminate()
    for process in running:
        process.wait(15)


@pytest.fixture
def servers(profile: str, tmp_path: Path) -> Iterator[Servers]:
    """The servers that a profile needs."""
    with Servers(profile, tmp_path) as running:
        yield running


@pytest.mark.parametrize("profile", ["tcp-file", "nats-file", "redis-file"])
@pytest.mark.parametrize("old", ["the worker", "the frontend"])
def test_old_and_new_processes_serve_together(
    serve: Any,
    start_worker: Callable[[Path, dict[str, str]], None],
    older: dict[str, str],
    servers: Servers,
    tmp_path: Path,
    old: str,
) -> None:
    text = CONFIG % (json.dumps(servers.transport()), json.dumps(servers.discovery()))
    config = tmp_path / "worker.yaml"
    config.write_text(text)
    start_worker(config, older if old == "the worker" else {})
    server = serve(text, "--only", "frontend", env=older if old == "the frontend" else {}, ready="listening")
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 20)

    def ask(number: int) -> str | None:
        """What is wrong with an answer, if anything is."""
        stream = number % 2 == 0
        body = {
            "model": "mock-model",
            "messages": [{"role": "user", "content": f"Request {number}"}],
            "max_tokens": TOKENS,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        status, _, answer = server.request("POST", "/v1/chat/completions", body)
        if status != 200:
            return f"{status}: {answer.decode()}"
        if not stream:
            usage = json.loads(answer)["usage"]
            return None if usage["completion_tokens"] == TOKENS else answer.decode()
        whole = answer.endswith(b"data: [DONE]\n\n") and b'"completion_tokens":%d' % TOKENS in answer
        return None if whole else answer.decode()

    with ThreadPoolExecutor(16) as pool:
        wrong = [problem for problem in pool.map(ask, range(REQUESTS)) if problem is not None]

    assert wrong == []
    assert server.until(lambda: server.metric("dynamo_frontend_active_requests") == 0, 10)
