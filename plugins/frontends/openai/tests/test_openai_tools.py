"""Tools and reasoning: what the model is shown, what the engine is asked for, and what becomes of the answer."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from dynamo_core import FinishReason, LLMEngineOutput, Parsers, ToolCallArguments, ToolCallStart
from dynamo_generation.choices.choice import TokenChoice
from dynamo_generation.choices.forced_tool_calls import ForcedCalls
from dynamo_plugin_parsers_standard.json_formats import HermesParser, MistralParser
from dynamo_plugin_parsers_standard.think_tags import ThinkParser
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nOslo, then.\n</think>\n\n"

TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% if reasoning_effort %}EFFORT {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def template() -> str:
    return TEMPLATE


def deltas(reply: Any, index: int = 0) -> list[dict[str, Any]]:
    """Return the deltas of one choice of a stream, without the one with the role and the empty one at the end."""
    choices = [choice for event in reply.events if isinstance(event, dict) for choice in event["choices"]]
    mine = [choice["delta"] for choice in choices if choice["index"] == index]
    assert mine[0] == {"role": "assistant"}
    assert mine[-1] == {}
    return mine[1:-1]


def folded(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["function"]["arguments"] == ""
                calls[part["index"]] = {name: value for name, value in part.items() if name != "index"}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["content"] = message["content"] or None
        message["tool_calls"] = list(calls.values())
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


# What becomes of the answer.


async def spoken_live(server: Any, *said: tuple[str, bytes | None], **fields: Any) -> list[Any]:
    """Return the events of a stream whose engine waits after each piece until the client sees it.

    Every character has a score.
    """
    connection, call = await server.asked("/v1/chat/completions", {**chat(**fields), "stream": True})
    seen = b""
    for piece, shown in said:
        call.say(piece, log_probs=[-0.5] * len(piece))
        if shown is not None:
            seen += await connection.until(shown) + await connection.until(b"\n\n")
    call.finish()
    seen += await connection.until(b"[DONE]\n\n")
    return [json.loads(event) for event in re.findall(rb"data: (\{.*\})\n\n", seen)]


async def test_a_call_comes_as_a_start_and_pieces_of_arguments(server: Any, model: Any) -> None:
    events = await spoken_live(
        server,
        ("<tool", b'"role"'),
        ('_call>{"name": "weather", "argu', None),
        ('ments": {"city": ', b"city"),
        ('"Oslo"', b"Oslo"),
        ("}}</tool_call>", None),
    )

    choices = [event["choices"][0] for event in events]
    assert choices[0] == {"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    start, *pieces = [choice["delta"]["tool_calls"][0] for choice in choices[1:-1]]
    function = {"name": "weather", "arguments": ""}
    assert start == {"index": 0, "id": start["id"], "type": "function", "function": function}
    assert start["id"].startswith("call_")
    assert pieces == [{"index": 0, "function": {"arguments": text}} for text in ('{"city": ', '"Oslo"', "}")]


async def test_the_bytes_of_chunks_are_these(server: Any, model: Any) -> None:
    model.says(f"{THOUGHT}So: {CALL}")

    reply = await server.chat(tools=TOOLS, stream=True)

    first = reply.events[0]
    head = f'{{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"m"'
    call_id = reply.events[3]["choices"][0]["delta"]["tool_calls"][0]["id"]
    bodies = [
        '{"role":"assistant"}',
        '{"reasoning_content":"Oslo, then."}',
        '{"content":"So: "}',
        f'{{"tool_calls":[{{"index":0,"id":"{call_id}","type":"function",'
        '"function":{"name":"weather","arguments":""}}]}',
        '{"tool_calls":[{"index":0,"function":{"arguments":"{\\"city\\": \\"Oslo\\"}"}}]}',
    ]
    chunks = [f'data: {head},"choices":[{{"index":0,"delta":{body},"finish_reason":null}}]}}\n\n' for body in bodies]
    last = f'data: {head},"choices":[{{"index":0,"delta":{{}},"finish_reason":"tool_calls"}}]}}\n\n'
    assert reply.body.decode() == "".join(chunks) + last + "data: [DONE]\n\n"


ANSWERS = st.lists(
    st.sampled_from([THOUGHT, CALL, SECOND, "<tool_call>", "</tool_call>", "So ", "<think>", "é", "{", '"\n']),
    max_size=6,
).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=ANSWERS, size=st.integers(1, 40))
async def test_streamed_and_whole_tool_answers_agree(server: Any, model: Any, text: str, size: int) -> None:
    data = text.encode()

    def script(call: Any) -> None:
        for at in range(0, len(data), size):
            call.put(LLMEngineOutput(list(data[at : at + size])))
        call.finish()

    model.script = script

    stream = await server.chat(tools=TOOLS, stream=True)
    unary = await server.chat(tools=TOOLS)

    [choice] = unary.json()["choices"]
    assert without_ids(folded(deltas(stream))) == without_ids(choice["message"])
    assert stream.events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert choice["finish_reason"] == ("tool_calls" if "tool_calls" in choice["message"] else "stop")


async def test_the_message_of_a_body_has_all_parts(server: Any, model: Any) -> None:
    model.says(f"{THOUGHT}{CALL}{SECOND}")

    [choice] = (await server.chat(tools=TOOLS)).json()["choices"]

    first, second = choice["message"].pop("tool_calls")
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": None, "reasoning_content": "Oslo, then."},
        "finish_reason": "tool_calls",
    }
    assert first == {
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    assert second["function"] == {"name": "time", "arguments": "{}"}
    assert first["id"] != second["id"]
    assert (await server.record()).finish_reason == "tool_calls"


async def test_the_official_client_reads_both_forms(sdk: openai.AsyncOpenAI, model: Any) -> None:
    model.says(THOUGHT[:9], THOUGHT[9:], CALL[:30], CALL[30:], SECOND)
    request: Any = {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS}

    unary = await sdk.chat.completions.create(**request)
    async with sdk.chat.completions.stream(**request) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()

    messages: list[Any] = [unary.choices[0].message, final.choices[0].message]
    for message in messages:
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("weather", '{"city": "Oslo"}'),
            ("time", "{}"),
        ]
        assert message.content is None or message.content == ""
        assert message.reasoning_content == "Oslo, then."
    assert {unary.choices[0].finish_reason, final.choices[0].finish_reason} == {"tool_calls"}
    done = [event.name for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done == ["weather", "time"]


async def test_a_cut_off_answer_has_finish_reason_length(server: Any, model: Any) -> None:
    begun = '<tool_call>{"name": "weather", "arguments": {"ci'
    model.says(begun, reason=FinishReason.LENGTH)

    [choice] = (await server.chat(tools=TOOLS)).json()["choices"]
    stream = await server.chat(tools=TOOLS, stream=True)

    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", begun)
    assert stream.events[-2]["choices"][0]["finish_reason"] == "length"
    assert folded(deltas(stream))["tool_calls"][0]["function"]["arguments"] == '{"ci'


BROKEN = [
    ('<tool_call>{"name": "weather", "arguments": { oops', "auto"),
    ('<tool_call>{"name": "weather", "arguments": {"city": "Os', "auto"),
    ('<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call> Done.', "auto"),
    ('[{"name": "weather", "parameters": {"city": "Os', "required"),
    ('{"city": Oslo}', {"type": "function", "function": {"name": "weather"}}),
]


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("text", "choice"), BROKEN)
async def test_a_call_that_breaks_after_its_name_is_text_where_the_whole_answer_is_known(
    server: Any, model: Any, text: str, choice: Any, size: int
) -> None:
    model.says(*(text[at : at + size] for at in range(0, len(text), size)))

    [answer] = (await server.chat(tools=TOOLS, tool_choice=choice)).json()["choices"]

    assert answer["message"] == {"role": "assistant", "content": text}
    assert answer["finish_reason"] == "stop"


async def test_calls_beside_a_broken_one_are_kept(server: Any, model: Any) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {!}</tool_call>'
    model.says(f"{CALL}{broken}{SECOND}")

    [answer] = (await server.chat(tools=TOOLS)).json()["choices"]
    stream = await server.chat(tools=TOOLS, stream=True)

    assert stream.events[-2]["choices"][0]["finish_reason"] == "tool_calls"

    names = [call["function"]["name"] for call in answer["message"]["tool_calls"]]
    assert (names, answer["message"]["content"]) == (["weather", "time"], f"{broken}\n")
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("text", "choice"), BROKEN)
async def test_a_stream_that_has_begun_a_call_ends_in_order_though_the_call_breaks(
    server: Any, text: str, choice: Any
) -> None:
    connection, call = await server.asked("/v1/chat/completions", {**chat(tool_choice=choice), "stream": True})
    # The call is shown before it breaks.
    at = text.rindex("{") + 1
    call.say(text[:at])
    seen = await connection.until(b'"arguments":"{"')
    call.say(text[at:])
    call.finish()
    seen += await connection.until(b"data: [DONE]\n\n")

    choices = [json.loads(event)["choices"][0] for event in re.findall(rb"data: (\{.*\})\n\n", seen)]
    # The same as in a body.
    assert choices[-1] == {"index": 0, "delta": {}, "finish_reason": "stop"}
    message = folded([choice["delta"] for choice in choices])
    [told] = message["tool_calls"]
    arguments = told["function"]["arguments"]
    assert text.endswith(arguments + (message["content"] or ""))
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert (await server.record()).status == "success"


async def test_a_call_that_breaks_before_the_limit_ends_with_the_limit(server: Any, model: Any) -> None:
    model.says('<tool_call>{"name": "weather", "arguments": {', "! and so on", reason=FinishReason.LENGTH)

    stream = await server.chat(tools=TOOLS, stream=True)

    assert folded(deltas(stream))["content"] == "! and so on"
    assert stream.events[-2]["choices"][0]["finish_reason"] == "length"
    assert stream.events[-1] == "data: [DONE]"


def own_tool(path: str) -> dict[str, Any]:
    function = TOOLS[0]["function"]
    return {"type": "function", **function} if path == "/v1/responses" else {"name": "weather", "input_schema": {}}


def named(body: bytes, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in a stream of another API."""
    return [json.loads(data) for data in re.findall(rf"event: {kind}\ndata: (.*)\n".encode(), body)]


