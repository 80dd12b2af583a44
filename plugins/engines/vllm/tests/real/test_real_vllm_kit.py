"""The conformance kit over real engines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import BackendError, EmbedRequest
from dynamo_plugin_engine_vllm.child_processes import MARK
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_testing import mock_context, run_conformance


@pytest.mark.full
async def test_an_engine_of_two_ranks_keeps_its_contract(make_engine: Callable[..., VllmEngine]) -> None:
    report = await run_conformance(
        lambda: make_engine(data_parallel_size=2, max_model_len=1024),
        token_ids=tuple(range(10, 80)),
        start_timeout=250,
        cleanup_timeout=60,
    )

    assert report.passed, report.as_text()
    seen = {check.name: check.seen for check in report.checks}
    assert seen["kv_event_sources"] == "ranks 0, 1"


@pytest.mark.full
async def test_an_embedding_model_makes_vectors_and_no_answers(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(runner="pooling", args={"convert": "embed"})
    try:
        config = await engine.start(1)
        assert config.capabilities == {"embed", "progress", "rerank", "score"}
        assert not await engine.kv_event_sources()

        made = await engine.embed(EmbedRequest(token_ids=[[5, 6, 7], [8], [5, 6, 7]]), mock_context())
        assert made.prompt_tokens == 7
        first, other, again = made.embeddings
        assert len(first) == 64
        assert sum(a * b for a, b in zip(first, again, strict=True)) == pytest.approx(1, abs=0.01)
        assert sum(a * b for a, b in zip(first, other, strict=True)) < 0.99

        refused: list[list[list[int]]] = [[[]], [[5], [99999]]]
        for wrong in refused:
            with pytest.raises(BackendError.InvalidArgument):
                await engine.embed(EmbedRequest(token_ids=wrong), mock_context())
        stopped = mock_context()
        stopped.stop_generating()
        with pytest.raises(BackendError.Cancelled):
            await engine.embed(EmbedRequest(token_ids=[[5]]), stopped)
    finally:
        await engine.cleanup()


async def test_a_start_that_is_cut_short_leaves_nothing_behind(make_engine: Callable[..., VllmEngine]) -> None:
    engine = make_engine()
    starting = asyncio.create_task(engine.start(1))
    while (children := engine._children) is None or not children.pids:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.05)

    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.cleanup()

    assert not children.pids
    assert not children.folder.exists()


def test_an_engine_that_runs_is_killed_with_its_worker(model: Path) -> None:
    script = Path(__file__).with_name("running.py")
    worker = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert any(line == "RUNS\n" for line in worker.stdout)
        environments = [path for path in Path("/proc").glob("[0-9]*/environ") if _marked(path, worker.pid)]
        assert len(environments) > 1
    finally:
        worker.kill()
        worker.wait(20)

    deadline = time.monotonic() + 20
    while left := [path for path in environments if _marked(path, worker.pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _marked(environ: Path, worker: int) -> bool:
    try:
        return f"{MARK}={worker}-".encode() in environ.read_bytes()
    except OSError:
        return False
