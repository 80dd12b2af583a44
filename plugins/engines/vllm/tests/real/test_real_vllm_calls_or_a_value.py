"""Tools beside `response_format` with real vLLM: random weights write calls or a value, because the grammar makes them.

The frontend runs in front of the engine in one process, so that its own grammars, parsers and answers are what is held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from test_real_vllm_stack import Server

pytestmark = pytest.mark.full

SEEDS = range(6)
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"type": "boolean"}},
    "required": ["zone"],
    "additionalProperties": False,
}
PARAMETERS = {"weather": CITY, "time": ZONE}
VALUE = {
    "type": "object",
    "properties": {"degrees": {"enum": [1, 2, 3]}, "sky": {"enum": ["grey", "blue"]}},
    "required": ["degrees", "sky"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": VALUE}}

CONFIG = """
transport: {{use: inproc}}
discovery: {{use: memory}}
router: {{use: round-robin}}
log: {{json: true, level: info}}
client: {{drain_grace: 0}}
frontend: {{port: 0}}
workers:
  tiny:
    model: {{name: tiny, path: "{model}", tool_call_parser: hermes{reasoning}}}
    engine:
      use: vllm
      max_model_len: 2048
      enforce_eager: true
      block_size: 32
      kv_cache_memory_bytes: 2097152
      max_num_seqs: 16
      shutdown_timeout: 5
    grace_period: 0
"""


@pytest.fixture(scope="module", params=["", ", reasoning_parser: deepseek_r1"], ids=["plain", "reasoning"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = folder / "dynamo.yaml"
    config.write_text(CONFIG.format(model=model, reasoning=request.param))
    running = Server(config)
    try:
        running.wait_for_port()
        running.thinks = bool(request.param)
        yield running
    finally:
        running.end()


def asked(server: Server, seed: int, **fields: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in PARAMETERS.items()
    ]
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Weather number {seed}?"}],
        "tools": tools,
        "seed": seed,
        "temperature": 1.0,
        "max_tokens": 700,
        **fields,
    }
    status, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    found: dict[str, Any] = answer["choices"][0]
    return found


def sound(choice: dict[str, Any], allowed: frozenset[str] = frozenset(PARAMETERS)) -> str:
    """What an answer is: calls, or a value. One that was cut off is neither."""
    assert "structured_output" not in choice
    message = choice["message"]
    if choice["finish_reason"] == "length":
        return "cut off"
    calls = message.get("tool_calls")
    if calls is None:
        Draft202012Validator(VALUE).validate(json.loads(message["content"]))
        return "value"
    assert message["content"] is None
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        name = call["function"]["name"]
        assert name in allowed
        Draft202012Validator(PARAMETERS[name]).validate(json.loads(call["function"]["arguments"]))
    return "calls"
