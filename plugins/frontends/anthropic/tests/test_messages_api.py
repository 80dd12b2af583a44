"""The Anthropic API: what the model is shown of a request, and what becomes of its answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic.types.beta import message_count_tokens_params as beta_count
from anthropic.types.beta import message_create_params as beta_create
from dynamo_core import BackendError, CompletionUsage, FinishReason, LLMEngineOutput, Parsers
from dynamo_core.errors import ModelNotFound, ServiceOverloaded, StreamIncomplete, Unavailable
from dynamo_generation.answers.content_blocks import Blocks, Change
from dynamo_plugin_frontend_anthropic.requests import (
    COUNT_TOKENS_PASSIVE,
    MESSAGES_PASSIVE,
    CountTokensRequest,
    MessagesRequest,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"

#: Shows all that it is given.
TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% if enable_thinking is defined %}THINK {{ enable_thinking }}\n{% endif %}"
    "{% if reasoning_effort %}EFFORT {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}"
    "{% if m.is_error %}!{% endif %}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.id }} {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nOslo, then.\n</think>\n\n"
#: The signature of thoughts that the client can read.
UNSIGNED = "AQAAAAA="


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest.fixture
async def sdk(server: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """Yield the official client."""
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}], **fields}


def events(data: bytes) -> list[dict[str, Any]]:
    """Return the data of all events. Each names its type twice, and the two are the same."""
    found = []
    for name, value in re.findall(r"event: (.*)\ndata: (.*)\n\n", data.decode()):
        found.append(json.loads(value))
        assert found[-1]["type"] == name
    return found


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of events, which must come in order: one block after the other."""
    message: dict[str, Any] = found[0]["message"]
    arguments: dict[int, str] = {}
    open_at: int | None = None
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert (open_at, event["index"]) == (None, len(message["content"]))
                open_at = event["index"]
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_at
                block, delta = message["content"][open_at], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_at
                open_at = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message |= {key: event[key] for key in ("context_management",) if key in event}
    assert open_at is None
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": None} if "id" in block else block for block in message["content"]]
    return {**message, "id": None, "content": content}


async def both(server: Any, **fields: Any) -> dict[str, Any]:
    """Return the message of an answer, which is the same streamed and whole."""
    stream = await server.post(PATH, body(**fields, stream=True))
    whole = await server.post(PATH, body(**fields))
    assert (stream.status, whole.status) == (200, 200), whole.body
    assert stream.whole
    assert stream.body.endswith(b'data: {"type":"message_stop"}\n\n')
    assert without_ids(folded(events(stream.body))) == without_ids(whole.json())
    message: dict[str, Any] = whole.json()
    return message


# What the model is shown.


async def shown(server: Any, **fields: Any) -> str:
    """Return the prompt of a request."""
    return await server.shown(PATH, body(**fields))  # type: ignore[no-any-return]


async def test_the_system_prompt_comes_first_as_text_or_as_blocks(server: Any) -> None:
    blocks = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind."},
    ]

    for system in ("Be\nkind.", blocks):
        assert await shown(server, system=system) == "system: Be\nkind.\nuser: Hi\nassistant: "


async def test_a_conversation_with_tools_and_thinking_becomes_a_chat_request(server: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Oslo,"}, {"type": "text", "text": "now?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "?"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Well?"},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ]

    assert await shown(server, messages=messages) == (
        "user: Oslo,\nnow?\nassistant: (hm)Let me see.<t1 weather city=Oslo><t2 weather>\n"
        "tool[t1]: rain\ntool[t2]!: ?\nuser: Well?\nsystem: Be brief.\nassistant: "
    )


@pytest.mark.parametrize("begun", ["The\nbe", [{"type": "text", "text": "The"}, {"type": "text", "text": "be"}]])
async def test_an_answer_that_the_client_begins_is_continued(server: Any, begun: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]

    assert await shown(server, messages=messages) == "user: Hi\nassistant: The\nbe"


async def test_tools_are_shown_in_the_form_that_templates_know(server: Any) -> None:
    prompt = await shown(server, tools=[{**TOOLS[0], "type": "custom", "strict": True}])

    tool = json.loads(prompt.splitlines()[0].removeprefix("TOOL "))
    function = {"name": "weather", "parameters": SCHEMA, "description": "The weather.", "strict": True}
    assert tool == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "THINK True"),
        ({"thinking": {"type": "disabled"}}, "THINK False"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "THINK False"),
        ({"output_config": {"effort": "low"}}, "THINK True\nEFFORT low"),
        ({"chat_template_kwargs": {"reasoning_effort": "own"}}, "EFFORT own"),
    ],
)
async def test_thinking_fields_become_template_variables(server: Any, fields: dict[str, Any], line: str) -> None:
    assert (await shown(server, **fields)).startswith(f"{line}\n")


