"""The parsers that a worker names are used by a frontend in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

CONFIG = """
workers:
  mock:
    model: {name: mock-model, tool_call_parser: hermes, reasoning_parser: deepseek_r1}
    engine: {use: mocker, fixed_itl_ms: 1}
    grace_period: 0
client: {drain_grace: 0}
transport: {use: tcp}
discovery: {use: file, path: "%s"}
"""


def test_an_answer_is_parsed_in_the_frontends_process(serve: Any, tmp_path: Path) -> None:
    server = serve(CONFIG % (tmp_path / "discovery"))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    request: Any = {"model": "mock-model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}

    whole = client.chat.completions.create(**request, tools=tools).choices[0]
    parts = [part.choices[0].delta for part in client.chat.completions.create(**request, tools=tools, stream=True)]

    # What the mocker says has no tags: this parser takes it for thoughts that do not end.
    thoughts = whole.message.to_dict()["reasoning_content"]
    assert isinstance(thoughts, str)
    assert len(thoughts) == 5
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == ("", None, "length")
    assert "".join(part.to_dict().get("reasoning_content", "") for part in parts) == thoughts
