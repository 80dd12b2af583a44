"""Bodies that repeat a fragment, at every route: what one costs grows with its bytes, and none holds the event loop."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.bodies import probe
from benchmarks.meters import children_of, cpu_seconds
from tests.hostile.test_a_client_beside_attacks import frontend_of

SECONDS = float(os.environ.get("FUZZ_SECONDS", "60"))
#: Bytes of the two bodies that are compared.
SMALL, LARGE = 256_000, 2_048_000
#: Seconds of the longest hold; how much faster than bytes the CPU time may grow; seconds of it that are not looked at.
HOLD, GROWTH, NOISE = 0.1, 2.0, 0.1
#: Two ticks of the clock of CPU time, below which it tells nothing of the small body.
TICKS = 0.02
#: Looks at a body that seems too expensive, of which the best counts: the machine does other things too.
LOOKS = 4

CONFIG = """
workers:
  w:
    model: {{name: m, path: "{folder}"}}
    engine: {{use: mocker, speedup_ratio: 0}}
    grace_period: 0
client: {{drain_grace: 0}}
transport: {{use: tcp}}
discovery: {{use: file, path: "{discovery}"}}
"""
#: What stands before the repeats, behind the name of a field.
OPENINGS = [b"", b'"', b"[", b'["', b"{", b'{"a":', b'[{"role":"user","content":', b'[{"role":"user","content":"']
#: What is repeated: parts of JSON, of messages, of escapes, white space, scripts.
FRAGMENTS = [
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'{"a":',
        b'"',
        b'\\"',
        b"\\\\",
        b"\\",
        b"\\u",
        b"\\ud800",
        b",",
        b":",
        b"1,",
        b"9",
        b"-1e9,",
    ),
    *(
        b" ",
        b"\n",
        b"\t",
        b"\0",
        b"a",
        b"ab ",
        b'"a",',
        b'"a":1,',
        b'{"role":"user","content":"x"},',
        b"null,",
        b"true",
    ),
    *(b'{"type":"text","text":"x"},', b'{"type":"function","function":{"name":"f"}},', b"<tool_call>", b"{{", b"{% if"),
    *("é".encode(), "😀".encode(), "你好".encode(), b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("model"))


class Server:
    """A frontend under test, its routes, and a client beside that asks whether it lives."""

    def __init__(self, server: Any, beside: Connection) -> None:
        self.server = server
        self.pid = frontend_of(server.process.pid)
        self._beside = beside
        described = json.loads(server.request("GET", "/openapi.json")[2])
        schemas = described["components"]["schemas"]
        self.fields = {
            path: _fields(item["post"], schemas) for path, item in described["paths"].items() if "post" in item
        }

    def cost(self, path: str, body: bytes) -> tuple[float, float]:
        """CPU seconds of a body, and of the longest hold of the loop meanwhile."""
        self._beside.send("begin")
        self._beside.recv()
        before = self._cpu()
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        connection.close()
        assert response.status < 500, (path, body[:80])
        self._beside.send("end of body")
        hold: float = self._beside.recv()
        return self._cpu() - before, hold

    def _cpu(self) -> float:
        return sum(cpu_seconds(pid) for pid in (self.pid, *children_of(self.pid)))


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schemas.get(schema.get("$ref", "").rpartition("/")[2], schema)
    return sorted(schema.get("properties", {})) or ["model"]


@pytest.fixture
def under_test(serve: Any, model: Path, tmp_path: Path) -> Iterator[Server]:
    server = serve(CONFIG.format(folder=model, discovery=tmp_path / "discovery"))
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 30), server.log
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    beside = multiprocessing.get_context("spawn").Process(target=probe, args=(server.port, theirs), daemon=True)
    beside.start()
    yield Server(server, ours)
    ours.send("end")
    beside.join(10)
    beside.kill()


@pytest.mark.full
@pytest.mark.timeout(SECONDS + 300)
def test_cost_of_a_body_grows_with_its_bytes_and_holds_no_loop(under_test: Server) -> None:
    until = time.monotonic() + SECONDS
    tried = 0

    @settings(
        max_examples=10**6,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        path=st.sampled_from(sorted(under_test.fields)),
        opening=st.sampled_from(OPENINGS),
        fragment=st.lists(st.sampled_from(FRAGMENTS) | st.binary(min_size=1, max_size=4), min_size=1, max_size=3),
        closing=st.sampled_from([b"", b'"}', b"]}", b'"}]}', b"[" * 101, b'\\"' * 50 + b"]" * 101]),
        data=st.data(),
    )
    def fuzz(path: str, opening: bytes, fragment: list[bytes], closing: bytes, data: st.DataObject) -> None:
        nonlocal tried
        field = data.draw(st.sampled_from(under_test.fields[path]))
        if time.monotonic() > until:
            return
        unit = b"".join(fragment)

        def body(size: int) -> bytes:
            return b'{"model":"m","%b":%b%b%b' % (field.encode(), opening, unit * (size // len(unit)), closing)

        tried += 1
        for _ in range(LOOKS):
            small, _ = under_test.cost(path, body(SMALL))
            large, hold = under_test.cost(path, body(LARGE))
            if hold <= HOLD and large <= GROWTH * LARGE / SMALL * max(small, TICKS) + NOISE:
                return
        raise AssertionError(f"{path} {field} {opening!r} {unit!r} {closing!r}: {small} s, {large} s, held {hold} s")

    fuzz()
    assert tried > 0
