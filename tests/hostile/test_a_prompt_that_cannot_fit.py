"""A few kilobytes that unpack to a prompt of 40 MB cost a frontend little time, and no memory that lasts."""

from __future__ import annotations

import gzip
import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder

from tests.hostile.attacks import CHAT
from tests.hostile.test_a_client_beside_attacks import CONFIG, frontend_of

MB = 1 << 20
#: Bytes above those of an idle frontend: at the most, and for good.
MOST, FOR_GOOD = 400 * MB, 48 * MB
AT_ONCE = 4


def memory(pid: int, kind: str) -> int:
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def seconds(pid: int) -> float:
    """The processor time that a process has used."""
    words = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def prompt_of(text: str, size: int) -> bytes:
    body = {"model": "mock-model", "messages": [{"role": "user", "content": text * (size // len(text.encode()))}]}
    return gzip.compress(json.dumps(body, ensure_ascii=False).encode(), 1)


def refused(port: int, body: bytes) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", CHAT, body, {"content-type": "application/json", "content-encoding": "gzip"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    connection.close()
    assert reply.status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["bytes", "hf"])
@pytest.mark.parametrize("text", ["a", " ", "😀"])
def test_it_is_refused_for_little_time_and_memory(kind: str, text: str, serve: Any, tmp_path: Path) -> None:
    config = CONFIG.format(discovery=tmp_path / "discovery", more="")
    if kind == "hf":
        config = config.replace("mock-model}", f"mock-model, path: '{make_tokenizer_folder(tmp_path / 'model')}'}}")
    server = serve(config)
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 15), server.log
    pid = frontend_of(server.process.pid)
    refused(server.port, prompt_of(text, MB))
    idle = memory(pid, "VmRSS:")
    taken = []
    for size in (20 * MB, 40 * MB):
        body = prompt_of(text, size)
        before = seconds(pid)
        with ThreadPoolExecutor(AT_ONCE) as clients:
            errors = list(clients.map(refused, [server.port] * AT_ONCE, [body] * AT_ONCE))
        taken.append(seconds(pid) - before)
        assert all(error["param"] == "messages" and "at least" in error["message"] for error in errors)

    # It is linear, and tokenizing one of them takes half a minute.
    assert taken[1] < 4 * taken[0]
    assert memory(pid, "VmHWM:") < idle + MOST
    assert server.until(lambda: memory(pid, "VmRSS:") < idle + FOR_GOOD, 30)
