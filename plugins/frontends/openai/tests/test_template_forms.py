"""The forms that chat templates read: they are detected once, and every API has its messages in them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo_generation.templates.forms import ContentForm, TemplateForms
from dynamo_generation.templates.messages import template_messages
from dynamo_generation.templates.template import ChatTemplate, TemplateStore
from dynamo_plugin_frontend_openai.frontend import OpenAIFrontend
from hypothesis import given
from hypothesis import strategies as st

#: In the manner of DeepSeek: arguments are added to text, and calls are told by a content that is none.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ '[' + c.type + ' ' + c.function.name }}{{ ' ' + c.function.arguments + ']' }}"
    "{% endfor %}"
    "{% else %}{{ m.role + ':' + m.content + ';' }}{% endif %}{% endfor %}"
)
#: In the manner of gpt-oss: one call in a message, which has a content or thoughts.
ONE_CALL = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}({{ m.content or m.thinking or '' }})[{{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
#: In the manner of SmolVLM.
PARTS = (
    "{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'text' %}:{% endif %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}"
)
#: Multiplication of powers is not for the event loop.
SLOW = "{% set x = 2 ** 2 %}"
WEATHER = {"type": "function", "function": {"name": "weather"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Genf"}'}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SECOND_TURNS: dict[str, dict[str, Any]] = {
    CHAT: {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "mild"}]},
        ],
    },
    RESPONSES: {
        "tools": [{"type": "function", "name": "weather"}],
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Genf"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "mild"},
        ],
    },
    MESSAGES: {
        "max_tokens": 9,
        "tools": [{"name": "weather", "input_schema": {}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Genf"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "mild"}]},
        ],
    },
}


@pytest.fixture
async def store() -> AsyncIterator[TemplateStore]:
    store = TemplateStore(30.0)
    yield store
    await store.aclose()


async def detected(store: TemplateStore, source: str) -> TemplateForms:
    template = ChatTemplate(source)
    await store.detect(template)
    return template.forms(tools=True)


@pytest.mark.parametrize("path", SECOND_TURNS)
async def test_arguments_are_text_for_a_template_that_adds_them_to_text(cold_server: Any, path: str) -> None:
    cold_server.add_model("m", {"chat_template.jinja": TEXT_ARGUMENTS.encode()})
    await cold_server.start()

    prompt = await cold_server.shown(path, {"model": "m", **SECOND_TURNS[path]})

    assert prompt == 'user:Hi;[function weather {"city":"Genf"}]tool:mild;'


async def test_texts_become_parts_for_a_template_that_reads_parts(cold_server: Any) -> None:
    cold_server.add_model("m", {"chat_template.json": json.dumps({"chat_template": PARTS}).encode()})
    await cold_server.start()

    assert await cold_server.shown(CHAT, {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}) == "user:Hi;"


async def test_a_template_that_is_not_for_the_event_loop_has_the_same_forms(store: TemplateStore) -> None:
    for source in (TEXT_ARGUMENTS, ONE_CALL, PARTS):
        assert ChatTemplate(SLOW + source).detect_now() is False
        assert await detected(store, SLOW + source) == await detected(store, source), source


async def test_a_runaway_template_keeps_the_forms_found_in_its_source() -> None:
    store = TemplateStore(0.2)
    template = ChatTemplate(
        "{{ messages[0].content is none }}" + "{% for i in range(90000) %}" * 3 + "{% endfor %}" * 3
    )

    await store.detect(template)
    await store.aclose()

    assert template.forms(tools=False) == TemplateForms(no_content=None)


async def test_calls_thoughts_and_texts_that_one_message_cannot_hold_are_spread(store: TemplateStore) -> None:
    template = ChatTemplate(ONE_CALL)
    await store.detect(template)
    calls = [{"id": n, "function": {"name": "f", "arguments": f'{{"n": "{n}"}}'}} for n in "ab"]
    raw: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": ["not an id"], "content": "C"},
        {"role": "tool", "tool_call_id": "a", "content": "A"},
    ]

    prompt = template.render(template.values(template_messages(raw, template.forms(tools=False))))

    assert prompt == 'user:Hi;(Hm.\n\nI look.)[{"n": "a"}]tool:A;()[{"n": "b"}]tool:B;tool:C;'


def test_describe_template_reports_forms_and_faults() -> None:
    described = OpenAIFrontend.describe_template({"chat_template.jinja": ONE_CALL.encode()})

    assert described["arguments of calls"] == "object"
    assert described["reasoning"] == "thinking"
    assert "each call has a message of its own" in described["changed"]
    assert "broken" in OpenAIFrontend.describe_template({"chat_template.jinja": b"{% if %}"})["template"]
    assert OpenAIFrontend.describe_template({}) == {}


TEXTS = st.text("ab\n", max_size=3)
CONTENTS = st.none() | TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), max_size=2)
CALLS = st.lists(
    st.builds(lambda n: {"id": n, "function": {"name": "f", "arguments": f'{{"n": "{n}"}}'}}, st.sampled_from("123")),
    max_size=3,
)
CONVERSATIONS = st.lists(
    st.builds(
        lambda role, content, calls: {
            "role": role,
            "content": content,
            "tool_calls": calls if role == "assistant" else None,
        },
        st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        CONTENTS,
        CALLS,
    ),
    max_size=8,
)
FORMS = st.builds(
    TemplateForms,
    st.dictionaries(st.sampled_from(["system", "user", "assistant", "tool"]), st.sampled_from(ContentForm)),
    st.booleans(),
    st.sampled_from(["", None]),
    st.just(()),
    st.booleans(),
    *[st.booleans() for _ in range(7)],
)


def texts_and_calls(messages: list[dict[str, Any]]) -> tuple[str, int]:
    """Return all that is said, without white space, in order of the text; and how many calls there are."""
    said: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        said += [content] if isinstance(content, str) else [part["text"] for part in content]
    calls = sum(len(message.get("tool_calls") or ()) for message in messages)
    return "".join(sorted("".join("".join(said).split()))), calls


@given(raw=CONVERSATIONS, forms=FORMS)
def test_no_form_loses_a_text_or_a_call(raw: list[dict[str, Any]], forms: TemplateForms) -> None:
    before = json.dumps(raw)

    made = template_messages(raw, forms)

    assert texts_and_calls(made) == texts_and_calls(raw)
    assert json.dumps(raw) == before
