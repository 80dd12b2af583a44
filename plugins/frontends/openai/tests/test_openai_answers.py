"""Unary answers, several choices, log-probabilities, annotations, engines that take text, embeddings, model lists."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import pytest
from dynamo_core import BackendError, CompletionUsage, DynamoError, FinishReason, LLMEngineOutput
from dynamo_core.errors import DeadlineExceeded, Disconnected, ResponseTimeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

#: The end of a chunked body, with the end of the chunk before: an id at the end of the head may end in 0, too.
LAST_CHUNK = b"\n0\r\n\r\n"

PROMPT = "user: Hi\nassistant: "


async def test_a_unary_chat_answer_has_the_shape_of_the_seed(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="Hello!")

    reply = await server.chat()

    answer = reply.json()
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "m")
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello!"}, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 6,
        "total_tokens": len(PROMPT) + 6,
    }
    record = await server.record()
    assert (record.status, record.request_type, record.endpoint) == ("success", "unary", "chat_completions")
    assert (record.prompt_tokens, record.output_tokens, record.instance_id) == (len(PROMPT), 6, 7)


@pytest.mark.parametrize(
    ("error", "status", "metric"),
    [
        (BackendError.EngineShutdown("path /secret"), 503, "unavailable"),
        (Disconnected("path /secret"), 503, "unavailable"),
        (ResponseTimeout("path /secret"), 503, "unavailable"),
        (DeadlineExceeded("path /secret"), 504, "response_timeout"),
        (BackendError.Unknown("path /secret"), 500, "internal"),
    ],
)
async def test_a_unary_answer_that_breaks_is_an_error_without_details(
    server: Any, model: Any, error: DynamoError, status: int, metric: str, caplog: pytest.LogCaptureFixture
) -> None:
    def script(call: Any) -> None:
        call.say("half")
        call.fail(error)

    model.script = script

    reply = await server.chat()

    assert reply.status == status
    assert b"/secret" not in reply.body
    assert reply.headers.get("retry-after") == ("1" if status == 503 else None)
    assert (await server.record()).error_type == metric
    # That a worker was lost is no bug: one that is, is logged with its place.
    assert any(record.exc_info for record in caplog.records) is (metric == "internal")


async def test_stop_strings_count_only_after_the_least_number_of_tokens(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="a.b.c")

    reply = await server.chat(stop=".", min_tokens=3)

    assert reply.json()["choices"][0]["message"]["content"] == "a.b"


async def test_n_answers_are_asked_for_one_by_one_each_with_its_own_seed(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text=f"seed {call.request.sampling_options.seed}")

    reply = await server.chat(n=3, seed=10)

    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert texts == ["seed 10", "seed 11", "seed 12"]
    assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1, 2]
    assert reply.json()["usage"]["prompt_tokens"] == len(PROMPT)


async def test_several_answers_are_streamed_side_by_side(server: Any, model: Any) -> None:
    connection = await server.connect()
    connection.send("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "n": 2,
                                             "stream": True})  # fmt: skip
    one, two = await model.call(), await model.call()
    two.say("second")
    await connection.until(b'"index":1,"delta":{"content":"second"}')
    one.say("first")
    await connection.until(b'"index":0,"delta":{"content":"first"}')
    one.finish()
    await connection.until(b'"index":0,"delta":{},"finish_reason":"stop"')
    two.finish(FinishReason.LENGTH)
    rest = await connection.until(LAST_CHUNK)

    assert b'"index":1,"delta":{},"finish_reason":"length"' in rest
    assert rest.count(b"[DONE]") == 1
    assert one.ctx.id != two.ctx.id, "children can be told apart by engines"


async def test_if_one_of_several_is_refused_the_others_are_given_back(server: Any, model: Any) -> None:
    calls: list[Any] = []

    def script(call: Any) -> None:
        calls.append(call)
        model.refusal = BackendError.InvalidArgument("no second one")

    model.script = script

    reply = await server.chat(n=2)

    assert reply.status == 400
    await asyncio.wait_for(calls[0].released.wait(), 5)


async def test_a_batch_of_prompts_gets_an_answer_each(server: Any, model: Any) -> None:
    def script(call: Any) -> None:
        call.finish(text=bytes(call.request.token_ids).decode().upper())

    model.script = script

    texts = await server.complete(prompt=["ab", "cd"])
    tokens = await server.complete(prompt=[[97], [98, 99]], echo=True)
    single = await server.complete(prompt=[97, 98])
    stream = await server.complete(prompt=["ab", "cd"], stream=True)

    assert [(c["index"], c["text"]) for c in texts.json()["choices"]] == [(0, "AB"), (1, "CD")]
    assert texts.json()["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert [c["text"] for c in tokens.json()["choices"]] == ["aA", "bcBC"]
    assert [c["text"] for c in single.json()["choices"]] == ["AB"]
    assert (stream.text(0), stream.text(1)) == ("AB", "CD")


async def test_echo_repeats_the_prompt_in_streams_too(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="!")

    reply = await server.complete(prompt="Hi", echo=True, stream=True)

    assert reply.text() == "Hi!"


async def test_annotations_come_before_the_first_chunk_and_before_the_finish_chunk(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="x")
    wanted = {"annotations": ["token_ids", "formatted_prompt", "timing", "other"]}

    reply = await server.chat(stream=True, nvext=wanted)

    items = reply.body.decode().split("\n\n")
    assert items[0] == f"event: formatted_prompt\n: {json.dumps(PROMPT)}"
    ids = json.dumps(list(PROMPT.encode()), separators=(",", ":"))
    assert items[1] == f"event: token_ids\n: {json.dumps(ids)}"
    assert '"role"' in items[2]
    name, comment = items[4].split("\n")
    timing = json.loads(comment.removeprefix(": "))
    assert name == "event: timing"
    assert list(timing) == ["request_received_ms", "ttft_ms", "total_time_ms"]
    assert timing["ttft_ms"] <= timing["total_time_ms"]
    assert '"finish_reason":"stop"' in items[5]


async def test_an_engine_that_takes_text_gets_the_body_and_its_text_passes_through(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text", capabilities=[])
    await cold_server.start()
    tools = [{"type": "function", "function": {"name": "f"}}]
    call_delta = {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": '{"a"'}}]}
    more_delta = {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}
    usage = CompletionUsage(prompt_tokens=50, completion_tokens=9, total_tokens=59)
    model.puts(
        LLMEngineOutput(text="Hel"),
        LLMEngineOutput(text="lo"),
        LLMEngineOutput(delta=call_delta),
        LLMEngineOutput(delta=more_delta),
        LLMEngineOutput(finish_reason=FinishReason.STOP, completion_usage=usage),
    )

    unary = await cold_server.chat(tools=tools)
    stream = await cold_server.chat(tools=tools, stream=True)

    body = (await model.call()).request.body
    assert body["tools"] == tools
    message = unary.json()["choices"][0]["message"]
    assert message["content"] == "Hello"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert unary.json()["usage"] == {"prompt_tokens": 50, "completion_tokens": 9, "total_tokens": 59}
    assert stream.text() == "Hello"
    assert [e["choices"][0]["delta"] for e in stream.events[2:4]] == [call_delta, more_delta]
    # The engine says why it ended, the frontend has seen that it called a tool.
    assert unary.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert (await cold_server.record()).output_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_takes_text_and_makes_one_choice_is_asked_once_for_each(
    cold_server: Any, stream: bool
) -> None:
    model = cold_server.add_model(model_input="text", capabilities=[])
    await cold_server.start()
    calls: list[Any] = []

    def script(call: Any) -> None:
        calls.append(call.request)
        usage = CompletionUsage(prompt_tokens=50, completion_tokens=1, cached_tokens=40)
        call.put(LLMEngineOutput(text=str(len(calls)), finish_reason=FinishReason.STOP, completion_usage=usage))
        call.complete()

    model.script = script
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = await cold_server.chat(n=3, seed=5, **options)

    if stream:
        told, usage = [reply.text(index) for index in range(3)], reply.events[-2]["usage"]
    else:
        choices = reply.json()["choices"]
        told, usage = [choice["message"]["content"] for choice in choices], reply.json()["usage"]
    assert told == ["1", "2", "3"]
    # The prompt that all share counts once.
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50, 3)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 40}
    assert [request.body.get("n") for request in calls] == [None] * 3
    assert [request.body["seed"] for request in calls] == [5, 6, 7]
    # One terminal is what the worker waits for.
    assert [request.sampling_options.n for request in calls] == [None] * 3


async def test_several_prompts_become_several_engine_requests(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text", capabilities=[])
    await cold_server.start()

    def script(call: Any) -> None:
        call.put(LLMEngineOutput(text=call.request.body["prompt"].upper(), finish_reason=FinishReason.STOP))
        call.complete()

    model.script = script
    reply = await cold_server.complete(prompt=["a", "b"], n=2, best_of=2)

    assert [choice["text"] for choice in reply.json()["choices"]] == ["A", "A", "B", "B"]
    assert "best_of" not in (await model.call()).request.body


async def test_an_engine_that_makes_one_choice_cannot_choose_the_best(cold_server: Any) -> None:
    cold_server.add_model(model_input="text", capabilities=[])
    await cold_server.start()

    assert (await cold_server.complete(best_of=2)).status == 501


async def test_an_engine_that_takes_text_is_waited_for_until_all_choices_have_ended(cold_server: Any) -> None:
    model = cold_server.add_model(model_input="text", capabilities=["multi_choice"])
    await cold_server.start()

    def script(call: Any) -> None:
        for index in range(4):
            call.put(LLMEngineOutput(text=str(index), finish_reason=FinishReason.STOP, index=index))
        call.complete()

    model.script = script
    reply = await cold_server.post("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2})

    assert [choice["text"] for choice in reply.json()["choices"]] == ["0", "1", "2", "3"]
    # What the worker goes by.
    assert (await model.call()).request.sampling_options.n == 4


async def test_embeddings_come_as_numbers_or_packed(cold_server: Any) -> None:
    cold_server.add_model(model_types=["embeddings"], capabilities=["embed"])
    await cold_server.start()

    plain = await cold_server.post("/v1/embeddings", {"model": "m", "input": ["abc", "d"]})
    packed = await cold_server.post(
        "/v1/embeddings", {"model": "m", "input": [1, 2], "encoding_format": "base64", "dimensions": 2}
    )

    assert plain.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.5]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert struct.unpack("<2f", base64.b64decode(packed.json()["data"][0]["embedding"])) == (2.0, 0.5)
    assert cold_server.directory.models["m"].embedded[1].dimensions == 2
    assert (await cold_server.record()).endpoint == "embeddings"


async def test_an_engine_without_embeddings_is_not_asked_for_them(server: Any) -> None:
    reply = await server.post("/v1/embeddings", {"model": "m", "input": "x"})

    assert reply.status == 501


async def test_the_model_list_has_the_shape_of_the_seed(server: Any) -> None:
    server.add_model("a/b", model_types=["completions"], namespace="staging")

    reply = await server.get("/v1/models")
    one = await server.get("/v1/models/a/b")
    quoted = await server.get("/v1/models/a%2Fb")
    missing = await server.get("/v1/models/nope")

    data = reply.json()["data"]
    assert reply.json()["object"] == "list"
    assert [(m["id"], m["object"], m["owned_by"]) for m in data] == [
        ("a/b", "model", "staging"),
        ("m", "model", "dynamo"),
    ]
    assert one.json()["id"] == quoted.json()["id"] == "a/b"
    assert isinstance(data[0]["created"], int)
    assert (missing.status, missing.json()["code"]) == (404, 404)


async def test_the_owner_of_all_models_can_be_set(cold_server: Any) -> None:
    cold_server.config = cold_server.config.model_copy(update={"owned_by": "acme"})
    cold_server.add_model()
    await cold_server.start()

    assert [model["owned_by"] for model in (await cold_server.get("/v1/models")).json()["data"]] == ["acme"]
    assert (await cold_server.get("/v1/models/m")).json()["owned_by"] == "acme"


async def test_the_extended_model_list_has_kinds_and_facts(server: Any) -> None:
    server.add_model("a/b", model_types=["completions"], capabilities=["embed", "rerank", "score"])
    server.add_model("c", model_types=["rerank"], capabilities=["rerank"])

    lists = (await server.get("/dynamo/alpha/list-models")).json()

    assert lists["chat_completion_models"] == ["m"]
    assert lists["completion_models"] == ["a/b", "m"]
    assert lists["embedding_models"] == ["a/b"]
    assert lists["score_models"] == ["a/b"]
    assert lists["rerank_models"] == ["a/b", "c"]
    assert [model["name"] for model in lists["models"]] == ["a/b", "c", "m"]
    assert all(model["ready"] for model in lists["models"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(1, 7), max_size=30))
def test_any_text_survives_any_chunking(text: str, cuts: list[int]) -> None:
    from dynamo_core import PreprocessedRequest
    from dynamo_generation.answers.render import Collected, Identity
    from dynamo_generation.choices.choice import Piece, TokenChoice
    from dynamo_plugin_frontend_openai.render_chat import ChatRenderer
    from dynamo_text import ByteTokenizer

    data = text.encode()
    choice = TokenChoice(0, PreprocessedRequest(token_ids=[1]), ByteTokenizer())
    renderer = ChatRenderer(Identity("id", 1, "m"), 1, ByteTokenizer())
    collected = Collected(choice)
    chunks = b""
    while data or choice.finish_reason is None:
        size = cuts.pop() if cuts else 5
        part, data = data[:size], data[size:]
        reason = None if data else FinishReason.LENGTH
        piece = Piece(choice, choice.feed(LLMEngineOutput(list(part), reason)), None, None, reason is not None)
        chunks += renderer.piece(piece)
        renderer.add(collected, piece)

    deltas = [json.loads(item[6:])["choices"][0]["delta"]["content"] for item in chunks.split(b"\n\n") if item]
    assert "".join(deltas) == text
    assert json.loads(b"".join(renderer.body([collected], {}, None)))["choices"][0]["message"]["content"] == text
    assert choice.completion_tokens == len(text.encode())


@pytest.mark.parametrize("stream", [True, False])
async def test_the_clients_request_id_comes_back(server: Any, model: Any, stream: bool) -> None:
    model.script = lambda call: call.finish(text="x")
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": stream}

    reply = await server.post("/v1/chat/completions", body, x_request_id="mine-1")

    assert reply.headers["x-request-id"] == "mine-1"
    assert (await server.record()).x_request_id == "mine-1"
    assert (await model.call()).ctx.metadata["x-request-id"] == "mine-1"
