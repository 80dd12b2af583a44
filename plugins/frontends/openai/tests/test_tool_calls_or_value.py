"""Tools beside `response_format`, `strict`, and tools that are allowed: what is asked of an engine, what is checked."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import pytest
from dynamo_core import GUIDED, FinishReason, Parsers
from dynamo_generation.choices.schema_validation import SchemaConstraint
from dynamo_generation.templates.render_processes import LimitedProcess
from dynamo_plugin_parsers_standard.json_formats import HermesParser, KimiK2Parser, MistralParser
from dynamo_plugin_parsers_standard.think_tags import DeepSeekR1Parser, ThinkParser

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {"zone": [1, {"a": "}"}]}}\n</tool_call>'


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


TOOLS = [function("weather"), function("time", parameters={"type": "object"})]
STRICT = [function("weather", strict=True)]


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, **fields}


@pytest.fixture
def template() -> str:
    return "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"


@pytest.fixture
async def guided(cold_server: Any) -> Any:
    """Return a server whose model is guided, and writes calls like Hermes."""
    model = cold_server.add_model(capabilities=[GUIDED])
    model.parsers = Parsers(HermesParser)
    model.says("x")
    await cold_server.start()
    return cold_server


async def grammar(server: Any, **fields: Any) -> Any:
    """Return what the engine is to be guided by."""
    reply = await server.post(CHAT, chat(**fields))
    assert reply.status == 200, reply.body
    return (await server.directory.models["m"].call()).request.sampling_options.guided_decoding


def events_of(reply: Any) -> list[Any]:
    """Return the events of a stream of Messages or Responses."""
    return [json.loads(line[6:]) for line in reply.body.decode().splitlines() if line.startswith("data: ")]


async def answers(server: Any, model: Any, text: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the choice of a body, and the last of a stream."""
    model.says_cut(text, [3, 7, 2])
    whole = (await server.post(CHAT, chat(**fields))).json()["choices"][0]
    events = (await server.post(CHAT, chat(stream=True, **fields))).events
    return [whole, events[-2]["choices"][0]]


# What a guided engine is asked for.


async def test_an_answer_that_may_be_a_call_or_a_value_has_a_grammar_of_both(guided: Any) -> None:
    found = await grammar(guided, response_format=FORMAT)

    one_of = found.structural_tag["format"]
    assert found.json is None
    assert one_of["type"] == "or"
    calls, value = one_of["elements"]
    assert [tag["begin"] for tag in calls["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in ("weather", "time")
    ]
    assert calls["tags"][0]["content"]["json_schema"] == CITY
    assert calls["at_least_one"] is True
    assert calls["stop_after_first"] is False
    assert value["json_schema"] == SCHEMA
    # Or a value could be read as a call.
    assert value.get("excludes", list(HermesParser.MARKERS)) == list(HermesParser.MARKERS)


async def test_the_grammar_has_the_allowed_tools_and_one_call_if_the_client_wants_that(guided: Any) -> None:
    found = await grammar(guided, response_format=FORMAT, tool_choice=allowed("time"), parallel_tool_calls=False)

    calls = found.structural_tag["format"]["elements"][0]
    assert [tag["begin"] for tag in calls["tags"]] == ['<tool_call>\n{"name": "time", "arguments": ']
    assert calls["stop_after_first"] is True


@pytest.mark.parametrize("fields", [{"tools": STRICT}, {"parallel_tool_calls": False}])
async def test_strict_arguments_and_one_call_leave_the_text_free(guided: Any, fields: dict[str, Any]) -> None:
    found = await grammar(guided, **fields)

    calls = found.structural_tag["format"]
    assert calls["type"] == "triggered_tags"
    assert calls["triggers"] == ["<tool_call>"]
    assert calls["stop_after_first"] is (fields.get("parallel_tool_calls") is False)


async def test_optional_tools_are_not_guided(guided: Any) -> None:
    assert await grammar(guided) is None
    assert await grammar(guided, tool_choice=allowed("time")) is None


@pytest.mark.parametrize(
    ("reasoning", "begins"), [(ThinkParser, "optional"), (DeepSeekR1Parser, "sequence")], ids=["think", "r1"]
)
@pytest.mark.parametrize(
    "fields", [{"response_format": FORMAT}, {"tool_choice": "required"}, {"tools": [], "response_format": FORMAT}]
)
async def test_a_grammar_allows_reasoning_first(
    guided: Any, reasoning: Any, begins: str, fields: dict[str, Any]
) -> None:
    guided.directory.models["m"].parsers = Parsers(HermesParser, reasoning)

    found = await grammar(guided, **fields)

    before, _ = found.structural_tag["format"]["elements"]
    assert before["type"] == begins
    assert "</think>" in json.dumps(before)


async def test_required_among_the_allowed_tools_is_a_list_of_their_calls(guided: Any) -> None:
    found = await grammar(guided, tool_choice=allowed("time", mode="required"))

    calls = found.json["items"]["anyOf"]
    assert [call["properties"]["name"]["enum"] for call in calls] == [["time"]]


async def test_an_engine_that_is_not_guided_is_not_asked_for_a_grammar_of_both(server: Any, model: Any) -> None:
    model.says('{"degrees": 3}')

    assert await grammar(server, response_format=FORMAT) is None
    assert await grammar(server, tools=STRICT) is None


# What is checked, where nothing guides.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("It is cold.", "not JSON"),
        ('{"degrees": "cold"}', "$.degrees"),
        ("{}", "'degrees' is a required property"),
        ('{"degrees": NaN}', "NaN"),
    ],
)
async def test_a_value_that_breaks_its_schema_is_flagged(server: Any, model: Any, text: str, why: str) -> None:
    for choice in await answers(server, model, text, response_format=FORMAT):
        assert choice["finish_reason"] == "stop"
        assert choice["structured_output"]["valid"] is False
        assert choice["structured_output"]["error"].startswith("the answer: ")
        assert why in choice["structured_output"]["error"]
    assert server.gauge("structured_output_violations_total") == 2


