"""docs/reference/telemetry.md names everything that a collector gets to see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_core import LLMEngineOutput, PreprocessedRequest, ServedContext, TraceLink, chunk, start_span
from dynamo_core.errors import BackendError
from dynamo_runtime.telemetry import export
from dynamo_runtime.worker import generate_span
from dynamo_runtime.worker.generate_span import GenerateSpan

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "telemetry.md").read_text()


def named(heading: str) -> set[str]:
    """Return every word in code style under a heading."""
    section = PAGE.split(f"# {heading}\n", 1)[1].split("\n## ")[0].split("\n### ")[0]
    return set(re.findall(r"`([^`\n]+)`", section))


def test_every_attribute_of_engine_generate_is_in_the_table(record: Callable[..., Any]) -> None:
    recorded = record()
    request = PreprocessedRequest(token_ids=[1], migration_link=TraceLink("a" * 32, "b" * 16))
    for last in (LLMEngineOutput.stop(), BackendError.Unknown("no")):
        with start_span("engine.generate") as span:
            watch = GenerateSpan(span, request, "agg", ServedContext("r"))
            watch.item(chunk.token(1))
            watch.item(chunk.token(1))
            if isinstance(last, LLMEngineOutput):
                watch.item(last)
            else:
                watch.failed(last, setup=False)
            watch.ended()

    seen = {key for span in recorded.spans for key in span.attributes}
    assert {"model", "itl_p99_ms", "error_kind"} <= seen
    assert seen <= named("The tree")


def test_every_reason_name_is_documented() -> None:
    assert {*generate_span._NAMES.values(), generate_span.DROPPED, generate_span.SETUP_FAILED} <= named("The tree")


def test_every_variable_of_ours_is_in_the_table() -> None:
    assert {export.ENABLED, export.RATIO, *export.PROTOCOLS, export.PROTOCOL} <= named("Environment")