OTHERS = {
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"max_tokens": 999, "messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize(("path", "body"), OTHERS.items())
async def test_streams_of_the_other_apis_end_in_order_though_a_call_breaks(
    server: Any, model: Any, path: str, body: dict[str, Any]
) -> None:
    model.says('<tool_call>{"name": "weather", "arguments": {"city": ', "Oslo!")

    reply = await server.post(path, {"model": "m", "stream": True, "tools": [own_tool(path)], **body})

    assert reply.whole
    if path == "/v1/responses":
        [done] = named(reply.body, "response.completed")
        call, text = done["response"]["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"city": ')
        assert (text["status"], text["content"][0]["text"]) == ("completed", "Oslo!")
    else:
        assert [event["delta"]["stop_reason"] for event in named(reply.body, "message_delta")] == ["end_turn"]
        told = [event["delta"] for event in named(reply.body, "content_block_delta")]
        assert "".join(delta.get("partial_json", "") for delta in told) == '{"city": '
        assert "".join(delta.get("text", "") for delta in told) == "Oslo!"
        assert reply.body.endswith(b'data: {"type":"message_stop"}\n\n')


#: What a model writes as arguments with slips, and what it means.
SLIPS = [
    ('{"city": "Os\nlo\t"}', "Os\nlo\t"),
    (r'{"city": "\d \' "}', r"\d ' "),
    ('{"city": "Oslo", }', "Oslo"),
    ('{"city": "Oslo"', "Oslo"),
    ('{"city": "Oslo"}}', "Oslo"),
]


@pytest.mark.parametrize(("slip", "city"), SLIPS)
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_slips_in_a_call_are_repaired_alike_in_a_stream_and_a_body(
    server: Any, model: Any, slip: str, city: str, choice: Any
) -> None:
    call = f'{{"name": "weather", "arguments": {slip}}}'
    text = {"auto": f"<tool_call>{call}</tool_call>", "required": f"[{call}]"}.get(str(choice), slip)
    model.says(*text)

    answer = await both(server, tool_choice=choice)

    message = answer["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": city}
    assert message["content"] is None
    assert answer["finish_reason"] == "tool_calls"


async def test_calls_that_were_repaired_are_counted_by_model_and_kind(server: Any, model: Any) -> None:
    model.says(CALL.replace('"Oslo"', '"Oslo",'), SECOND.replace("{}", '{"a": "\n", "b": ["\n", ], }'))

    await server.chat(tools=TOOLS)
    await server.chat(tools=TOOLS, stream=True)

    counts = re.findall(rb'repaired_tool_calls_total{kind="(.*)",model="m"} (.*)', await server.metrics.render())
    assert sorted(counts) == [(b"control_character", b"2.0"), (b"trailing_comma", b"4.0")]


@pytest.mark.parametrize("stop", [None, ","])
async def test_a_call_that_lacks_its_end_is_none_where_a_stop_string_cut_it_off(
    server: Any, model: Any, stop: str | None
) -> None:
    model.says('{"city": "Oslo"' + (stop or ""))
    fields = {"stop": stop} if stop else {}

    [choice] = (await server.chat(tools=TOOLS, tool_choice=NAMED, **fields)).json()["choices"]

    assert choice["message"].get("content") == ('{"city": "Oslo"' if stop else None)
    assert ("tool_calls" in choice["message"]) is (stop is None)


async def test_an_answer_without_a_reason_ends_with_its_calls_all_the_same(server: Any, model: Any) -> None:
    def script(call: Any) -> None:
        call.say(CALL)
        call.complete()

    model.script = script

    [choice] = (await server.chat(tools=TOOLS)).json()["choices"]

    assert choice["finish_reason"] == "tool_calls"


async def test_every_choice_has_calls_of_its_own(server: Any, model: Any) -> None:
    answers = iter([CALL, "No."])

    def script(call: Any) -> None:
        call.say(next(answers))
        call.finish()

    model.script = script

    reply = await server.chat(tools=TOOLS, stream=True, n=2)

    assert "tool_calls" in folded(deltas(reply, 0))
    assert folded(deltas(reply, 1)) == {"role": "assistant", "content": "No."}


async def test_only_the_first_call_is_sent_without_parallel_tool_calls(server: Any, model: Any) -> None:
    model.says(f"{CALL}{SECOND} So.")

    stream = await server.chat(tools=TOOLS, parallel_tool_calls=False, stream=True)
    [choice] = (await server.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"]

    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["message"]["content"] == " So."
    assert without_ids(folded(deltas(stream))) == without_ids(choice["message"])


async def test_logprobs_come_with_the_delta_of_their_tokens(server: Any, model: Any) -> None:
    score = b'"logprobs":{"content":[{'
    pieces = (CALL[:5], CALL[5:60], CALL[60:], " x")

    events = await spoken_live(server, *((piece, score) for piece in pieces), logprobs=True)

    choices = [event["choices"][0] for event in events]
    scored = [[entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]] for choice in choices]
    assert ["".join(tokens) for tokens in scored if tokens] == list(pieces)
    assert choices[1]["delta"] == {}, "the beginning of the tag is scored, though it is not shown"
    assert folded([choice["delta"] for choice in choices])["tool_calls"][0]["function"]["name"] == "weather"

    def script(call: Any) -> None:
        call.say(CALL, log_probs=[-0.5] * len(CALL))
        call.finish()

    model.script = script
    [choice] = (await server.chat(tools=TOOLS, logprobs=True)).json()["choices"]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == CALL


# What the model is shown.


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, **fields}


async def prompt(server: Any, model: Any, **fields: Any) -> str:
    model.says("x")
    body = chat(**fields, nvext={"annotations": ["formatted_prompt"]})
    reply = await server.post("/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    text: str = reply.json()["nvext"]["formatted_prompt"]
    return text


async def test_tools_are_shown_to_the_template_as_the_client_sent_them(server: Any, model: Any) -> None:
    text = await prompt(server, model)

    assert [json.loads(line[5:]) for line in text.splitlines() if line.startswith("TOOL ")] == TOOLS


async def test_tools_are_not_shown_if_none_may_be_called(server: Any, model: Any) -> None:
    assert "TOOL" not in await prompt(server, model, tool_choice="none")


async def test_tools_with_choice_none_are_shown_if_configured(cold_server: Any) -> None:
    model = cold_server.add_model(files={"chat_template.jinja": TEMPLATE.encode()})
    model.parsers = Parsers(HermesParser)
    cold_server.config = cold_server.config.model_copy(update={"exclude_tools_when_tool_choice_none": False})
    await cold_server.start()

    assert "TOOL" in await prompt(cold_server, model, tool_choice="none")
    model.says(CALL)
    [choice] = (await cold_server.post("/v1/chat/completions", chat(tool_choice="none"))).json()["choices"]

    assert choice["message"] == {"role": "assistant", "content": CALL}


async def test_earlier_calls_and_their_results_are_shown_with_arguments_as_objects(server: Any, model: Any) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
        {"role": "assistant", "content": "Hm", "tool_calls": [{"id": "c2", "function": {"name": "time"}}]},
    ]

    text = await prompt(server, model, messages=messages)

    assert "assistant: <weather city=Oslo>tool: Rainassistant: Hm<time>" in text


async def test_arguments_that_hold_no_object_are_left_to_the_template(server: Any, model: Any) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "[1"}}]

    reply = await server.chat(messages=[{"role": "assistant", "tool_calls": calls}])

    # This template cannot deal with them; the client is told, and the model's server is none the worse.
    assert reply.status == 400
    assert "template" in reply.json()["message"]


