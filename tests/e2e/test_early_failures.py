"""What an engine raises before its first item: the page, the client's status and the worker's log say the same."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "engine-contract.md").read_text()

CONFIG = """
workers:
  w:
    model: {name: m}
    engine: {use: failing}
    replicas: 2
transport: {use: inproc}
discovery: {use: memory}
"""

#: Fails as the prompt says.
ENGINE = """
import sys
from dynamo_core import BackendError, EngineConfig, LLMEngine, LLMEngineOutput, hookimpl

DYNAMO_API = 1


class Failing(LLMEngine):
    NAME = "failing"

    async def start(self, worker_id):
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request, ctx):
        kind = bytes(request.token_ids).decode()
        sys.stderr.write(f"asked: {kind}\\n")
        if kind == "text":
            yield LLMEngineOutput.error("words of the engine")
            return
        if kind == "nothing":
            return
        if kind == "more":
            yield LLMEngineOutput([104, 105])
            yield LLMEngineOutput.stop()
            yield LLMEngineOutput([33])
            return
        if kind == "ValueError":
            raise ValueError("words of the engine")
        raise getattr(BackendError, kind)("words of the engine")

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_engines():
    return [Failing]
"""


def rows() -> dict[str, tuple[int, bool]]:
    """Return for each kind of error the promised status, and whether other workers are tried."""
    section = PAGE.split("\n## Errors\n")[1].split("\n## ")[0]
    cells = [re.split(r"\s*\|\s*", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")][1:]
    told: dict[str, tuple[int, bool]] = {}
    tries = False
    for name, _, status, framework in cells:
        tries = framework.startswith("tries up to") or (framework == "the same" and tries)
        told[name.strip("`")] = (int(status[:3]), tries)
    return told


#: As the sentences below the table have them.
BESIDE = {"ValueError": (500, False), "text": (500, False), "nothing": (503, True)}
PROMISED = rows() | BESIDE
#: What the worker's log says of each; a request that was wrong, or is over, is no news there.
KIND = {name: f"Backend({name}): words of the engine (acme_failing.py, line " for name in rows()} | {
    "text": "error: words of the engine",
    "nothing": "Backend(StreamIncomplete): the engine ended the stream without a terminal item (acme_failing.py, line ",
}
NO_NEWS = {"InvalidArgument", "Cancelled"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    server = started(tmp_path_factory.mktemp("failing"))
    yield server
    server.end()


def started(folder: Path, *options: str, **env: str) -> Server:
    """Return a server whose engine is installed."""
    info = folder / "site" / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dynamo]\nengine-failing = acme_failing\n")
    (info.parent / "acme_failing.py").write_text(ENGINE)
    paths = os.pathsep.join([str(info.parent), *sys.path])
    return Server(CONFIG, folder, *options, env={"PYTHONPATH": paths} | env)


def test_the_page_has_a_row_for_every_kind() -> None:
    assert len(rows()) == 9


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", PROMISED)
def test_a_failure_before_the_first_item_has_the_promised_status(server: Any, name: str, stream: bool) -> None:
    status, others = PROMISED[name]
    asked = server.log.count(f"asked: {name}\n")

    answered, headers, body = server.request(
        "POST", "/v1/completions", {"model": "m", "prompt": name, "max_tokens": 4, "stream": stream}
    )

    assert answered == status
    assert ("retry-after" in headers) == (status == 503)
    message = json.loads(body)["error"]["message"]
    assert ("words of the engine" in message) == (name == "InvalidArgument")
    # Two workers there are: both were asked, or the first one only.
    assert server.until(lambda: server.log.count(f"asked: {name}\n") - asked == 1 + others, 5)


@pytest.mark.parametrize("name", sorted(KIND))
def test_the_workers_log_has_the_engines_error_as_a_warning_once_a_minute(server: Any, name: str) -> None:
    for _ in range(3):
        server.request("POST", "/v1/completions", {"model": "m", "prompt": name, "max_tokens": 4})

    said = KIND[name]

    def warned() -> list[str]:
        return [line for line in server.log.splitlines() if "dynamo_runtime.worker.adapter" in line and said in line]

    if name in NO_NEWS:
        assert warned() == []
        return
    assert server.until(lambda: bool(warned()), 5)
    # Once for each of the two workers.
    assert len(warned()) <= 2
    assert all("WARNING" in line and "engine failing of worker w failed on request " in line for line in warned())


def test_an_exception_of_another_kind_has_its_traceback_in_the_workers_log(server: Any) -> None:
    server.request("POST", "/v1/completions", {"model": "m", "prompt": "ValueError", "max_tokens": 4})

    assert server.until(lambda: "ValueError: words of the engine" in server.log, 5)
    assert re.search(
        r"ERROR +dynamo_runtime\.worker\.adapter: engine failing of worker w failed on request", server.log
    )
    assert 'acme_failing.py", line ' in server.log


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_stream_validator_fails_the_request_if_enabled(server: Any, tmp_path: Path, stream: bool) -> None:
    body = {"model": "m", "prompt": "more", "max_tokens": 4, "stream": stream}
    unchecked = server.request("POST", "/v1/completions", body)

    for name, options, env in (("dev", ["--dev"], {}), ("variable", [], {"DYN_STREAM_VALIDATOR": "1"})):
        (tmp_path / name).mkdir()
        checked = started(tmp_path / name, *options, **env)
        try:
            # Of a stream that has begun, the connection is aborted after the error.
            try:
                status, _, said = checked.request("POST", "/v1/completions", body)
            except http.client.IncompleteRead as cut:
                status, said = 200, cut.partial
        finally:
            checked.end()
        log = checked.log

        assert b"stop" not in said
        # A stream of which nothing had been sent yet fails as a whole.
        assert b'"error":' in said
        assert stream or status == 500
        assert "Failing.generate: item yielded after terminal item: `return` right after the terminal" in log
        line = next(at for at, text in enumerate(ENGINE.splitlines(), 1) if "[33]" in text)
        assert f"(acme_failing.py, line {line})" in log

    assert unchecked[0] == 200
    assert b'"finish_reason":"stop"' in unchecked[2]