@pytest.mark.parametrize("text", ['{"degrees": 3}', f"<think>hm</think>\n\n{CALL}", CALL, CALL + OTHER])
async def test_a_sound_value_and_calls_are_not_flagged(server: Any, model: Any, text: str) -> None:
    for choice in await answers(server, model, text, response_format=FORMAT):
        assert choice["finish_reason"] == ("tool_calls" if "tool_call" in text else "stop")
        assert "structured_output" not in choice


async def test_arguments_of_a_strict_function_are_checked(server: Any, model: Any) -> None:
    wrong = CALL.replace('"Oslo"', "7")

    for choice in await answers(server, model, CALL + wrong, tools=STRICT):
        assert choice["structured_output"]["error"] == "the arguments of weather: $.city: 7 is not of type 'string'"
    for choice in await answers(server, model, wrong):
        assert "structured_output" not in choice


async def test_a_cut_off_answer_is_not_validated(server: Any, model: Any) -> None:
    model.says('{"deg', reason=FinishReason.LENGTH)

    choice = (await server.post(CHAT, chat(response_format=FORMAT))).json()["choices"][0]

    assert choice["finish_reason"] == "length"
    assert "structured_output" not in choice


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "^(a+)+$", "type": "string"},
        {"$ref": "http://127.0.0.1:1/x.json"},
        {"$ref": "#"},
        {"type": "no such type"},
        {"pattern": "("},
    ],
    ids=["runaway", "remote", "endless", "unknown", "broken"],
)
async def test_an_unusable_schema_is_reported_without_failing_the_answer(
    server: Any, model: Any, schema: dict[str, Any]
) -> None:
    server.generation._checker._timeout = 1.5
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    model.says(json.dumps("a" * 40 + "b"))

    choice = (await server.post(CHAT, chat(response_format=wanted))).json()["choices"][0]
    assert choice["structured_output"]["valid"] is None

    # The next one is checked as if nothing had been.
    model.says('{"degrees": 3}')
    choice = (await server.post(CHAT, chat(response_format=FORMAT))).json()["choices"][0]
    assert "structured_output" not in choice


async def test_the_other_apis_flag_it_too(server: Any, model: Any) -> None:
    model.says("cold")
    tools = [{"name": "weather", "input_schema": CITY}]
    messages: dict[str, Any] = {
        "model": "m",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": tools,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    responses: dict[str, Any] = {
        "model": "m",
        "input": "Weather?",
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "text": {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}},
    }

    for path, body in ((MESSAGES, messages), (RESPONSES, responses)):
        whole = (await server.post(path, body)).json()
        events = events_of(await server.post(path, body | {"stream": True}))
        last = events[-2] if path == MESSAGES else events[-1]["response"]
        for answer in (whole, last):
            assert answer["structured_output"]["valid"] is False


# Which calls are told.


