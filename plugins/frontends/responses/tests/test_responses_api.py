"""The Responses API: what the model is shown of a request, and what becomes of its answer."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from dynamo_core import CompletionUsage, FinishReason, LLMEngineOutput, Parsers
from dynamo_core.errors import ServiceOverloaded, StreamIncomplete
from dynamo_generation.requests.opaque_thoughts import pack_thoughts, unpack_thoughts
from dynamo_plugin_frontend_responses.requests import (
    INPUT_TOKENS_PASSIVE,
    RESPONSES_PASSIVE,
    InputTokensRequest,
    ResponsesRequest,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import input_token_count_params, response_create_params

PATH = "/v1/responses"

#: Shows all that it is given.
TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% if reasoning_effort %}EFFORT {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.id }} {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nOslo, then.\n</think>\n\n"


@pytest.fixture
def template() -> str:
    return TEMPLATE


async def test_encrypted_reasoning_restores_the_thoughts(server: Any, model: Any) -> None:
    model.says(THOUGHT + "Yes?")
    fields = {"include": ["reasoning.encrypted_content"], "store": False}

    response = await both(server, **fields)

    thought, said = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Oslo, then."}]
    kept = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
    for _ in range(model.count):
        await model.call()
    assert "assistant: (Oslo, then.)Yes?\n" in await shown(
        server, input=[kept, said, {"role": "user", "content": "Go"}]
    )


@pytest.mark.parametrize(
    "opaque", ["gAAAAABo", "AQAAAAE=", "AQ==", "AQAAAABh", "not base64!", "é", "AgAAAAA="], ids=str
)
async def test_thoughts_that_another_server_has_encrypted_are_left_out(server: Any, opaque: str) -> None:
    items = [
        {"type": "reasoning", "summary": [], "encrypted_content": opaque},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go"},
    ]

    assert "assistant: Yes?\n" in await shown(server, input=items)


@given(thoughts=st.text())
def test_packed_thoughts_are_restored_and_no_change_goes_unseen(thoughts: str) -> None:
    opaque = pack_thoughts(thoughts)

    assert unpack_thoughts(opaque) == thoughts.encode(errors="replace").decode()
    assert unpack_thoughts(opaque[4:]) == ""
    assert unpack_thoughts(opaque[:-4] + "AAAA") in ("", thoughts)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi", **fields}


def events(data: bytes) -> list[dict[str, Any]]:
    """Return the data of all events. Each names its type twice, and they are numbered from 0."""
    found = []
    for name, value in re.findall(r"event: (.*)\ndata: (.*)\n\n", data.decode()):
        found.append(json.loads(value))
        assert (found[-1]["type"], found[-1]["sequence_number"]) == (name, len(found) - 1)
    return found


def check_events(found: list[dict[str, Any]]) -> None:
    """Assert that the last event holds the pieces of the others."""
    response = found[-1]["response"]
    texts: dict[str, str] = {}
    items: list[Any] = []
    for event in found:
        kind, item = event["type"], event.get("item_id", "")
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items) == len(texts)
            texts[event["item"]["id"]] = ""
        elif kind.endswith(".delta"):
            texts[item] += event["delta"]
        elif kind == "response.content_part.done":
            assert event["part"]["text"] == texts[item]
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == texts[item]
        elif kind == "response.custom_tool_call_input.done":
            assert event["input"] == texts[item]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == texts[item]
        elif kind == "response.output_item.done":
            items.append(event["item"])
    assert response["output"] == items
    for event in found[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
        assert event["response"]["id"] == response["id"]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    return {**response, "id": None, "created_at": None, "output": output}


async def both(server: Any, **fields: Any) -> dict[str, Any]:
    """Return the response, which is the same streamed and whole."""
    stream = await server.post(PATH, body(**fields, stream=True))
    whole = await server.post(PATH, body(**fields))
    assert (stream.status, whole.status) == (200, 200), whole.body
    assert stream.whole
    assert b"[DONE]" not in stream.body
    found = events(stream.body)
    check_events(found)
    response: dict[str, Any] = whole.json()
    assert found[-1]["type"] == f"response.{response['status']}"
    assert without_ids(found[-1]["response"]) == without_ids(response)
    return response


# What the model is shown.


async def shown(server: Any, **fields: Any) -> str:
    """Return the prompt of a request."""
    return await server.shown(PATH, body(**fields))  # type: ignore[no-any-return]


async def test_an_input_becomes_a_user_message_after_the_instructions(server: Any) -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "you"}]}

    for each in ("Hi\nyou", [message], [{"type": "message", **message}]):
        prompt = await shown(server, input=each, instructions="Be kind.")
        assert prompt == "system: Be kind.\nuser: Hi\nyou\nassistant: "


async def test_items_of_one_answer_are_one_message_and_results_have_their_own(server: Any) -> None:
    call = {"type": "function_call", "id": "fc_1", "status": "completed", "name": "weather"}
    said = {"type": "output_text", "text": "Let me see.", "annotations": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Oslo?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]},
        {**call, "call_id": "c1", "arguments": '{"city": "Oslo"}'},
        {**call, "call_id": "c2", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Well?"},
    ]

    assert await shown(server, input=items) == (
        "developer: Be brief.\nuser: Oslo?\nassistant: (hm)Let me see.<c1 weather city=Oslo><c2 weather>\n"
        "tool[c1]: rain\ntool[c2]: ?\nassistant: (so)No.\nuser: Well?\nassistant: "
    )


async def test_thoughts_after_something_said_begin_another_answer(server: Any) -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        thought("a"),
        thought("b"),
        {"role": "assistant", "content": "x"},
        thought("c"),
        {"role": "user", "content": "y"},
    ]

    assert await shown(server, input=items) == ("assistant: (ab)x\nassistant: (c)\nuser: y\nassistant: ")


async def test_an_answer_may_be_sent_back_as_it_came(server: Any, model: Any) -> None:
    model.says(THOUGHT, "Let me see.", CALL)
    output = (await server.post(PATH, body(tools=TOOLS))).json()["output"]
    await model.call()
    call = output[-1]

    back = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    prompt = await shown(server, input=[{"role": "user", "content": "Oslo?"}, *output, back])

    assert prompt == (
        f"user: Oslo?\nassistant: (Oslo, then.)Let me see.<{call['call_id']} weather city=Oslo>\n"
        f"tool[{call['call_id']}]: rain\nassistant: "
    )


async def test_tools_and_effort_are_shown_as_in_a_chat_request(server: Any) -> None:
    prompt = await shown(server, tools=TOOLS, reasoning={"effort": "low", "summary": "auto"})

    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": False}
    assert json.loads(prompt.splitlines()[0].removeprefix("TOOL ")) == {"type": "function", "function": function}
    assert prompt.splitlines()[1] == "EFFORT low"


async def test_request_fields_reach_the_engine(server: Any, model: Any) -> None:
    model.says("x")
    choice = {"type": "function", "name": "weather"}
    reply = await server.post(
        PATH, body(max_output_tokens=7, temperature=0.5, top_p=0.9, tools=TOOLS, tool_choice=choice)
    )

    request = (await model.call()).request

    assert reply.status == 200
    assert request.stop_conditions.max_tokens == 7
    assert (request.sampling_options.temperature, request.sampling_options.top_p) == (0.5, 0.9)
    assert request.sampling_options.guided_decoding.json == SCHEMA


async def test_ignore_eos_is_accepted(server: Any, model: Any) -> None:
    model.says("x", reason=FinishReason.LENGTH)

    reply = await server.post(PATH, body(max_output_tokens=7, ignore_eos=True))

    assert reply.status == 200, reply.body
    assert (await model.call()).request.stop_conditions.ignore_eos


@pytest.mark.parametrize(
    ("wanted", "guided"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True, "description": "x"}, SCHEMA),
    ],
)
async def test_a_form_of_the_text_guides_the_decoding(server: Any, model: Any, wanted: Any, guided: Any) -> None:
    model.says("{}")

    response = await both(server, text={"format": wanted})

    decoding = (await model.call()).request.sampling_options.guided_decoding
    assert (decoding and decoding.json) == guided
    assert response["text"] == {"format": wanted}
    assert response["output"][0]["content"][0]["text"] == "{}"


async def test_an_engine_that_takes_text_gets_a_chat_request(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text")
    usage = CompletionUsage(prompt_tokens=30, completion_tokens=9, total_tokens=39, cached_tokens=16)
    model.puts(LLMEngineOutput(text="{}"), LLMEngineOutput(finish_reason=FinishReason.STOP, completion_usage=usage))
    await cold_server.start()
    wanted = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}

    response = await both(cold_server, instructions="Be kind.", text={"format": wanted})

    asked = (await model.call()).request.body
    assert asked["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert asked["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
    }
    assert response["text"] == {"format": wanted}
    assert response["usage"] == {
        "input_tokens": 30,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 39,
    }


# What becomes of the answer.


@pytest.mark.parametrize("parsed", [True, False])
async def test_a_plain_answer_is_one_message(server: Any, model: Any, parsed: bool) -> None:
    if not parsed:
        model.parsers = Parsers()
    model.says("Hel", 'lo "you"\n', "é😀")

    response = await both(server, metadata={"a": "b"}, instructions="x")

    [message] = response["output"]
    assert response["id"].startswith("resp_")
    assert message == {
        "id": message["id"],
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": 'Hello "you"\né😀', "annotations": [], "logprobs": []}],
    }
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    assert (response["metadata"], response["instructions"], response["store"]) == ({"a": "b"}, "x", False)
    assert response["usage"]["output_tokens"] == len('Hello "you"\né😀'.encode())


async def test_a_stream_has_exactly_these_events_in_this_order(server: Any, model: Any) -> None:
    model.parsers = Parsers()
    seen = await server.hello(PATH, body(stream=True), b"event: response.completed\n", b"\n\n")

    assert [event["type"].removeprefix("response.") for event in events(seen)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert b"[DONE]" not in seen


async def test_thoughts_text_and_calls_are_items_of_their_own(server: Any, model: Any) -> None:
    model.says(THOUGHT, "Let me see.\n", CALL)

    response = await both(server, tools=TOOLS)

    thought, message, call = response["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Oslo, then."}])
    assert message["content"][0]["text"].strip() == "Let me see."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Oslo"})
    assert len({item["id"] for item in response["output"]}) == 3
    assert response["status"] == "completed"


async def test_an_answer_that_was_cut_off_is_incomplete_and_so_is_its_last_item(server: Any, model: Any) -> None:
    model.says(THOUGHT, "Let me", reason=FinishReason.LENGTH)

    response = await both(server)

    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=30))
async def test_streamed_and_whole_answers_agree_however_cut(server: Any, model: Any, cuts: list[int]) -> None:
    model.says_cut(THOUGHT + "Ja, é😀.\n" + CALL + " so", cuts)

    assert [item["type"] for item in (await both(server, tools=TOOLS))["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "message",
    ]


# Tools that are no functions: the model is shown functions, and the client gets calls of its own kind.

PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin"'},
}
SHELL = {"type": "local_shell"}
#: The arguments of a model's call of each, and what stands in the item that the client gets.
NATIVE: list[Any] = [
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "env": {}, "command": ["ls", "-l"], "timeout_ms": 5},
        },
    ),
    ("shell", {"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
    (
        "apply_patch",
        {"type": "delete_file", "path": "a"},
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
    ),
]


def calling(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_a_custom_tool_becomes_a_function_with_its_grammar_in_the_description(server: Any) -> None:
    prompt = await shown(server, tools=[PATCH])

    function = json.loads(prompt.splitlines()[0].removeprefix("TOOL "))["function"]
    assert function["name"] == "patch"
    assert function["description"].startswith("Changes files.")
    assert 'start: "*** Begin"' in function["description"]
    assert function["parameters"]["required"] == ["input"]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_a_call_of_a_custom_tool_is_its_plain_input(server: Any, model: Any, size: int) -> None:
    text = calling("patch", {"input": 'say "hi"\n'})
    model.says(*(text[at : at + size] for at in range(0, len(text), size)))

    [item] = (await both(server, tools=[PATCH]))["output"]

    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", 'say "hi"\n')
    assert item["id"].startswith("ctc_")


async def test_arguments_of_another_form_are_the_input_as_they_are(server: Any, model: Any) -> None:
    model.says(calling("patch", {"text": "x"}))

    [item] = (await both(server, tools=[PATCH]))["output"]

    assert (item["type"], json.loads(item["input"])) == ("custom_tool_call", {"text": "x"})


@pytest.mark.parametrize(("kind", "arguments", "item"), NATIVE, ids=lambda value: str(value)[:12])
async def test_a_call_of_a_tool_known_by_its_type_is_an_item_of_its_own(
    server: Any, model: Any, kind: str, arguments: Any, item: dict[str, Any]
) -> None:
    model.says("Well. ", calling(kind, arguments))

    said, call = (await both(server, tools=[{"type": kind}, *TOOLS]))["output"]

    assert said["type"] == "message"
    assert {**item, "status": "completed", "call_id": call["call_id"], "id": call["id"]} == call


async def test_a_call_that_such_a_tool_could_not_read_is_a_call_of_a_function(server: Any, model: Any) -> None:
    model.says(calling("local_shell", {"cmd": "ls"}))

    [item] = (await both(server, tools=[SHELL]))["output"]

    assert (item["type"], item["name"], json.loads(item["arguments"])) == (
        "function_call",
        "local_shell",
        {"cmd": "ls"},
    )


async def test_tools_of_a_namespace_are_called_by_their_own_names_in_it(server: Any, model: Any) -> None:
    tools = [{"type": "namespace", "name": "agents", "description": "x", "tools": [*TOOLS, PATCH]}, *TOOLS]
    model.says(calling("agents__weather", {"city": "Oslo"}), calling("agents__patch", {"input": "x"}), CALL)

    items = (await both(server, tools=tools))["output"]

    assert [(item["type"], item["name"], item.get("namespace")) for item in items] == [
        ("function_call", "weather", "agents"),
        ("custom_tool_call", "patch", "agents"),
        ("function_call", "weather", None),
    ]


async def test_earlier_calls_of_all_kinds_and_their_results_are_in_the_prompt(server: Any) -> None:
    items = [
        {"role": "user", "content": "Go."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"command": ["ls"]}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "b.txt", "stderr": ""}]},
        {"type": "function_call", "call_id": "c4", "name": "weather", "namespace": "agents", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c4", "output": "rain"},
    ]

    assert await shown(server, input=items) == (
        "user: Go.\nassistant: <c1 patch input=a\nb>\ntool[c1]: done\n"
        "assistant: <c2 local_shell command=['ls']>\ntool[c2]: a.txt\n"
        'assistant: <c3 shell commands=[\'ls\']>\ntool[c3]: [{"stdout":"b.txt","stderr":""}]\n'
        "assistant: <c4 agents__weather>\ntool[c4]: rain\nassistant: "
    )


async def test_tools_that_a_server_would_run_are_left_out_and_named(server: Any, model: Any) -> None:
    model.says("x")
    tools = [*TOOLS, {"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
    replies = [await server.post(PATH, body(tools=tools, stream=stream)) for stream in (False, True)]

    assert [reply.status for reply in replies] == [200, 200]
    assert [reply.headers["x-dynamo-ignored-fields"] for reply in replies] == ["tools[1], tools[2]"] * 2
    prompt = model.tokenizer.decode((await model.call()).request.token_ids)
    assert prompt.count("TOOL ") == 1
    assert replies[0].json()["tools"] == tools


async def test_all_tools_are_shown_although_only_some_are_allowed(server: Any) -> None:
    """So that the prompt stays the same, and with it what caches hold of it."""
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}

    prompt = await shown(server, tools=[*TOOLS, PATCH], tool_choice=choice)

    assert [json.loads(line[5:])["function"]["name"] for line in prompt.splitlines() if line.startswith("TOOL ")] == [
        "weather",
        "patch",
    ]


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "patch"}, {"type": "local_shell"}])
async def test_a_tool_of_any_kind_may_be_demanded(server: Any, model: Any, choice: dict[str, Any]) -> None:
    await shown(server, tools=[PATCH, SHELL], tool_choice=choice)

    required = {"custom": ["input"], "local_shell": ["command"]}[choice["type"]]
    model.says("x")
    await server.post(PATH, body(tools=[PATCH, SHELL], tool_choice=choice))
    guided = (await model.call()).request.sampling_options.guided_decoding
    assert guided.json["required"] == required


# What the official API documents.

#: Fields with a value that asks for something, without changing what the answer means.
WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"access_programs": {"a": "b"}},
    {"client_metadata": {"x-codex-window-id": "0", "long": "x" * 2000}},
    {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
    {"image": {"quality": "low"}},
    {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    {"max_tool_calls": 3},
    {"metadata": {"a": "b"}},
    {"prompt_cache_key": "k"},
    {"prompt_cache_options": {"mode": "explicit"}},
    {"prompt_cache_retention": "24h"},
    {"reasoning": {"summary": "auto"}},
    {"reasoning": {"summary": "concise", "context": "auto"}},
    {"reasoning": {"generate_summary": "detailed"}},
    {"safety_identifier": "s"},
    {"service_tier": "priority"},
    {"store": True},
    {"stream_options": {"include_obfuscation": True}},
    {"text": {"verbosity": "high"}},
    {"truncation": "auto"},
    {"user": "u"},
]


@pytest.mark.parametrize("fields", WITHOUT_EFFECT, ids=lambda fields: next(iter(fields)))
async def test_fields_without_effect_are_accepted(server: Any, fields: dict[str, Any]) -> None:
    assert await shown(server, **fields) == "user: Hi\nassistant: "


def test_every_field_of_the_official_client_is_known() -> None:
    for params, known, passive in (
        (response_create_params.ResponseCreateParamsStreaming, ResponsesRequest, RESPONSES_PASSIVE),
        (input_token_count_params.InputTokenCountParams, InputTokensRequest, INPUT_TOKENS_PASSIVE),
    ):
        assert set(params.__annotations__) - set(known.__struct_fields__) - set(passive) == set()


async def test_input_tokens_are_counted_without_asking_an_engine(
    server: Any, model: Any, sdk: openai.AsyncOpenAI
) -> None:
    items: Any = {"instructions": "Be kind.", "input": "Hi", "tools": [*TOOLS, PATCH]}
    prompt = await shown(server, **items)

    counted = await sdk.responses.input_tokens.count(model="m", **items)

    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(model.tokenizer.encode(prompt)))
    assert model.count == 1


# What is refused, and how it is told.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": TOOLS}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [*TOOLS, {"type": "custom", "name": "weather"}]}, "tools[1].name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "n"}]}, "input[0].input"),
        ({"input": [{"type": "local_shell_call", "call_id": "c"}]}, "input[0].action"),
        ({"input": [{"type": "custom_tool_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}, "tools": TOOLS}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "terse"}}, "text.verbosity"),
        ({"reasoning": {"summary": "brief"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"store": 5}, "store"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "middle"}, "truncation"),
        ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_invalid_fields_are_refused_by_name(server: Any, model: Any, fields: dict[str, Any], param: str) -> None:
    request = {name: value for name, value in body(**fields).items() if value is not None}

    reply = await server.post(PATH, request)

    assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.body
    assert model.count == 0


async def test_errors_before_the_first_event_are_those_of_the_other_routes(server: Any, model: Any) -> None:
    model.refusal = ServiceOverloaded(retry_after=3)
    refused = await server.post(PATH, body(stream=True))
    missing = await server.post(PATH, body(model="x"))

    assert (refused.status, refused.headers["retry-after"]) == (503, "3")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("begun", [True, False])
async def test_a_stream_that_breaks_ends_with_a_failed_response_and_no_clean_end(cold_server: Any, begun: bool) -> None:
    cold_server.keep_alive = 15.0 if begun else 0.01
    cold_server.add_model()
    await cold_server.start()
    connection, call = await cold_server.asked(PATH, body(stream=True))
    seen = b""
    if begun:
        call.say("Hel")
        seen = await connection.until(b"Hel")
    else:
        await connection.until(b": keep-alive")
    call.fail(StreamIncomplete("secret"))

    seen += await connection.ended()

    found = events(seen)
    assert found[0]["type"] == "response.created"
    failed = found[-1]
    assert failed["type"] == "response.failed"
    assert (failed["response"]["status"], failed["response"]["usage"]) == ("failed", None)
    lost = "The worker of this request was lost, please retry"
    assert failed["response"]["error"] == {"code": "server_error", "message": lost}
    assert [item["content"][0]["text"] for item in failed["response"]["output"]] == (["Hel"] if begun else [])
    assert b"secret" not in seen
    assert not seen.endswith(b"0\r\n\r\n")
    assert (await cold_server.record()).endpoint == "responses"


# The official client.


async def test_the_official_client_reads_answers_and_streams(sdk: openai.AsyncOpenAI, model: Any) -> None:
    model.says(THOUGHT, "Let me see. ", CALL)
    asked: dict[str, Any] = {"model": "m", "input": "Oslo?", "tools": TOOLS}

    whole = await sdk.responses.create(**asked)
    raw = [event async for event in await sdk.responses.create(**asked, stream=True)]
    async with sdk.responses.stream(**asked) as stream:
        seen = [event async for event in stream]
        final = await stream.get_final_response()

    completed = raw[-1]
    assert completed.type == "response.completed"
    for each in (whole, completed.response, final):
        assert [item.type for item in each.output] == ["reasoning", "message", "function_call"]
        assert each.output_text.strip() == "Let me see."
        call: Any = each.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Oslo"}
    done = [event for event in seen if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]


async def test_the_official_client_raises_on_a_broken_stream(sdk: openai.AsyncOpenAI, model: Any) -> None:
    model.parsers = Parsers()
    asking = asyncio.create_task(sdk.responses.create(model="m", input="Hi", stream=True))
    call = await model.call()
    call.say("Hel")
    stream = await asking
    seen: list[Any] = []

    async def read() -> None:
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                call.fail(StreamIncomplete("gone"))

    with pytest.raises(openai.APIConnectionError):
        await read()
    assert seen[-1].type == "response.failed"
    assert seen[-1].response.error.code == "server_error"
