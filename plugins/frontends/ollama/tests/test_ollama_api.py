"""Ollama's API: what the model is shown of a request, what becomes of its answer, and what is told of models."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
from dynamo_core import BackendError, CompletionUsage, FinishReason, Frontend, LLMEngineOutput, Parsers
from dynamo_core.errors import ServiceOverloaded
from dynamo_plugin_frontend_ollama.frontend import OllamaFrontend
from dynamo_plugin_frontend_ollama.requests import (
    CHAT_PASSIVE,
    EMBED_PASSIVE,
    GENERATE_PASSIVE,
    OPTIONS_PASSIVE,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from dynamo_plugin_frontend_openai.frontend import OpenAIFrontend
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.think_tags import ThinkParser
from dynamo_runtime.assembly.api_set import api_set

CHAT, GENERATE, EMBED = "/api/chat", "/api/generate", "/api/embed"
#: Shows all that it is given.
TEMPLATE = (
    "{% for tool in tools or [] %}TOOL {{ tool | tojson }}\n{% endfor %}"
    "{% if enable_thinking is defined %}THINK {{ enable_thinking }}\n{% endif %}"
    "{% if reasoning_effort %}EFFORT {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}[{{ m.tool_call_id }} {{ m.name }}]{% endif %}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.id }} {{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nOslo, then.\n</think>\n\n"
CALLED = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
PROMPT = "user: Hi\nassistant: "


@pytest.fixture
def apis() -> type[Frontend]:
    return api_set({api.NAME: api for api in (OpenAIFrontend, OllamaFrontend)})


@pytest.fixture
def template() -> str:
    return TEMPLATE


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


def generate(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Hi", **fields}


def lines(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of a stream, one a line, of which only the last is done."""
    assert data.endswith(b"\n")
    found = [json.loads(line) for line in data.decode().splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that a client makes of lines."""
    answer = dict(found[-1])
    keys = [key for key in ("message", "response", "thinking") if any(key in line for line in found)]
    for key in keys:
        if key == "message":
            messages = [line[key] for line in found]
            answer[key] = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
            if thoughts := "".join(each.get("thinking", "") for each in messages):
                answer[key]["thinking"] = thoughts
            if calls := [call for each in messages for call in each.get("tool_calls", ())]:
                answer[key]["tool_calls"] = calls
        else:
            answer[key] = "".join(line.get(key, "") for line in found)
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without ids and times, which differ from answer to answer."""
    kept = {key: value for key, value in answer.items() if not key.endswith(("_duration", "_at"))}
    message = kept.get("message", {})
    if "tool_calls" in message:
        kept["message"] = {**message, "tool_calls": [{"function": each["function"]} for each in message["tool_calls"]]}
    return kept


async def both(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer, which is the same streamed and whole."""
    stream = await server.post(path, body)
    whole = await server.post(path, {**body, "stream": False})
    assert (stream.status, whole.status) == (200, 200), whole.body
    assert stream.headers["content-type"] == "application/x-ndjson"
    assert whole.headers["content-type"] == "application/json"
    assert stream.whole
    assert comparable(folded(lines(stream.body))) == comparable(whole.json())
    answer: dict[str, Any] = whole.json()
    return answer


async def refusal(server: Any, path: str, body: Any) -> tuple[int, str]:
    """Return status and text of an error."""
    reply = await server.post(path, body)
    told = reply.json()
    assert set(told) == {"error"}
    return reply.status, told["error"]


# Answers.


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (GENERATE, generate()), (GENERATE, generate(raw=True))])
async def test_an_answer_is_the_same_streamed_and_whole(
    server: Any, model: Any, path: str, body: dict[str, Any]
) -> None:
    model.says("Hel", 'lo "\n', "there")

    answer = await both(server, path, body)

    text = answer["message"] if path == CHAT else answer["response"]
    assert text == ({"role": "assistant", "content": 'Hello "\nthere'} if path == CHAT else 'Hello "\nthere')
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("m", True, "stop")
    assert answer["prompt_eval_count"] == len("Hi" if body.get("raw") else PROMPT)
    assert answer["eval_count"] == 13
    assert answer["total_duration"] >= answer["prompt_eval_duration"] + answer["eval_duration"] - 1 > 0
    assert answer["load_duration"] == 0
    assert datetime.fromisoformat(answer["created_at"]).tzinfo is not None


async def test_every_piece_is_a_line_as_soon_as_it_comes(server: Any) -> None:
    connection, call, seen = await server.begun(CHAT, chat())
    call.say("lo")
    seen += await connection.until(b'"lo"')
    call.finish()
    seen += await connection.until(b'"eval_duration"')

    assert b"Content-Type: application/x-ndjson" in seen
    assert b'"message":{"role":"assistant","content":"Hel"},"done":false}\n' in seen
    assert b"data:" not in seen


async def test_a_token_limit_gives_done_reason_length(server: Any, model: Any) -> None:
    model.says("Hel", reason=FinishReason.LENGTH)

    assert (await both(server, CHAT, chat()))["done_reason"] == "length"


async def test_calls_have_objects_as_arguments(server: Any, model: Any) -> None:
    model.says_cut(f"Let me see.{CALL}{CALL}", [7])

    answer = await both(server, CHAT, chat(tools=TOOLS))

    assert comparable(answer)["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [CALLED, CALLED],
    }
    assert answer["done_reason"] == "stop"
    assert len({call["id"] for call in answer["message"]["tool_calls"]}) == 2


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_thoughts_are_apart_from_the_answer(server: Any, model: Any, path: str) -> None:
    model.says_cut(f"{THOUGHT}Rain.", [5])

    answer = await both(server, path, chat() if path == CHAT else generate())

    told = answer["message"] if path == CHAT else answer
    assert (told["thinking"].strip(), told["content" if path == CHAT else "response"]) == ("Oslo, then.", "Rain.")


async def test_an_engine_that_takes_text_gets_a_chat_request(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text")
    start = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    usage = CompletionUsage(prompt_tokens=30, completion_tokens=9, total_tokens=39)
    model.puts(
        LLMEngineOutput(delta={"role": "assistant", "reasoning_content": "hm"}),
        LLMEngineOutput(delta={"tool_calls": [start]}),
        LLMEngineOutput(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
        LLMEngineOutput(delta={"tool_calls": [{"index": 0, "function": {"arguments": ' "Oslo"}'}}]}),
        LLMEngineOutput(finish_reason=FinishReason.STOP, completion_usage=usage),
    )
    await cold_server.start()
    messages = [{"role": "user", "content": "What is it?", "images": ["/9j/4AAQ", "iVBORw0K"]}]

    answer = await both(cold_server, CHAT, chat(messages=messages, tools=TOOLS, think="low"))

    asked = (await model.call()).request.body
    urls = [part["image_url"]["url"] for part in asked["messages"][0]["content"][1:]]
    assert urls == ["data:image/jpeg;base64,/9j/4AAQ", "data:image/png;base64,iVBORw0K"]
    assert (asked["tools"], asked["reasoning_effort"]) == (TOOLS, "low")
    assert answer["message"] == {
        "role": "assistant",
        "content": "",
        "thinking": "hm",
        "tool_calls": [{"id": "c1", **CALLED}],
    }
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (30, 9)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, chat(messages=[]), "load"),
        (CHAT, {"model": "m"}, "load"),
        (CHAT, chat(messages=[], keep_alive=0), "unload"),
        (GENERATE, {"model": "m"}, "load"),
        (GENERATE, generate(prompt="", raw=True, stream=False), "load"),
    ],
)
async def test_an_empty_request_reports_the_model_loaded(
    server: Any, model: Any, path: str, body: dict[str, Any], reason: str
) -> None:
    reply = await server.post(path, body)

    empty = {"message": {"role": "assistant", "content": ""}} if path == CHAT else {"response": ""}
    assert comparable(reply.json()) == {"model": "m", **empty, "done": True, "done_reason": reason}
    assert model.count == 0


# What the model is shown.


async def test_results_get_the_ids_of_the_calls_that_they_answer(server: Any) -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"city": "Oslo"}}, **more}

    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Oslo?"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [call("a"), call("b"), call("a"), call("c", id="own")]},
        {"role": "tool", "tool_name": "b", "content": "1"},
        {"role": "tool", "tool_name": "a", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "tool_call_id": "own", "tool_name": "c", "content": "4"},
        {"role": "tool", "tool_name": "d", "content": "5"},
    ]

    shown = await server.shown(CHAT, chat(messages=messages))

    assert shown == (
        "system: Be kind.\nuser: Oslo?\n"
        "assistant: (hm)<call_1 a city=Oslo><call_2 b city=Oslo><call_3 a city=Oslo><own c city=Oslo>\n"
        "tool[call_2 b]: 1\ntool[call_1 a]: 2\ntool[call_3 ]: 3\ntool[own c]: 4\ntool[call_4 d]: 5\nassistant: "
    )


@pytest.mark.parametrize(
    ("think", "shown"),
    [(True, "THINK True\n"), (False, "THINK False\n"), ("high", "THINK True\nEFFORT high\n"), (None, "")],
)
async def test_thinking_fields_become_template_variables(server: Any, think: Any, shown: str) -> None:
    assert await server.shown(CHAT, chat(think=think)) == shown + PROMPT
    assert await server.shown(GENERATE, generate(think=think)) == shown + PROMPT


async def test_tools_are_shown_as_they_came(server: Any) -> None:
    prompt = await server.shown(CHAT, chat(tools=[{"function": TOOLS[0]["function"]}]))

    assert json.loads(prompt.splitlines()[0].removeprefix("TOOL ")) == TOOLS[0]


async def test_an_answer_that_the_client_begins_is_continued(server: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]

    assert await server.shown(CHAT, chat(messages=messages)) == "user: Hi\nassistant: The"


async def test_a_prompt_is_a_user_message_unless_raw(server: Any) -> None:
    assert await server.shown(GENERATE, generate(system="Be kind.", context=[1, 2])) == f"system: Be kind.\n{PROMPT}"
    assert await server.shown(GENERATE, generate(raw=True)) == "Hi"


async def test_a_model_that_does_not_chat_completes_prompts(cold_server: Any) -> None:
    cold_server.add_model(model_types=["completions"])
    await cold_server.start()

    assert await cold_server.shown(GENERATE, generate(system="Be kind.")) == "Be kind.\nHi"
    assert (await refusal(cold_server, CHAT, chat()))[0] == 404


async def test_a_model_that_only_chats_has_no_raw_prompts(cold_server: Any) -> None:
    cold_server.add_model(model_types=["chat"])
    await cold_server.start()

    status, text = await refusal(cold_server, GENERATE, generate(raw=True))
    assert (status, "does not serve" in text) == (404, True)
    assert await cold_server.shown(GENERATE, generate()) == PROMPT


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (GENERATE, generate()), (GENERATE, generate(raw=True))])
async def test_options_reach_the_engine(server: Any, model: Any, path: str, body: dict[str, Any]) -> None:
    model.says("x")
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "num_predict": 7}
    penalties = {"repeat_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.75}
    without_effect = {"num_ctx": 4096, "num_gpu": 1, "use_mmap": True, "typical_p": 1.0, "mirostat": 0}

    reply = await server.post(path, {**body, "options": options | penalties | without_effect | {"stop": ["END"]}})

    assert reply.status == 200, reply.body
    request = (await model.call()).request
    sampling, stop = request.sampling_options, request.stop_conditions
    assert (stop.max_tokens, stop.stop, sampling.seed) == (7, ["END"], 3)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, 0.25, 0.75)


async def test_negative_options_have_no_effect(server: Any, model: Any) -> None:
    model.says("x")
    options = {"num_predict": -1, "seed": -1, "stop": []}

    assert (await server.post(CHAT, chat(options=options))).status == 200

    request = (await model.call()).request
    conditions = request.stop_conditions
    assert (conditions.max_tokens, conditions.stop, request.sampling_options.seed) == (None, None, None)


@pytest.mark.parametrize(("wanted", "guided"), [("json", {"type": "object"}), (SCHEMA, SCHEMA), ("", None)])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (GENERATE, generate()), (GENERATE, generate(raw=True))])
async def test_a_format_guides_the_decoding(
    server: Any, model: Any, path: str, body: dict[str, Any], wanted: Any, guided: Any
) -> None:
    model.says('{"city": "Oslo"}')

    answer = await both(server, path, body | {"format": wanted})

    decoding = (await model.call()).request.sampling_options.guided_decoding
    assert (decoding and decoding.json) == guided
    assert (answer["message"]["content"] if path == CHAT else answer["response"]) == '{"city": "Oslo"}'


# Refusals and errors.


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (CHAT, chat(strange=1), "Unsupported parameter(s): `strange`"),
        (CHAT, chat(options={"strange": 1}), "options.strange: Unsupported parameter(s): `strange`"),
        (CHAT, chat(options={"mirostat": 1}), "options.mirostat: Unsupported value of parameter `mirostat`"),
        (CHAT, chat(options={"temperature": 3}), "options.temperature"),
        (CHAT, chat(options={"repeat_penalty": 0}), "options.repeat_penalty"),
        (CHAT, chat(logprobs=True), "Unsupported value of parameter `logprobs`"),
        (CHAT, chat(format="yaml"), 'format must be "json" or a JSON Schema'),
        (CHAT, chat(think="deeply"), "think"),
        (CHAT, chat(messages=[{"role": "robot", "content": ""}]), "unknown role 'robot'"),
        (CHAT, chat(messages=[{"role": "user", "content": "?", "images": ["iVBO"]}]), "images are not supported"),
        (CHAT, {"messages": []}, "model"),
        (CHAT, b"{", "Failed to deserialize"),
        (GENERATE, generate(suffix="x"), "Unsupported value of parameter `suffix`"),
        (GENERATE, generate(template="x"), "Unsupported value of parameter `template`"),
        (GENERATE, generate(images=["iVBO"]), "images are not supported by this model"),
        (GENERATE, generate(images=["iVBO"], raw=True), "images"),
        (GENERATE, generate(raw=True, system="x"), "raw prompts have no system"),
        (EMBED, {"model": "m", "input": [1]}, "input"),
        ("/api/show", {}, "model is required"),
    ],
)
async def test_a_refusal_names_the_fault(server: Any, path: str, body: Any, text: str) -> None:
    status, told = await refusal(server, path, body)

    assert (status, text in told) == (400, True), told


@pytest.mark.parametrize("path", [CHAT, GENERATE, EMBED, "/api/embeddings", "/api/show"])
async def test_an_unknown_model_has_the_apis_error_message(server: Any, path: str) -> None:
    assert await refusal(server, path, {"model": "no/such"}) == (404, "model 'no/such' not found")


async def test_every_model_has_the_tag_latest(server: Any, model: Any) -> None:
    model.says("x")

    assert (await both(server, CHAT, chat(model="m:latest")))["model"] == "m"
    assert (await server.post("/api/show", {"model": "m:latest"})).status == 200
    assert (await refusal(server, CHAT, chat(model="m:7b")))[0] == 404


async def test_unknown_fields_and_options_are_left_out_where_that_is_configured(cold_server: Any) -> None:
    cold_server.configure(unknown_fields="ignore")
    cold_server.add_model().says("x")
    await cold_server.start()

    for path, body in ((CHAT, chat()), (GENERATE, generate(raw=True)), (EMBED, {"model": "m", "input": []})):
        if path == EMBED:
            cold_server.add_model("m", capabilities=["embed"])
        reply = await cold_server.post(path, body | {"strange": 1, "options": {"odd": 1}})
        assert reply.status == 200, reply.body
        assert reply.headers["x-dynamo-ignored-fields"] == "strange, options.odd"


async def test_an_error_before_the_answer_has_its_status(server: Any, model: Any) -> None:
    model.refusal = ServiceOverloaded()

    status, text = await refusal(server, CHAT, chat())

    assert (status, "busy" in text) == (503, True)


async def test_a_broken_stream_ends_with_an_error_line(server: Any) -> None:
    connection, call, seen = await server.begun(CHAT, chat())
    call.fail(BackendError.InvalidArgument("no more"))

    seen += await connection.ended()

    assert b'{"error":"no more"}\n' in seen
    assert b'"done":true' not in seen
    assert not seen.endswith(b"0\r\n\r\n")


async def test_silence_is_broken_by_blanks_before_the_next_line(cold_server: Any) -> None:
    cold_server.keep_alive = 0.01
    cold_server.add_model()
    await cold_server.start()
    connection, call = await cold_server.asked(CHAT, chat())

    seen = await connection.until(b"1\r\n \r\n1\r\n \r\n")
    call.finish(text="Hi")
    seen += await connection.until(b"0\r\n\r\n")

    body = seen.partition(b"\r\n\r\n")[2]
    text = b"".join(body.split(b"\r\n")[1::2])
    assert text.startswith(b"  ")
    assert folded(lines(text))["message"]["content"] == "Hi"


async def test_programs_may_send_any_content_type_and_pages_may_not(server: Any, model: Any) -> None:
    model.says("x")

    plain = await server.post(CHAT, chat(), content_type="application/x-www-form-urlencoded")
    page = await server.post(CHAT, chat(), content_type="text/plain", origin="http://elsewhere.example")

    assert (plain.status, page.status) == (200, 415)
    assert set(page.json()) == {"error"}


async def test_the_listeners_own_refusals_have_the_shape_of_the_api(server: Any) -> None:
    status, text = await refusal(server, CHAT, b" " * 2_000_000)

    assert (status, "exceeds the limit" in text) == (413, True)


# Embeddings.


@pytest.mark.parametrize(("given", "vectors"), [("Hi", 1), (["Hi", "Hello"], 2), ([], 0), (None, 0)])
async def test_texts_are_embedded(cold_server: Any, given: Any, vectors: int) -> None:
    model = cold_server.add_model(capabilities=["embed"])
    await cold_server.start()

    answer = (await cold_server.post(EMBED, {"model": "m", "input": given, "dimensions": 2})).json()

    assert answer["embeddings"] == [[2.0, 0.5], [5.0, 0.5]][:vectors]
    assert (answer["model"], answer["prompt_eval_count"]) == ("m", (0, 2, 7)[vectors])
    assert answer["total_duration"] > answer["load_duration"] == 0
    assert [asked.dimensions for asked in model.embedded] == [2] * bool(vectors)


async def test_a_text_that_is_too_long_is_cut_unless_that_is_refused(cold_server: Any) -> None:
    model = cold_server.add_model(capabilities=["embed"], context_length=8)
    await cold_server.start()
    body = {"model": "m", "input": "0123456789"}

    assert (await cold_server.post(EMBED, body)).status == 200
    assert len(model.embedded[0].token_ids[0]) == 7
    assert (await refusal(cold_server, EMBED, body | {"truncate": False}))[0] == 400


async def test_the_older_route_embeds_one_prompt(cold_server: Any) -> None:
    cold_server.add_model(capabilities=["embed"])
    await cold_server.start()

    for prompt, vector in (("Hi", [2.0, 0.5]), ("", [])):
        reply = await cold_server.post("/api/embeddings", {"model": "m", "prompt": prompt})
        assert reply.json() == {"embedding": vector}


async def test_embedding_with_a_model_without_embeddings_is_a_501(server: Any) -> None:
    assert await refusal(server, EMBED, {"model": "m", "input": "Hi"}) == (501, "Model 'm' does not make embeddings")


# Models.


async def test_models_are_listed_with_the_fields_of_clients(cold_server: Any) -> None:
    cold_server.add_model("b", checksum="abc")
    cold_server.add_model("a", files={"config.json": b'{"model_type": "qwen3"}'}).missing_roles = ["decode"]
    await cold_server.start()

    tags = (await cold_server.get("/api/tags")).json()["models"]
    running = (await cold_server.get("/api/ps")).json()["models"]

    assert [(each["name"], each["model"], each["digest"]) for each in tags] == [("a", "a", ""), ("b", "b", "abc")]
    assert tags[0]["details"]["families"] == ["qwen3"]
    assert all(datetime.fromisoformat(each["modified_at"]) for each in tags)
    # One of the other has no worker to decode.
    assert [(each["name"], each["context_length"]) for each in running] == [("b", 1000)]


async def test_show_lists_the_models_capabilities(cold_server: Any) -> None:
    files = {"chat_template.jinja": TEMPLATE.encode(), "config.json": b'{"model_type": "qwen3"}'}
    cold_server.add_model(files=files, capabilities=["embed"]).parsers = Parsers(HermesParser, ThinkParser)
    cold_server.add_model("plain", files={"config.json": b"["}, model_types=["completions"], context_length=None)
    await cold_server.start()

    shown = (await cold_server.post("/api/show", {"name": "m"})).json()
    plain = (await cold_server.post("/api/show", {"model": "plain", "verbose": True})).json()

    assert shown["capabilities"] == ["completion", "tools", "thinking", "embedding"]
    assert shown["model_info"] == {
        "general.architecture": "qwen3",
        "general.basename": "m",
        "qwen3.context_length": 1000,
    }
    assert shown["template"] == TEMPLATE
    assert plain["capabilities"] == ["completion"]
    assert plain["model_info"] == {"general.architecture": "dynamo", "general.basename": "plain"}


async def test_clients_find_a_server_and_its_version(server: Any) -> None:
    root = await server.get("/")

    assert (root.status, root.body) == (200, b"Ollama is running")
    assert (await server.get("/api/version")).json()["version"].count(".") == 2


@pytest.mark.parametrize("name", ["pull", "push", "create", "copy", "blobs/sha256:1"])
async def test_models_are_not_changed_here(server: Any, name: str) -> None:
    status, text = await refusal(server, f"/api/{name}", {"model": "x"})

    assert (status, "served by the workers of the config" in text) == (501, True)


async def test_the_routes_may_be_elsewhere(cold_server: Any) -> None:
    cold_server.configure(ollama_prefix="/ollama/api")
    cold_server.add_model().says("x")
    await cold_server.start()

    assert (await cold_server.post("/ollama/api/chat", chat())).status == 200
    assert (await cold_server.get("/ollama")).body == b"Ollama is running"
    assert (await cold_server.get("/")).status == 404


async def test_streams_are_described_as_lines(server: Any) -> None:
    described = (await server.get("/openapi.json")).json()["paths"]

    assert set(described[CHAT]["post"]["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}
    assert set(described["/v1/completions"]["post"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/event-stream",
    }


def test_no_field_is_both_read_and_without_effect() -> None:
    for kind, table in (
        (OllamaChatRequest, CHAT_PASSIVE),
        (OllamaGenerateRequest, GENERATE_PASSIVE),
        (OllamaEmbedRequest, EMBED_PASSIVE),
        (OllamaOptions, OPTIONS_PASSIVE),
    ):
        assert not set(kind.__struct_fields__) & set(table)
