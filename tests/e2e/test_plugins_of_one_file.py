"""A plugin of one file runs in every process that the config starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from dynamo_runtime.cli.main import cli

PLUGINS = '''
import logging
import os

from dynamo_core import (
    EngineConfig, LLMEngine, LLMEngineOutput, PluginConfig, Route, Router, chunk, hookimpl, no_worker, usage
)

DYNAMO_API = 1
log = logging.getLogger(__name__)


class Words(PluginConfig):
    text: str = ""


class Parrot(LLMEngine):
    """Says one text to every prompt."""

    NAME = "parrot"
    Config = Words

    async def start(self, worker_id):
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request, ctx):
        for letter in self.config.text.encode():
            yield chunk.token(letter)
        yield LLMEngineOutput.stop().with_usage(usage(len(request.token_ids), len(self.config.text)))

    async def cleanup(self):
        pass


class First(Router):
    """Chooses the worker that came first."""

    NAME = "first"

    async def route(self, request, pool):
        eligible = pool.eligible(request.excluded)
        if not eligible:
            raise no_worker(pool)
        log.warning("routed by a file in process %d", os.getpid())
        return Route(eligible[0])


@hookimpl
def dynamo_engine_started(worker_id):
    log.warning("heard by a file in process %d", os.getpid())
'''

CONFIG = """
router: {use: ./plugins.py:First}
hooks: [./plugins.py]
workers:
  parrot:
    model: {name: parrot}
    engine: {use: ./plugins.py:Parrot, text: Pieces of eight!}
    replicas: 2
    grace_period: 0.1
client: {drain_grace: 0.1}
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""


def test_workers_and_frontend_of_a_supervisor_load_it(serve: Any, tmp_path: Path) -> None:
    # Files that their owner alone may write, whatever the umask is.
    plugins = tmp_path / "plugins.py"
    plugins.write_text(PLUGINS)
    plugins.chmod(0o644)
    config = tmp_path / "real.yaml"
    config.write_text(CONFIG % (tmp_path / "discovery"))
    config.chmod(0o644)

    server = serve(None, "--config", str(config))
    assert server.until(lambda: len(server.instances()) == 2, 15), server.log
    status, _, body = server.request("POST", "/v1/completions", {"model": "parrot", "prompt": "Hi", "max_tokens": 50})

    assert (status, b"Pieces of eight!" in body) == (200, True), body
    workers = set(server.instances().values())
    # What a process has said comes a moment later.
    assert server.until(lambda: processes_that_say("heard by a file", server) == workers, 5)
    assert server.until(lambda: bool(processes_that_say("routed by a file", server)), 5)
    routed = processes_that_say("routed by a file", server)
    assert len(routed) == 1
    assert not routed & workers


def processes_that_say(words: str, server: Any) -> set[int]:
    return {int(pid) for pid in re.findall(rf"{words} in process (\d+)", server.log)}


def test_a_new_extension_serves_its_route_as_it_was_written(tmp_path: Path, serve: Any) -> None:
    written = CliRunner().invoke(cli, ["new", "extension", "recent", "--single-file", "--path", str(tmp_path)])
    assert written.exit_code == 0, written.output
    folder = tmp_path / "recent"
    config = (folder / "recent.yaml").read_text().replace("./recent.py", f"{folder}/recent.py")
    server = serve(config)

    asked = {"model": "mock-model", "prompt": "Hi", "max_tokens": 3}
    status, headers, _ = server.request("POST", "/v1/completions", asked)

    def shown() -> Any:
        return json.loads(server.request("GET", "/recent-requests")[2])["requests"]

    assert status == 200
    assert server.until(shown, 10)
    row = {"id": headers["x-request-id"], "model": "mock-model", "status": "success", "output_tokens": 3}
    assert shown() == [row]