# What the engine is asked for.


async def asked(server: Any, model: Any, **fields: Any) -> Any:
    model.says("x")
    reply = await server.post("/v1/chat/completions", chat(**fields))
    assert reply.status == 200, reply.body
    return (await model.call()).request


async def test_special_tokens_are_asked_for_only_where_the_parser_needs_them(
    server: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tags of Hermes reach its parser whatever is asked for.
    assert (await asked(server, model)).output_options.skip_special_tokens is None

    monkeypatch.setattr(HermesParser, "NEEDS_SPECIAL_TOKENS", True)

    assert (await asked(server, model)).output_options.skip_special_tokens is False
    assert (await asked(server, model, tools=[])).output_options.skip_special_tokens is None
    assert (await asked(server, model, tool_choice="none")).output_options.skip_special_tokens is None


async def test_decoding_is_guided_only_if_a_tool_must_be_called(server: Any, model: Any) -> None:
    for choice in (None, "auto", "none"):
        assert (await asked(server, model, tool_choice=choice)).sampling_options.guided_decoding is None


async def test_a_tool_that_must_be_called_guides_the_decoding_with_its_parameters(server: Any, model: Any) -> None:
    def named(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name}}

    weather = await asked(server, model, tool_choice=named("weather"))
    time = await asked(server, model, tool_choice=named("time"))

    assert weather.sampling_options.guided_decoding.json == TOOLS[0]["function"]["parameters"]
    assert time.sampling_options.guided_decoding.json == {"type": "object", "properties": {}}


