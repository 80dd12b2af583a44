"""One process computes prompts, another answers, and their engines meet by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo_testing.servers.ports import free_port

from tests.e2e.asking import answer

HALVES = """
workers:
  first:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5, bootstrap_host: 127.0.0.1, bootstrap_port: %d}
    disaggregation_mode: prefill
    grace_period: 0
  second:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5}
    disaggregation_mode: decode
    grace_period: 0
client: {drain_grace: 0}
transport: {use: tcp}
discovery: {use: file, path: "%s"}
"""

WHOLE = """
workers:
  whole:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 1}
"""


def test_answers_are_equal_to_those_of_a_worker_that_does_both(serve: Any, tmp_path: Path) -> None:
    halves, whole = serve(HALVES % (free_port(), tmp_path / "discovery")), serve(WHOLE)

    for seed in range(2):
        one, other = (answer(server, seed=seed, max_tokens=40) for server in (halves, whole))
        assert one["choices"] == other["choices"]
        assert one["usage"] == other["usage"]
    assert len(halves.instances()) == 2
    assert [model["id"] for model in json.loads(halves.request("GET", "/v1/models")[2])["data"]] == ["mock-model"]