async def test_request_fields_reach_the_engine(server: Any, model: Any) -> None:
    model.says("x")
    await server.post(PATH, body(max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["END", "."]))

    request = (await model.call()).request

    assert (request.stop_conditions.max_tokens, request.stop_conditions.stop) == (7, ["END", "."])
    sampling = request.sampling_options
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)


@pytest.mark.parametrize(
    ("choice", "guided"),
    [
        ({"type": "auto"}, None),
        ({"type": "none"}, None),
        ({"type": "tool", "name": "weather"}, SCHEMA),
    ],
)
async def test_a_tool_that_must_be_called_guides_the_decoding(
    server: Any, model: Any, choice: dict[str, Any], guided: Any
) -> None:
    model.says("x")
    assert (await server.post(PATH, body(tools=TOOLS, tool_choice=choice))).status == 200

    decoding = (await model.call()).request.sampling_options.guided_decoding

    assert (decoding and decoding.json) == guided


async def test_a_form_of_the_answer_guides_the_decoding(server: Any, model: Any) -> None:
    value = '{"city": "Oslo"}'
    model.says(value)
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}

    message = await both(server, output_config=wanted)

    assert (await model.call()).request.sampling_options.guided_decoding.json == SCHEMA
    assert message["content"] == [{"type": "text", "text": value}]


async def test_any_tool_may_be_demanded_and_only_one_of_them(server: Any, model: Any) -> None:
    model.says("x")
    choice = {"type": "any", "disable_parallel_tool_use": True}
    assert (await server.post(PATH, body(tools=TOOLS, tool_choice=choice))).status == 200

    decoding = (await model.call()).request.sampling_options.guided_decoding

    assert (decoding.json["type"], decoding.json["maxItems"]) == ("array", 1)


