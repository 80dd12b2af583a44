"""A server of another project behind us: llama.cpp's, on a tiny model. `make test-peer` runs this."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port
from dynamo_testing.tiny_model import make_tokenizer_folder

from tests.e2e.asking import read_to_end

#: An interpreter that has `llama-cpp-python[server]` and `gguf`.
PEER = os.environ.get("LLAMA_CPP_PYTHON", "")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not PEER, reason="LLAMA_CPP_PYTHON names no interpreter with llama.cpp; `make test-peer` has it"
    ),
]

CONFIG = """
workers:
  peer:
    model: {name: tiny}
    engine: {use: upstream, url: "%s", start_timeout: 60}
"""
CHAT = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}


class Peer:
    """The server's process."""

    def __init__(self, model: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = ["--model", str(model), "--model_alias", "its-own-name", "--n_ctx", "1024", "--n_threads", "1"]
        self.process = subprocess.Popen(
            [PEER, "-m", "llama_cpp.server", "--host", "127.0.0.1", "--port", str(port), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def answer(self, body: dict[str, Any]) -> Any:
        """Return what it answers without us."""
        data = json.dumps(body | {"model": "its-own-name"}).encode()
        headers = {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + CHAT, data, headers), timeout=30) as reply:
            return json.load(reply)

    def await_ready(self) -> None:
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        pytest.fail("the peer did not start")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    folder, model = make_tokenizer_folder(tmp_path / "tokenizer", vocab_size=600), tmp_path / "tiny.gguf"
    script = Path(__file__).with_name("tiny_gguf.py")
    subprocess.run([PEER, str(script), str(folder), str(model)], check=True, timeout=60)
    peer = Peer(model)
    yield peer
    peer.end()


def test_peer_answers_pass_whole_and_streamed_and_its_death_is_an_error(
    serve: Any, peer: Peer, until_content: Any
) -> None:
    # Both start at once: the worker waits for its server.
    server = serve(CONFIG % peer.url)
    peer.await_ready()
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 60), server.log
    direct = peer.answer(ASKED)

    status, _, body = server.request("POST", CHAT, ASKED)
    whole = json.loads(body)
    events = server.request("POST", CHAT, ASKED | {"stream": True})[2].split(b"\n\n")
    chunks = [json.loads(event[6:]) for event in events[:-2]]
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    assert status == 200, body
    message = direct["choices"][0]["message"]["content"]
    assert message
    assert whole["choices"][0]["message"]["content"] == streamed == message
    assert whole["choices"][0]["finish_reason"] == direct["choices"][0]["finish_reason"]

    connection = server.raw(
        "POST", CHAT, ASKED | {"stream": True, "max_tokens": 900, "logit_bias": {"1": -100, "2": -100}}
    )
    rest = until_content(connection)
    os.kill(peer.process.pid, signal.SIGKILL)
    rest += read_to_end(connection)

    assert b"[DONE]" not in rest
    assert b'"error"' in rest
    assert server.request("POST", CHAT, ASKED)[0] == 503
