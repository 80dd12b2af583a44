from __future__ import annotations

import pytest
from dynamo_telemetry import gen_ai_attributes


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("chat_completions", "chat"),
        ("messages", "chat"),
        ("responses", "chat"),
        ("completions", "text_completion"),
        ("embeddings", "embeddings"),
        ("rerank", "rerank"),
    ],
)
def test_an_endpoint_has_the_name_of_the_conventions_or_its_own(endpoint: str, operation: str) -> None:
    assert gen_ai_attributes(endpoint, "m") == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": "m",
    }