async def test_an_engine_that_takes_text_gets_a_chat_request(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text")
    start = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    usage = CompletionUsage(prompt_tokens=30, completion_tokens=9, total_tokens=39)
    model.puts(
        LLMEngineOutput(delta={"role": "assistant", "reasoning_content": "hm"}),
        LLMEngineOutput(delta={"content": "Let me see."}),
        LLMEngineOutput(delta={"tool_calls": [start]}),
        LLMEngineOutput(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
        LLMEngineOutput(delta={"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]}),
        LLMEngineOutput(finish_reason=FinishReason.STOP, completion_usage=usage),
    )
    await cold_server.start()

    message = await both(cold_server, system="Be kind.", tools=TOOLS)

    asked = (await model.call()).request.body
    assert asked["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert asked["tools"][0]["function"]["parameters"] == SCHEMA
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": UNSIGNED},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert message["usage"] == {"input_tokens": 30, "output_tokens": 9}


@pytest.mark.parametrize("signature", [{"signature": UNSIGNED}, {"signature": "from elsewhere"}, {}])
async def test_thinking_blocks_are_accepted_with_any_signature(server: Any, signature: Any) -> None:
    thought = {"type": "thinking", "thinking": "hm", **signature}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": "Go on"},
    ]

    assert "assistant: (hm)Yes?\n" in await shown(server, messages=messages)


async def test_thoughts_that_are_left_out_come_back_from_their_signature(server: Any, model: Any) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    model.says(THOUGHT + "Yes?")

    message = await both(server, thinking=thinking)

    [thought, text] = message["content"]
    assert (thought["thinking"], text["text"]) == ("", "Yes?")
    assert len(thought["signature"]) > len(UNSIGNED)
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": "Go on"},
    ]
    for _ in range(model.count):
        await model.call()
    assert "assistant: (Oslo, then.)Yes?\n" in await shown(server, messages=messages, thinking=thinking)


async def test_cached_prompt_tokens_are_counted_separately(server: Any, model: Any) -> None:
    prompt = len("user: Hi\nassistant: ")

    def script(call: Any) -> None:
        usage = CompletionUsage(prompt_tokens=prompt, completion_tokens=2, total_tokens=prompt + 2, cached_tokens=16)
        call.say("Hi", finish_reason=FinishReason.STOP, completion_usage=usage)
        call.complete()

    model.script = script

    message = await both(server)

    assert message["usage"] == {
        "input_tokens": prompt - 16,
        "cache_read_input_tokens": 16,
        "cache_creation_input_tokens": 0,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }


# What becomes of the answer.


async def test_a_plain_answer_is_one_block_of_text(server: Any, model: Any) -> None:
    model.parsers = Parsers()
    model.says("Hel", 'lo "you"\n', "é😀")

    message = await both(server)

    assert message["id"].startswith("msg_")
    assert {**message, "id": None} == {
        "id": None,
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": 'Hello "you"\né😀'}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": len("user: Hi\nassistant: "), "output_tokens": len('Hello "you"\né😀'.encode())},
    }


@pytest.mark.parametrize("parsed", [True, False])
async def test_a_stream_has_exactly_these_events_in_this_order(server: Any, model: Any, parsed: bool) -> None:
    if not parsed:
        model.parsers = Parsers()
    seen = await server.hello(PATH, body(stream=True), b'"message_stop"}\n\n')

    assert [event["type"] for event in events(seen)] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert b"[DONE]" not in seen


async def test_a_first_token_that_is_no_whole_character_begins_the_text_all_the_same(server: Any, model: Any) -> None:
    model.parsers = Parsers()
    connection, call = await server.asked(PATH, body(stream=True))
    first, second = "é".encode()
    call.put(LLMEngineOutput([first]))
    seen = await connection.until(b"message_start") + await connection.until(b"\n\n")
    call.put(LLMEngineOutput([second]))
    seen += await connection.until("é".encode())
    call.finish()
    seen += await connection.until(b'"message_stop"}\n\n')

    assert folded(events(seen))["content"] == [{"type": "text", "text": "é"}]


async def test_thoughts_text_and_calls_are_blocks_of_their_own(server: Any, model: Any) -> None:
    model.says(THOUGHT, "Let me see.\n", CALL)

    message = await both(server, tools=TOOLS)

    thought, text, call = message["content"]
    assert thought == {"type": "thinking", "thinking": "Oslo, then.", "signature": UNSIGNED}
    assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
    assert {**call, "id": None} == {"type": "tool_use", "id": None, "name": "weather", "input": {"city": "Oslo"}}
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("parsed", [True, False])
async def test_an_empty_answer_is_an_empty_text(server: Any, model: Any, parsed: bool) -> None:
    if not parsed:
        model.parsers = Parsers()
    model.says()

    assert (await both(server))["content"] == [{"type": "text", "text": ""}]


@pytest.mark.parametrize("parsed", [True, False])
@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("One. Two", FinishReason.STOP, ("stop_sequence", ".")),
        ("One", FinishReason.LENGTH, ("max_tokens", None)),
        ("One", FinishReason.EOS, ("end_turn", None)),
        ("One", FinishReason.CONTENT_FILTER, ("refusal", None)),
    ],
)
async def test_the_stop_reason_is_reported(
    server: Any, model: Any, parsed: bool, text: str, reason: FinishReason, expected: Any
) -> None:
    if not parsed:
        model.parsers = Parsers()
    model.says(text, reason=reason)

    message = await both(server, stop_sequences=["\n\n", "."])

    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert message["content"] == [{"type": "text", "text": "One"}]


async def test_a_call_that_was_cut_off_is_text(server: Any, model: Any) -> None:
    cut = CALL[: CALL.index("Oslo")]
    model.says(cut, reason=FinishReason.LENGTH)

    message = (await server.post(PATH, body(tools=TOOLS))).json()

    assert message["content"] == [{"type": "text", "text": cut}]
    assert message["stop_reason"] == "max_tokens"


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30))
async def test_streamed_and_whole_answers_agree_however_cut(server: Any, model: Any, cuts: list[int]) -> None:
    model.says_cut(THOUGHT + "Ja, é😀.\n" + CALL + " so", cuts)

    assert [block["type"] for block in (await both(server, tools=TOOLS))["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "text",
    ]


def test_blocks_do_not_begin_twice_and_pieces_of_unknown_calls_are_left_out() -> None:
    from dynamo_core import ToolCallArguments, ToolCallStart

    blocks = Blocks()
    start = ToolCallStart(0, "c", "f")

    steps = blocks.feed([ToolCallArguments(3, "x"), start, start, ToolCallArguments(0, "{}")]) + blocks.end()

    assert [step.change for step in steps] == [Change.BEGUN, Change.MORE, Change.ENDED]
    assert [block.text for block in blocks.all] == ["{}"]


# What is refused, and how it is told.


def error(reply: Any) -> tuple[int, str, str]:
    told = reply.json()
    assert set(told) == {"type", "error"}
    assert (told["type"], set(told["error"])) == ("error", {"type", "message"})
    return reply.status, told["error"]["type"], told["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}, "messages[1].content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}]}]},
            "messages[0].content",
        ),
        ({"system": 5}, "system"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"type": "computer_20251124", "name": "computer"}]}, "tools[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "nobody"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "perhaps"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"nonsense": 1}, "nonsense"),
        ({"n": 2}, "`n`"),
    ],
)
async def test_invalid_fields_are_errors_in_the_apis_form(
    server: Any, model: Any, fields: dict[str, Any], named: str
) -> None:
    request = {name: value for name, value in body(**fields).items() if value is not None}

    status, kind, message = error(await server.post(PATH, request))

    assert (status, kind) == (400, "invalid_request_error")
    assert named in message
    assert model.count == 0


