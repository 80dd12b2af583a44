"""A frontend remembers prompts, says so in its metrics, and answers as if it did not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder

CONFIG = """
client: {token_cache_mb: %d}
workers:
  merges:
    model: {name: merges, path: "%s"}
    engine: {use: mocker, output: echo, speedup_ratio: 0, context_length: 100000}
"""
LONG = "these are words that stay, and 12 numbers\n" * 200


def echoed(server: Any, prompt: str) -> str:
    status, _, body = server.request("POST", "/v1/completions", {"model": "merges", "prompt": prompt})
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["text"]
    return text


@pytest.mark.parametrize("size", [64, 0])
def test_a_prompt_comes_back_each_time_whether_it_is_remembered_or_not(
    serve: Any, tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    server = serve(CONFIG % (size, make_tokenizer_folder(tmp_path_factory.mktemp("model"))))

    for prompt in ("short", LONG + "one", LONG + "other"):
        assert [echoed(server, prompt) for _ in range(2)] == [prompt] * 2

    _, _, page = server.request("GET", "/metrics")
    values = dict(
        line.rsplit(" ", 1) for line in page.decode().splitlines() if "_tokenizer_cache_" in line and line[0] != "#"
    )
    if not size:
        assert not values
    else:
        # Some fifteen pieces of LONG are read once and found three times, the short prompt once.
        assert float(values["dynamo_frontend_tokenizer_cache_hits_total"]) > 40
        assert float(values["dynamo_frontend_tokenizer_cache_misses_total"]) < 24
        assert 0 < float(values["dynamo_frontend_tokenizer_cache_bytes"]) < 64 << 20
