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
from tokenizers import Tokenizer

from plugins.engines.vllm.tests.real.conftest import make_model
from plugins.engines.vllm.tests.real.test_real_vllm_stack import Server

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


#: A token of the tiny tokenizer that stands for one of a model that thinks.
SPARE, CLOSE = "<|im_start|>", "</think>"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a token that ends thoughts."""
    folder = make_model(tmp_path_factory.mktemp("thinker"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text().replace(SPARE, CLOSE))
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] != CLOSE
    file.write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module", params=["", ", reasoning_parser: deepseek_r1"], ids=["plain", "reasoning"])
def server(request: pytest.FixtureRequest, thinker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    config = folder / "dynamo.yaml"
    config.write_text(CONFIG.format(model=thinker, reasoning=request.param))
    running = Server(config)
    try:
        running.wait_for_port()
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def token(thinker: Path) -> Any:
    return Tokenizer.from_file(str(thinker / "tokenizer.json")).token_to_id


def asked(server: Server, seed: int, token: Any, first: str = "{", **fields: Any) -> dict[str, Any]:
    """Return a choice whose model likes to begin with `first`, and not to think for long."""
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
        "max_tokens": 900,
        "logit_bias": {str(token(first)): 15, str(token(CLOSE)): 15},
        **fields,
    }
    status, answer = server.request("POST", "/v1/chat/completions", body)
    assert status == 200, answer
    found: dict[str, Any] = answer["choices"][0]
    return found


def sound(choice: dict[str, Any], allowed: frozenset[str] = frozenset(PARAMETERS)) -> str:
    """Return what an answer is: calls, or a value. One that was cut off is neither."""
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


@pytest.mark.parametrize("seed", SEEDS)
def test_an_answer_is_calls_or_a_value(server: Server, token: Any, seed: int) -> None:
    assert sound(asked(server, seed, token, response_format=FORMAT)) == "value"
    assert sound(asked(server, seed, token, "<", response_format=FORMAT)) == "calls"


@pytest.mark.parametrize("seed", SEEDS)
def test_without_parallel_calls_only_one_allowed_tool_is_called(server: Server, token: Any, seed: int) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}

    choice = asked(
        server,
        seed,
        token,
        "<",
        response_format=FORMAT,
        parallel_tool_calls=False,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )

    assert sound(choice, frozenset({"time"})) == "calls"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_that_must_be_made_obeys_its_schema(server: Server, token: Any, seed: int) -> None:
    choice = asked(server, seed, token, response_format=FORMAT, tool_choice="required", parallel_tool_calls=False)

    assert sound(choice) == "calls"
    assert len(choice["message"]["tool_calls"]) == 1


def test_strict_tools_leave_the_text_free(server: Server, token: Any) -> None:
    assert asked(server, 1, token, max_tokens=20)["finish_reason"] in ("stop", "length")


def test_a_value_without_tools_is_guided_after_the_thoughts(server: Server, token: Any) -> None:
    assert sound(asked(server, 1, token, tools=[], response_format=FORMAT)) == "value"