#: Fields with a value that asks for something, without changing what the answer means.
WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"billing_policy": "x"},
    {"cache_control": {"type": "ephemeral"}},
    {"compaction": {"type": "auto"}},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"diagnostics": {"previous_message_id": "msg_1"}},
    {"fallback_credit_token": "x"},
    {"fallbacks": [{"model": "other"}]},
    {"metadata": {"user_id": "u"}},
    {"output_config": {"task_budget": {"type": "tokens", "total": 1000}}},
    {"service_tier": "standard_only"},
    {"speed": "fast"},
    {"user_profile_id": "u"},
    {"workspace_id": "w"},
]


@pytest.mark.parametrize("fields", WITHOUT_EFFECT, ids=lambda fields: next(iter(fields)))
async def test_fields_without_effect_are_accepted(server: Any, fields: dict[str, Any]) -> None:
    assert await shown(server, **fields) == "user: Hi\nassistant: "


async def test_context_management_reports_no_applied_edits(server: Any, model: Any) -> None:
    model.says("x")

    message = await both(server, context_management={"edits": []})
    assert message["context_management"] == {"applied_edits": []}
    assert "context_management" not in await both(server)


def test_every_field_of_the_official_client_is_known() -> None:
    for params, known, passive in (
        (beta_create.MessageCreateParamsStreaming, MessagesRequest, MESSAGES_PASSIVE),
        (beta_count.MessageCountTokensParams, CountTokensRequest, COUNT_TOKENS_PASSIVE),
    ):
        # `betas` is a header.
        assert set(params.__annotations__) - {"betas"} - set(known.__struct_fields__) - set(passive) == set()


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_thread_is_refused_so_that_the_client_sends_the_conversation(server: Any, path: str) -> None:
    fields = body(thread={"id": "t"})
    if path == COUNT:
        del fields["max_tokens"]

    reply = await server.post(path, fields)

    assert reply.status == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_texts_of_other_kinds_are_shown_as_text(server: Any) -> None:
    found = {
        "type": "search_result",
        "title": "Oslo",
        "source": "https://x",
        "content": [{"type": "text", "text": "a city"}],
    }
    paper = {
        "type": "document",
        "title": "Paper",
        "source": {"type": "text", "media_type": "text/plain", "data": "words"},
    }
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [reference]}
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    messages = [
        {"role": "user", "content": [found, paper]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]

    prompt = await shown(server, messages=messages)

    assert "Oslo (https://x)\na city\n" in prompt
    assert "Paper\nwords\n" in prompt
    assert "tool[t]: The tool weather is there to be called." in prompt


async def test_tools_that_a_server_would_run_are_left_out_and_named(server: Any, model: Any) -> None:
    model.says("x")
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, *TOOLS]
    replies = [await server.post(PATH, body(tools=tools, stream=stream)) for stream in (False, True)]

    assert [reply.headers["x-dynamo-ignored-fields"] for reply in replies] == ["tools[0]"] * 2
    assert model.tokenizer.decode((await model.call()).request.token_ids).count("TOOL ") == 1


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_errors_of_the_server_have_the_names_of_this_api(cold_server: Any, path: str) -> None:
    await cold_server.start()
    fields = body() if path == PATH else {"model": "m", "messages": body()["messages"]}
    assert error(await cold_server.post(path, fields))[:2] == (503, "overloaded_error")

    model = cold_server.add_model()
    assert error(await cold_server.post(path, {**fields, "model": "x"}))[:2] == (404, "not_found_error")
    assert error(await cold_server.post(path, b"{"))[:2] == (400, "invalid_request_error")
    assert error(await cold_server.post(path, {**fields, "model": "\ud800"}))[0] in (400, 404)
    if path == PATH:
        for refusal, status, kind in (
            (ServiceOverloaded(retry_after=3), 503, "overloaded_error"),
            (Unavailable("gone"), 503, "overloaded_error"),
            (ModelNotFound("gone"), 404, "not_found_error"),
            (BackendError.Unknown("secret"), 500, "api_error"),
        ):
            model.refusal = refusal
            reply = await cold_server.post(path, fields)
            assert error(reply)[:2] == (status, kind)
            assert b"secret" not in reply.body
        model.refusal = ServiceOverloaded(retry_after=3)
        assert (await cold_server.post(path, fields)).headers["retry-after"] == "3"


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_clean_end(server: Any) -> None:
    connection, call, _ = await server.begun(PATH, body(stream=True))
    call.fail(StreamIncomplete("secret"))

    rest = await connection.ended()

    last = rest[rest.index(b"event: error\n") :]
    assert b"message_stop" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    assert b"secret" not in last
    assert json.loads(last.split(b"data: ")[1].split(b"\n")[0]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "The worker of this request was lost, please retry"},
    }
    assert (await server.record()).endpoint == "messages"


