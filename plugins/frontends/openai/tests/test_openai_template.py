"""Chat templates."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument, Unknown
from dynamo_core.protocol import ModelCard
from dynamo_generation.templates.template import ChatTemplate, TemplateStore, load_template

USER = [{"role": "user", "content": "Hi"}]


class Model:
    def __init__(self, files: dict[str, bytes] | None = None, **card: Any) -> None:
        self.card = ModelCard(name="m", instance_id=1, **card)
        self.name = "m"
        self.files = files or {}

    def file(self, name: str) -> bytes | None:
        return self.files.get(name)


def load(files: dict[str, bytes], **card: Any) -> ChatTemplate:
    return load_template(Model(files, tokenizer="hf", **card))  # type: ignore[arg-type]


def render(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    return template.render(template.values(messages, **options))


def test_models_without_files_have_lines_of_roles() -> None:
    template = load_template(Model())  # type: ignore[arg-type]

    assert render(template, USER) == "user: Hi\nassistant: "
    assert render(template, USER, add_generation_prompt=False) == "user: Hi\n"


def test_blocks_are_trimmed_as_models_expect() -> None:
    template = ChatTemplate("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n")

    assert render(template, USER) == "user\n"


def test_json_has_no_html_escapes() -> None:
    template = ChatTemplate("{{ messages | tojson }}|{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}")

    rendered = render(template, [{"role": "user", "content": "<é & 'x'>"}])

    assert rendered.startswith('[{"role": "user", "content": "<é & \'x\'>"}]|{\n')
    assert rendered.index('"a"') < rendered.index('"b"')


def test_a_template_that_trips_over_the_messages_is_a_bad_request() -> None:
    with pytest.raises(InvalidArgument):
        render(ChatTemplate("{{ messages[0].content + 1 }}"), USER)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_templates_are_in_a_sandbox(source: str) -> None:
    with pytest.raises(InvalidArgument):
        render(ChatTemplate(source), USER)


def test_time_and_generation_marks_are_known() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}")

    assert render(template, USER) == f"{time.strftime('%Y')}x"


def test_special_tokens_come_from_the_tokenizers_settings() -> None:
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}|{{ eos_token }}",
    }

    assert render(load({"tokenizer_config.json": json.dumps(settings).encode()}), USER) == "<s>|</s>"


def test_the_template_file_goes_before_the_settings() -> None:
    files = {"chat_template.jinja": b"F", "tokenizer_config.json": b'{"chat_template": "S"}'}

    assert render(load(files), USER) == "F"


def test_a_model_with_files_but_no_template_cannot_chat() -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        load({})


def test_settings_that_cannot_be_read_are_the_models_fault() -> None:
    with pytest.raises(Unknown, match="tokenizer_config"):
        load({"tokenizer_config.json": b"{"})


async def test_a_template_is_compiled_once_for_each_version_of_a_model() -> None:
    store = TemplateStore(5.0)
    one, same, other = Model(checksum="1"), Model(checksum="1"), Model(checksum="2")

    first = await store.load(one)  # type: ignore[arg-type]

    assert store.known(same) is first  # type: ignore[arg-type]
    assert store.known(other) is None  # type: ignore[arg-type]
    assert await store.load(other) is not first  # type: ignore[arg-type]
    assert await store.load(one) is first  # type: ignore[arg-type]


async def test_parts_of_text_are_lines_and_variables_passed(server: Any) -> None:
    template = b"{{ messages[0].content }}|{{ mood }}|{{ messages[1].name }}|{{ add_generation_prompt }}"
    model = server.add_model("t", files={"chat_template.jinja": template}, checksum="1")
    model.script = lambda call: call.finish(text="x")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    reply = await server.chat(
        model="t",
        messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": "x", "name": "bob"}],
        chat_template_kwargs={"mood": "good"},
        add_generation_prompt=False,
        nvext={"annotations": ["formatted_prompt"]},
    )

    assert reply.json()["nvext"]["formatted_prompt"] == "a\nb|good|bob|False"


#: How templates of models deal with the content of a message that only calls tools, and what they make of it.
_CALLING = {
    "prints it": ("[{{ message['content'] }}]", "[]"),
    "adds it to text": ("{{ '[' + message['content'] + ']' }}", "[]"),
    "trims it": ("[{{ message.content | trim }}]", "[]"),
    "asks whether it is there": (
        "{% if message.content %}[{{ message.content }}]{% elif message.tool_calls %}calls{% endif %}",
        "calls",
    ),
    "asks whether it is defined": (
        "{% if message['content'] is defined %}[{{ message['content'] }}]{% endif %}",
        "[]",
    ),
    "asks for text, and iterates over anything else": (
        "{% if message.content is string %}[{{ message.content }}]"
        "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
        "[]",
    ),
    "tells calls by none, as DeepSeek": (
        "{% if message['role'] == 'assistant' and message['content'] is none %}calls"
        "{% elif message['content'] is not none %}[{{ message['content'] }}]{% endif %}",
        "calls",
    ),
    "tells calls by none, by another name": (
        "{% set content = message.get('content') %}{% if content is none %}calls{% else %}[{{ content }}]{% endif %}",
        "calls",
    ),
    "compares with none": (
        "{% if message.content != None %}[{{ message.content }}]{% else %}calls{% endif %}",
        "calls",
    ),
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(("source", "shown"), _CALLING.values(), ids=_CALLING)
@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "left out"])
async def test_a_message_that_only_calls_tools_shows_no_text(
    server: Any, source: str, shown: str, content: dict[str, None]
) -> None:
    model = server.add_model("t", files={"chat_template.jinja": _last(source)}, checksum=source)
    model.script = lambda call: call.finish(text="x")

    reply = await server.chat(
        model="t",
        messages=[*USER, {"role": "assistant", **content, "tool_calls": [_CALL]}],
        nvext={"annotations": ["formatted_prompt"]},
    )

    assert reply.json()["nvext"]["formatted_prompt"] == shown


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "w", "input": {}}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "mild"}]},
                ],
            },
        ),
    ],
)
async def test_the_other_apis_show_no_text_for_a_call_either(server: Any, path: str, body: dict[str, Any]) -> None:
    source = b"{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"
    model = server.add_model("t", files={"chat_template.jinja": source}, checksum="other")
    model.script = lambda call: call.finish(text="x")

    assert (await server.post(path, {"model": "t", **body})).status == 200

    prompt = bytes((await model.call()).request.token_ids).decode()
    assert "assistant:;" in prompt
    assert "None" not in prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
            },
        ),
    ],
)
async def test_the_other_apis_have_their_parts_on_lines_too(
    server: Any, model: Any, path: str, body: dict[str, Any]
) -> None:
    model.script = lambda call: call.finish(text="x")

    await server.post(path, {"model": "m", **body})

    assert bytes((await model.call()).request.token_ids) == b"user: a\nb\nassistant: "


def _last(source: str) -> bytes:
    """Return a template that shows the last message only."""
    return ("{% set message = messages[-1] %}" + source).encode()


async def test_template_variables_of_the_frontend_cannot_be_set(server: Any) -> None:
    reply = await server.chat(chat_template_kwargs={"messages": []})

    assert reply.status == 400


async def test_a_templates_refusal_is_a_400_with_its_message(server: Any) -> None:
    server.add_model("t", files={"chat_template.jinja": b"{{ raise_exception('no system role') }}"}, checksum="2")

    reply = await server.chat(model="t")

    assert reply.status == 400
    assert "no system role" in reply.json()["message"]