async def test_a_check_that_runs_while_the_frontend_ends_leaves_no_process(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    original = LimitedProcess._start

    def start(process: LimitedProcess) -> Any:
        made = original(process)
        assert made is not None
        started.append(made)
        return made

    monkeypatch.setattr(LimitedProcess, "_start", start)
    checker = server.generation._checker
    checker._timeout = 30.0
    checking = asyncio.create_task(checker.check([SchemaConstraint("the answer", "{}", SCHEMA)], "m", "me"))
    await asyncio.sleep(0)

    await checker.aclose()

    assert (await checking).valid is False
    assert [process.poll() is None for process in started] == [False]


async def test_a_call_of_a_tool_that_is_not_allowed_is_text(server: Any, model: Any) -> None:
    whole, last = await answers(server, model, CALL + OTHER, tool_choice=allowed("weather"))

    arguments = '{"zone": [1, {"a": "}"}]}'
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["weather"]
    assert whole["message"]["content"] == f'{{"name": "time", "arguments": {arguments}}}'
    assert last["finish_reason"] == "tool_calls"

    whole, last = await answers(server, model, OTHER + CALL, tool_choice=allowed("weather"))
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["weather"]

    whole, last = await answers(server, model, OTHER, tool_choice=allowed("weather"))
    assert "tool_calls" not in whole["message"]
    assert last["finish_reason"] == "stop"


async def test_the_prompt_shows_all_tools_whichever_are_allowed(server: Any, model: Any) -> None:
    model.says("x")
    prompts = []
    for choice in ("auto", allowed("time"), allowed("weather", mode="required")):
        assert (await server.post(CHAT, chat(tool_choice=choice))).status == 200
        prompts.append(await model.prompt())

    assert prompts == ["weather time Weather?"] * 3


@pytest.mark.parametrize(
    "choice",
    [
        allowed(),
        allowed("nothing"),
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "never", "tools": []}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}},
    ],
)
async def test_allowed_tools_must_be_among_the_tools(server: Any, choice: dict[str, Any]) -> None:
    reply = await server.post(CHAT, chat(tool_choice=choice))

    assert reply.status == 400
    assert reply.json()["error"]["param"].startswith("tool_choice")


async def test_responses_allow_some_of_the_tools(server: Any, model: Any) -> None:
    model.says(CALL + OTHER)
    body: dict[str, Any] = {
        "model": "m",
        "input": "Weather?",
        "tools": [{"type": "function", "name": name, "parameters": CITY} for name in ("weather", "time")],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    }

    output = (await server.post(RESPONSES, body)).json()["output"]
    refused = await server.post(
        RESPONSES, body | {"tool_choice": {**body["tool_choice"], "tools": [{"type": "function", "name": "none"}]}}
    )

    assert [item["name"] for item in output if item["type"] == "function_call"] == ["weather"]
    assert (refused.status, refused.json()["error"]["param"]) == (400, "tool_choice.tools")


async def test_no_two_calls_of_a_request_have_one_id(server: Any, model: Any) -> None:
    """Some formats let the model write the id."""
    model.parsers = Parsers(MistralParser)
    model.says("[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{}")

    choices = (await server.post(CHAT, chat(n=3))).json()["choices"]

    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len(set(ids)) == 3
    assert "123456789" in ids


def kimi_call(id: str) -> str:
    call = f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("functions.weather:0", "functions.weather:2"),
        ("functions.weather:7", "functions.weather:7"),
        ("functions.weather:" + "9" * 20, "call_"),
    ],
)
async def test_a_call_has_no_id_of_an_earlier_turn(server: Any, model: Any, written: str, told: str) -> None:
    """A client would take it for one that is answered."""
    model.parsers = Parsers(KimiK2Parser)
    model.says(kimi_call(written))
    called = [
        {"id": used, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for used in ("functions.weather:0", "functions.weather:1", "functions.weather:" + "9" * 20)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Rain."} for call in called]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": called}, *results]

    (choice,) = (await server.post(CHAT, chat(messages=messages))).json()["choices"]

    assert choice["message"]["tool_calls"][0]["id"].startswith(told)


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
async def test_messages_have_no_id_of_an_earlier_turn(server: Any, model: Any, stream: bool) -> None:
    model.parsers = Parsers(KimiK2Parser)
    model.says(kimi_call("functions.weather:0"))
    used = ["functions.weather:0", "functions.weather:1"]
    called = [{"type": "tool_use", "id": each, "name": "weather", "input": {}} for each in used]
    results = [{"type": "tool_result", "tool_use_id": each, "content": "Rain."} for each in used]
    body: dict[str, Any] = {
        "model": "m",
        "max_tokens": 50,
        "tools": [{"name": "weather", "input_schema": CITY}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": called},
            {"role": "user", "content": results},
        ],
        "stream": stream,
    }

    reply = await server.post(MESSAGES, body)

    if stream:
        blocks = [event["content_block"] for event in events_of(reply) if event["type"] == "content_block_start"]
    else:
        blocks = reply.json()["content"]
    assert [block["id"] for block in blocks if block["type"] == "tool_use"] == ["functions.weather:2"]


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
async def test_responses_have_no_id_of_an_earlier_turn(server: Any, model: Any, stream: bool) -> None:
    model.parsers = Parsers(KimiK2Parser)
    model.says(kimi_call("functions.weather:0"))
    body: dict[str, Any] = {
        "model": "m",
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "functions.weather:0", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "functions.weather:0", "output": "Rain."},
        ],
        "stream": stream,
    }

    reply = await server.post(RESPONSES, body)

    answer = events_of(reply)[-1]["response"] if stream else reply.json()
    assert [item["call_id"] for item in answer["output"]] == ["functions.weather:1"]