# Counting.


async def test_count_tokens_matches_the_prompt_without_asking_an_engine(server: Any, model: Any) -> None:
    model.says("x")
    fields = {"system": "Be kind.", "tools": TOOLS, "messages": [{"role": "user", "content": "Hi"}]}

    count = (await server.post(COUNT, {"model": "m", **fields})).json()

    assert model.count == 0
    assert count == {"input_tokens": (await both(server, **fields))["usage"]["input_tokens"]}


async def test_a_conversation_too_long_to_be_answered_can_be_counted(server: Any) -> None:
    fields = {"model": "m", "messages": [{"role": "user", "content": "x" * 5000}]}

    assert (await server.post(COUNT, fields)).json()["input_tokens"] > 5000
    assert error(await server.post(PATH, {**fields, "max_tokens": 1}))[0] == 400


async def test_count_tokens_refuses_unanswerable_requests(server: Any) -> None:
    wanted = {"format": {"type": "xml"}}
    fields = {"model": "m", "messages": body()["messages"], "tools": TOOLS, "output_config": wanted}

    assert error(await server.post(PATH, {**fields, "max_tokens": 5}))[0] == 400
    assert "output_config.format" in error(await server.post(COUNT, fields))[2]


async def test_limits_do_not_belong_in_a_request_to_count(server: Any) -> None:
    assert "max_tokens" in error(await server.post(COUNT, body()))[2]


# The official client.


async def test_the_official_client_reads_answers_and_streams(sdk: anthropic.AsyncAnthropic, model: Any) -> None:
    model.says(THOUGHT, "Let me see. ", CALL)
    asked: dict[str, Any] = {**body(), "tools": TOOLS}

    message = await sdk.messages.create(**asked)
    async with sdk.messages.stream(**asked) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()

    assert "".join(texts).strip() == "Let me see."
    for each in (message, final):
        assert [block.type for block in each.content] == ["thinking", "text", "tool_use"]
        call: Any = each.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"city": "Oslo"}
        assert each.stop_reason == "tool_use"
        assert each.usage.output_tokens == message.usage.output_tokens > 0


async def test_the_official_client_gets_its_own_errors(sdk: anthropic.AsyncAnthropic, model: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await sdk.messages.create(**{**body(), "model": "x"})
    assert missing.value.type == "not_found_error"

    def broken(call: Any) -> None:
        call.say("Hel")
        call.fail(StreamIncomplete("gone"))

    model.script = broken
    with pytest.raises(anthropic.APIError):
        async with sdk.messages.stream(**body()) as stream:
            await stream.get_final_message()


async def test_models_are_listed_in_pages_for_clients_of_the_api(sdk: anthropic.AsyncAnthropic, server: Any) -> None:
    page = await sdk.models.list(limit=1)
    one = await sdk.models.retrieve("m")

    assert [model.id for model in page.data] == ["m"]
    assert (one.id, one.display_name, one.type, one.created_at.year) == ("m", "m", "model", 1970)
    reply = await server.get("/v1/models")
    assert reply.json()["object"] == "list", "without the header it is the list of the OpenAI API"


async def test_errors_of_the_model_list_are_worded_as_the_api_does(sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match=r"'type': 'not_found_error'.*Model not found: 'none'"):
        await sdk.models.retrieve("none")
    with pytest.raises(anthropic.BadRequestError, match="limit is not a number from 1 to 1000"):
        await sdk.models.list(limit=0)
    with pytest.raises(anthropic.BadRequestError, match="after_id: Validation: There is no model 'none'"):
        await sdk.models.list(after_id="none")