async def test_a_required_tool_call_guides_to_a_list_of_calls(server: Any, model: Any) -> None:
    several = (await asked(server, model, tool_choice="required")).sampling_options.guided_decoding.json
    one = (
        await asked(server, model, tool_choice="required", parallel_tool_calls=False)
    ).sampling_options.guided_decoding.json

    assert several == {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["weather"]},
                        "parameters": TOOLS[0]["function"]["parameters"],
                    },
                    "required": ["name", "parameters"],
                },
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["time"]},
                        "parameters": {"type": "object", "properties": {}},
                    },
                    "required": ["name", "parameters"],
                },
            ],
        },
    }
    assert one == {**several, "maxItems": 1}


def defining(name: str, definition: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": definition}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def test_definitions_of_tools_move_to_the_root_of_the_schema(server: Any, model: Any) -> None:
    same = [defining("a", {"type": "string"}), defining("b", {"type": "string"})]
    request = await asked(server, model, tools=same, tool_choice="required")
    different = [defining("a", {"type": "string"}), defining("b", {"type": "integer"})]
    refused = await server.chat(tools=different, tool_choice="required")

    schema = request.sampling_options.guided_decoding.json
    assert schema["$defs"] == {"X": {"type": "string"}}
    assert all("$defs" not in each["properties"]["parameters"] for each in schema["items"]["anyOf"])
    assert (refused.status, refused.json()["error"]["param"]) == (400, "tools")
    assert "'X'" in refused.json()["message"]


async def both(server: Any, **fields: Any) -> dict[str, Any]:
    """Return the one choice of an answer, which is the same streamed and whole."""
    stream = await server.post("/v1/chat/completions", {**chat(**fields), "stream": True})
    [choice] = (await server.post("/v1/chat/completions", chat(**fields))).json()["choices"]
    assert without_ids(folded(deltas(stream))) == without_ids(choice["message"])
    assert stream.events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    found: dict[str, Any] = choice
    return found


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize(
    ("choice", "text", "calls", "content"),
    [
        (NAMED, ' {"city": "Oslo"}\n', [("weather", '{"city": "Oslo"}')], None),
        (NAMED, '{"city": "Oslo"} so  it is', [("weather", '{"city": "Oslo"}')], "so  it is"),
        (NAMED, CALL, [("weather", '{"city": "Oslo"}')], None),
        (NAMED, "I do not", [], "I do not"),
        (NAMED, "", [], ""),
        (
            "required",
            '[{"name": "weather", "parameters": {"city": "Oslo"}}, {"name": "time", "parameters": {}}]',
            [("weather", '{"city": "Oslo"}'), ("time", "{}")],
            None,
        ),
        ("required", '[{"name": "time", "parameters": {}}, {"na', [("time", "{}")], ', {"na'),
        ("required", '[{"name": "time", "parameters": {}} x y', [("time", "{}")], " x y"),
        ("required", CALL, [("weather", '{"city": "Oslo"}')], None),
        ("required", f"[x] {CALL}", [("weather", '{"city": "Oslo"}')], "[x] "),
        ("required", "[", [], "["),
    ],
)
async def test_a_guided_answer_is_parsed_as_json_calls_or_left_as_text(
    server: Any, model: Any, choice: Any, text: str, calls: list[tuple[str, str]], content: str | None, size: int
) -> None:
    model.says(*(text[at : at + size] for at in range(0, len(text), size)))

    answer = await both(server, tool_choice=choice)

    message = answer["message"]
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    assert (found, message["content"]) == (calls, content)
    assert answer["finish_reason"] == ("tool_calls" if calls else "stop")


PARTS = ["[", "{", "}", "]", ",", " ", "x", '{"name": "time", "parameters": {}}', '"', ":", "{}", CALL, SECOND, "<tool"]


def spoken(parser: ForcedCalls, pieces: list[str]) -> list[Any]:
    """Return what a parser made of some text: pieces of content, and calls with their names and arguments."""
    out: list[Any] = []
    for delta in [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]:
        if isinstance(delta, ToolCallStart):
            out.append([delta.name, ""])
        elif isinstance(delta, ToolCallArguments):
            out[-1][1] += delta.text
        elif out and isinstance(out[-1], str):
            out[-1] += delta.text
        else:
            out.append(delta.text)
    return out


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    size=st.integers(1, 9),
    name=st.sampled_from([None, "weather"]),
    markup=st.booleans(),
)
def test_a_guided_answer_parses_the_same_however_cut(
    parts: list[str], size: int, name: str | None, markup: bool
) -> None:
    def parser() -> ForcedCalls:
        return ForcedCalls(name, HermesParser(TOOLS) if markup else None)

    text = "".join(parts)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]

    said = spoken(parser(), pieces)

    assert said == spoken(parser(), [text])
    if all(isinstance(each, str) for each in said):
        assert "".join(said) == text


