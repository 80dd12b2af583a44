"""Load testers against `dynamo serve`: what their own reports say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder

from tests.clients.programs_of import command, printed

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

REQUESTS = 200
#: Requests at a time.
STREAMS = 8
CONFIG = """
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, speedup_ratio: 0}
    grace_period: 0
"""


@dataclass(frozen=True)
class Loader:
    """A load tester, how it is started, and where its report counts requests."""

    name: str
    api: str
    #: Of the server's address, the folder of a tokenizer, and that of the report.
    words: Callable[[str, Path, Path], list[str]]
    #: Answers without and with an error.
    counts: Callable[[Path], tuple[int, int]]

    def __str__(self) -> str:
        return f"{self.name}_{self.api.strip('/').replace('/', '_')}"


def guidellm(api: str) -> Loader:
    def words(url: str, tokenizer: Path, report: Path) -> list[str]:
        return [
            "run",
            *("--backend", f"kind=openai_http,target={url},model=mock-model,request_format={api}"),
            *("--profile", f"kind=concurrent,streams={STREAMS}"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"),
            *("--output", f"kind=json,path={report}/report.json"),
            "--disable-console-interactive",
        ]

    def counts(report: Path) -> tuple[int, int]:
        [benchmark] = json.loads((report / "report.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        return totals["successful"], totals["errored"] + totals["incomplete"]

    return Loader("guidellm", api, words, counts)


def aiperf(api: str) -> Loader:
    def words(url: str, tokenizer: Path, report: Path) -> list[str]:
        return [
            *("profile", "--model", "mock-model", "--url", url, "--endpoint-type", api, "--streaming"),
            *("--tokenizer", str(tokenizer), "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16"),
            *("--request-count", str(REQUESTS), "--concurrency", str(STREAMS)),
            *("--artifact-dir", str(report), "--ui", "none", "--no-gpu-telemetry"),
        ]

    def counts(report: Path) -> tuple[int, int]:
        found = json.loads((report / "profile_export_aiperf.json").read_text())
        errors = found.get("error_request_count") or {"avg": 0}
        return int(found["request_count"]["avg"]), int(errors["avg"])

    return Loader("aiperf", api, words, counts)


TESTERS = [
    *(guidellm(api) for api in ("/v1/chat/completions", "/v1/completions", "/v1/responses")),
    *(aiperf(api) for api in ("chat", "messages")),
]


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer: both need one to make prompts of a length, and theirs would come from elsewhere."""
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("tester", TESTERS, ids=str)
def test_a_load_tester_counts_no_error(
    tester: Loader, server: Any, tokenizer: Path, tmp_path: Path, recorded: Any
) -> None:
    recorder = recorded(str(tester), server)

    words = tester.words(recorder.url, tokenizer, tmp_path)
    shown = printed(command(tester.name, tester.name), *words, home=tmp_path, seconds=200)

    completed, errors = tester.counts(tmp_path)
    assert errors == 0, shown
    # guidellm leaves those out of its report that end while it is stopping: at most one of each stream.
    assert REQUESTS - STREAMS <= completed <= REQUESTS, shown
    assert recorder.statuses == {200}
