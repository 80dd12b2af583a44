"""Models that think or do not: however a client says it, the prompt says it as the model's own template does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_core import Parsers
from dynamo_generation.requests.thinking import VARIABLES, Kind, ThinkingRequest, ThinkingVariables
from dynamo_plugin_parsers_standard.think_tags import Qwen3Parser
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
#: In the manner of Qwen3: thinks unless told otherwise, and an empty thought in the prompt says so.
QWEN = (
    TURNS + "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
#: In the manner of DeepSeek V3.1: thinks only if told to, and the prompt opens the thought or closes it.
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}" + TURNS + "{% if add_generation_prompt %}"
    "<|assistant|>{% if not thinking %}</think>{% else %}<think>{% endif %}{% endif %}"
)
#: In the manner of gpt-oss: always thinks, more or less.
OSS = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "Reasoning: {{ reasoning_effort }}{{ '\n' }}" + TURNS
)
#: An effort that may be none, which it is unless told otherwise.
MISTRAL = (
    "{% set effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
    "{% if effort not in ['none', 'high'] %}{{ raise_exception('effort is none or high') }}{% endif %}"
    "Reasoning: {{ effort }}{{ '\n' }}" + TURNS
)
#: In the manner of Seed-OSS.
SEED = (
    "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}"
    "Budget: {{ thinking_budget }}{{ '\n' }}" + TURNS
)

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TURN = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": TURN},
    RESPONSES: {"model": "m", "input": "Hi"},
    MESSAGES: {"model": "m", "max_tokens": 50, "messages": TURN},
}

OFF: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"reasoning_effort": "minimal"}),
    (CHAT, {"enable_thinking": False}),
    (CHAT, {"thinking": False}),
    (CHAT, {"thinking": {"type": "disabled"}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"chat_template_kwargs": {"thinking": False}}),
    (CHAT, {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}, "reasoning_effort": "high"}),
    (CHAT, {"chat_template_args": {"enable_thinking": False}}),
    (RESPONSES, {"reasoning": {"effort": "none"}}),
    (RESPONSES, {"reasoning": {"effort": "minimal"}}),
    (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}),
    (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
    (MESSAGES, {"chat_template_kwargs": {"thinking": False}}),
]
ON: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"enable_thinking": True}),
    (CHAT, {"thinking": True}),
    (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 512}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}),
    (CHAT, {"chat_template_kwargs": {"thinking": True}}),
    (RESPONSES, {"reasoning": {"effort": "low"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
    (MESSAGES, {"thinking": {"type": "adaptive"}}),
    (MESSAGES, {"output_config": {"effort": "max"}}),
]
LEFT: list[tuple[str, dict[str, Any]]] = [(path, {}) for path in BODIES]

QWEN_ON = "<|user|>Hi<|assistant|>"
QWEN_OFF = QWEN_ON + "<think>\n\n</think>\n\n"
DEEPSEEK_ON, DEEPSEEK_OFF = QWEN_ON + "<think>", QWEN_ON + "</think>"


@pytest.fixture
async def shown(cold_server: Any) -> Any:
    """Give the prompt of a request to a model of this template."""

    async def show(template: str, path: str, fields: dict[str, Any]) -> str:
        model = cold_server.add_model("m", {"chat_template.jinja": template.encode()})
        model.parsers = Parsers(reasoning=Qwen3Parser)
        await cold_server.start()
        prompt: str = await cold_server.shown(path, BODIES[path] | fields)
        return prompt

    return show


def cases(*found: tuple[list[tuple[str, dict[str, Any]]], str]) -> list[Any]:
    return [(path, fields, prompt) for wishes, prompt in found for path, fields in wishes]


@pytest.mark.parametrize(("path", "fields", "prompt"), cases((OFF, QWEN_OFF), (ON, QWEN_ON), (LEFT, QWEN_ON)))
async def test_a_model_that_thinks_by_default_can_be_switched(shown: Any, path: str, fields: Any, prompt: str) -> None:
    assert await shown(QWEN, path, fields) == prompt


@pytest.mark.parametrize(
    ("path", "fields", "prompt"), cases((OFF, DEEPSEEK_OFF), (ON, DEEPSEEK_ON), (LEFT, DEEPSEEK_OFF))
)
async def test_a_model_that_does_not_think_by_default_can_be_switched(
    shown: Any, path: str, fields: Any, prompt: str
) -> None:
    assert await shown(DEEPSEEK, path, fields) == prompt


@pytest.mark.parametrize(
    ("template", "path", "fields", "line"),
    [
        (OSS, CHAT, {"reasoning_effort": "high"}, "Reasoning: high"),
        (OSS, RESPONSES, {"reasoning": {"effort": "low"}}, "Reasoning: low"),
        (OSS, MESSAGES, {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, "Reasoning: high"),
        # It cannot be switched off: the least that it knows.
        (OSS, MESSAGES, {"thinking": {"type": "disabled"}}, "Reasoning: low"),
        (OSS, MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "Reasoning: medium"),
        (MISTRAL, CHAT, {}, "Reasoning: none"),
        (MISTRAL, CHAT, {"enable_thinking": True}, "Reasoning: high"),
        (MISTRAL, CHAT, {"reasoning_effort": "high", "enable_thinking": False}, "Reasoning: none"),
        (MISTRAL, MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "Reasoning: high"),
        (MISTRAL, MESSAGES, {"thinking": {"type": "disabled"}}, "Reasoning: none"),
        (SEED, CHAT, {}, "Budget: -1"),
        (SEED, CHAT, {"reasoning_effort": "none"}, "Budget: 0"),
        (SEED, CHAT, {"thinking": {"type": "enabled", "budget_tokens": 512}}, "Budget: 512"),
        (SEED, MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "Budget: 2048"),
        (SEED, MESSAGES, {"thinking": {"type": "disabled"}}, "Budget: 0"),
        (SEED, CHAT, {"reasoning_effort": "none", "chat_template_kwargs": {"thinking_budget": 7}}, "Budget: 7"),
    ],
)
async def test_a_model_with_efforts_or_a_budget_gets_them(
    shown: Any, template: str, path: str, fields: Any, line: str
) -> None:
    assert (await shown(template, path, fields)).splitlines()[0] == line


async def test_explicit_template_variables_are_kept(shown: Any) -> None:
    fields = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}

    assert await shown(QWEN, CHAT, fields) == QWEN_ON


PLAIN, TOOLS = "plain {{ thinking }}", "tools {{ enable_thinking }}"
DEFAULT = {"name": "default", "template": PLAIN}


def listed(*templates: Any) -> bytes:
    return json.dumps({"chat_template": templates}).encode()


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": listed(DEFAULT, {"name": "tool_use", "template": TOOLS})},
        {"tokenizer_config.json": listed(DEFAULT), "tool_use.jinja": TOOLS.encode()},
        {"tokenizer_config.json": json.dumps({"chat_template": PLAIN}).encode(), "tool_use.jinja": TOOLS.encode()},
        {"chat_template.jinja": PLAIN.encode(), "tool_use.jinja": TOOLS.encode()},
    ],
    ids=["in a list", "a file beside a list", "a file beside settings", "a file beside a file"],
)
async def test_the_template_for_tools_has_variables_of_its_own(cold_server: Any, files: dict[str, bytes]) -> None:
    cold_server.add_model("m", files)
    await cold_server.start()
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = BODIES[CHAT] | {"reasoning_effort": "none"}

    assert await cold_server.shown(CHAT, body) == "plain False"
    assert await cold_server.shown(CHAT, body | {"tools": tools}) == "tools False"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ m.thinking }}{{ 'enable_thinking' }}", ()),
        ("{% for m in messages %}{% set thinking = m.thinking %}{{ thinking }}{% endfor %}", ()),
        ("{% macro show(thinking) %}{{ thinking }}{% endmacro %}{{ show(1) }}", ()),
        ("{% set thinking = thinking | default(true) %}{{ thinking }}", ("thinking",)),
        (QWEN, ("enable_thinking",)),
        (DEEPSEEK, ("thinking",)),
        (OSS, ("reasoning_effort",)),
    ],
)
def test_only_variables_that_a_template_reads_count(source: str, names: tuple[str, ...]) -> None:
    assert ThinkingVariables.of(source, Environment().parse(source)).names == names


WISHES = st.builds(
    ThinkingRequest,
    st.none() | st.booleans(),
    st.none() | st.sampled_from(["none", "minimal", "low", "high", "max"]),
    st.none() | st.integers(0, 9),
)


@given(names=st.lists(st.sampled_from(list(VARIABLES)), unique=True), wish=WISHES, knows_none=st.booleans())
def test_no_variable_contradicts_another(names: list[str], wish: ThinkingRequest, knows_none: bool) -> None:
    values = ThinkingVariables(tuple(names), knows_none).values(wish)

    switches = {values[name] for name in values if VARIABLES[name] is Kind.SWITCH}
    assert switches == ({wish.thinks} if wish.thinks is not None and switches else set())
    if wish.thinks is False:
        assert values.get("thinking_budget", 0) == 0
    assert set(values) <= set(names)