async def test_reasoning_may_come_before_the_json(server: Any, model: Any) -> None:
    model.says(THOUGHT, '{"city": "Oslo"}')

    message = (await both(server, tool_choice=NAMED))["message"]

    assert message["reasoning_content"] == "Oslo, then."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


# Models without parsers, and requests that need none.


async def test_a_model_without_a_parser_takes_tools_and_answers_with_its_text(cold_server: Any) -> None:
    model = cold_server.add_model()
    model.says(THOUGHT, CALL)
    await cold_server.start()

    assert (await both(cold_server))["message"]["content"] == THOUGHT + CALL
    model.says('{"city": "Oslo"}')
    forced = await both(cold_server, tool_choice=NAMED)
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "weather"
    model.says(CALL)
    assert (await both(cold_server, tool_choice=NAMED))["message"]["content"] == CALL


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "none"}])
async def test_a_request_without_tools_bypasses_the_parsers(
    cold_server: Any, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cold_server.add_model()
    model.parsers = Parsers(MistralParser)
    model.says("[TOOL_CALLS]", "weather[ARGS]{}")
    await cold_server.start()
    made: list[tuple[type, bool]] = []
    init = TokenChoice.__init__

    def keep(self: TokenChoice, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append((type(self), self.plain))

    monkeypatch.setattr(TokenChoice, "__init__", keep)

    choice = await both(cold_server, **fields)

    assert choice["message"] == {"role": "assistant", "content": "[TOOL_CALLS]weather[ARGS]{}"}
    assert made == [(TokenChoice, True)] * 2


# What is refused.


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 97}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, None),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 1537}, "tools"),
        ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools[2].type"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
async def test_invalid_tools_are_refused_with_their_field(
    server: Any, model: Any, fields: dict[str, Any], param: str | None
) -> None:
    reply = await server.post("/v1/chat/completions", chat(**fields))

    assert reply.status == 400
    assert param is None or reply.json()["error"]["param"] == param
    assert model.count == 0


@pytest.mark.parametrize("fields", [{"tool_choice": "auto", "tools": []}, {"tool_choice": "none", "tools": None}])
async def test_a_neutral_tool_choice_needs_no_tools(server: Any, model: Any, fields: dict[str, Any]) -> None:
    model.says("x")

    assert (await server.post("/v1/chat/completions", chat(**fields))).status == 200


async def test_an_engine_that_takes_text_gets_tools_of_other_types(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text")
    model.puts(LLMEngineOutput(text=CALL, finish_reason=FinishReason.STOP))
    model.parsers = Parsers(HermesParser, ThinkParser)
    await cold_server.start()

    reply = await cold_server.chat(tools=[{"type": "web_search"}], tool_choice={"type": "allowed_tools"})

    assert reply.json()["choices"][0]["message"]["content"] == CALL
    assert (await model.call()).request.body["tools"] == [{"type": "web_search"}]
