"""Small promises of the API that no other test here is about."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import msgspec
import pytest
from dynamo_core import CompletionUsage, FinishReason, LLMEngineOutput
from dynamo_core.errors import ServiceOverloaded, Unavailable, WorkerOverloaded
from dynamo_core.protocol import Annotated

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture
def model(model: Any) -> Any:
    model.script = lambda call: call.finish(text="x")
    return model


@pytest.mark.parametrize(("path", "prefix"), [("/v1/chat/completions", "chatcmpl-"), ("/v1/completions", "cmpl-")])
async def test_every_request_has_an_id_of_its_own_which_is_that_of_the_log(
    server: Any, model: Any, path: str, prefix: str
) -> None:
    body = {"model": "m", "prompt": "Hi"} if prefix == "cmpl-" else {"model": "m", "messages": [_user("Hi")]}

    ids = [(await server.post(path, body)).json()["id"] for _ in range(3)]

    assert all(re.fullmatch(prefix + UUID, each) for each in ids)
    assert [f"{prefix}{record.request_id}" for record in server.records] == ids
    assert len(set(ids)) == 3


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_id_of_an_answer_is_that_of_its_body_and_of_the_log(
    server: Any, model: Any, stream: bool, large: bool
) -> None:
    model.script = lambda call: call.finish(text="x" * 300_000 if large else "x")

    reply = await server.chat(stream=stream)

    named = reply.events[0]["id"] if stream else reply.json()["id"]
    assert named == f"chatcmpl-{reply.headers['x-request-id']}"
    assert (await server.record()).request_id == reply.headers["x-request-id"]
    assert "server" not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_and_refusals_have_a_request_id_too(server: Any, model: Any, stream: bool) -> None:
    model.refusal = ServiceOverloaded(retry_after=2.5)
    refusals = [
        await server.chat(stream=stream),
        await server.chat(stream=stream, model="nope"),
        await server.chat(stream=stream, temperature=9),
        await server.post("/v1/chat/completions", b"{"),
        await server.get("/v1/models"),
        await server.get("/v1/models/nope"),
        await server.get("/nope"),
    ]

    assert [reply.status for reply in refusals] == [503, 404, 400, 400, 200, 404, 404]
    ids = [reply.headers["x-request-id"] for reply in refusals]
    assert all(re.fullmatch(UUID, each) for each in ids)
    assert len(set(ids)) == len(ids)
    assert not any("server" in reply.headers for reply in refusals)


async def test_an_answer_is_whole_unless_a_stream_is_asked_for(server: Any, model: Any) -> None:
    before = int(time.time())

    for fields in ({}, {"stream": False}, {"stream": None}):
        answer = (await server.chat(**fields)).json()
        assert answer["object"] == "chat.completion"
        assert before <= answer["created"] <= time.time()


async def test_an_engine_gets_the_same_request_for_streamed_and_whole_answers(server: Any, model: Any) -> None:
    requests = []
    for streaming in (False, True):
        await server.chat(stream=streaming, max_tokens=5, stop=["b"], nvext={"top_k": 3})
        requests.append((await model.call()).request)

    assert requests[0] == requests[1]


async def test_absent_client_fields_are_not_sent_to_the_engine(server: Any, model: Any) -> None:
    await server.chat()
    request = (await model.call()).request

    told = msgspec.json.decode(msgspec.json.encode(request))
    assert (told["sampling_options"], told["output_options"]) == ({}, {})
    assert told["stop_conditions"] == {"stop_token_ids_hidden": [257]}
    assert set(told) == {
        *("model", "token_ids", "eos_token_ids", "stop_conditions", "sampling_options", "output_options")
    }


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool", "function"])
async def test_every_role_is_shown_to_the_model(server: Any, model: Any, role: str) -> None:
    reply = await server.chat(messages=[{"role": role, "content": "Be brief"}, _user("Hi")])

    assert reply.status == 200
    assert bytes((await model.call()).request.token_ids) == f"{role}: Be brief\nuser: Hi\nassistant: ".encode()


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": None}, 9),
    ],
)
async def test_the_newer_name_of_the_limit_goes_before_the_older(
    server: Any, model: Any, fields: dict[str, Any], limit: int
) -> None:
    await server.chat(**fields)

    assert (await model.call()).request.stop_conditions.max_tokens == limit


@pytest.mark.parametrize("stop", ["b", ["b"], ["zz", "b"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_may_be_one_text_or_several(server: Any, model: Any, stop: Any, stream: bool) -> None:
    model.script = lambda call: call.finish(text="abc")

    reply = await server.chat(stop=stop, stream=stream)

    said = reply.text() if stream else reply.json()["choices"][0]["message"]["content"]
    assert said == "a"


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.EOS, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTENT_FILTER, "content_filter"),
        (None, "stop"),
    ],
)
async def test_odd_items_become_one_answer_with_the_last_usage(
    server: Any, model: Any, reason: FinishReason | None, told: str
) -> None:
    def usage(count: int) -> CompletionUsage:
        return CompletionUsage(prompt_tokens=99, completion_tokens=count, total_tokens=99 + count, cached_tokens=count)

    def script(call: Any) -> None:
        call.put(LLMEngineOutput())
        call.say("a", completion_usage=usage(1))
        call.say("")
        call.say("bc", finish_reason=reason, completion_usage=usage(2))
        call.complete()

    model.script = script

    answer = (await server.chat()).json()

    [choice] = answer["choices"]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "abc"}, told)
    # Tokens are counted here; what was cached only the engine knows.
    assert answer["usage"] == {
        "prompt_tokens": len("user: Hi\nassistant: "),
        "completion_tokens": 3,
        "total_tokens": len("user: Hi\nassistant: ") + 3,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert server.metrics.registry.get_sample_value("dynamo_frontend_cached_tokens_sum", {"model": "m"}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_both_modes_are_counted_alike(server: Any, model: Any, stream: bool) -> None:
    await server.chat(stream=stream)
    record = await server.record()

    kind = "stream" if stream else "unary"
    assert (record.request_type, record.status, record.http_status, record.output_tokens) == (kind, "success", 200, 1)
    labels = {"endpoint": "chat_completions", "model": "m", "request_type": kind}
    assert server.metrics.registry.get_sample_value("dynamo_frontend_requests_started_total", labels) == 1
    assert [server.gauge(name) for name in ("active_requests", "inflight_requests", "queued_requests")] == [0, 0, 0]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_books_name_the_worker_that_an_answer_has_moved_to(server: Any, model: Any, stream: bool) -> None:
    moved = asyncio.Event()

    def ends_elsewhere() -> None:
        sink = call.stream.begin()
        call.stream.attach(call.grip, 8)
        sink.data(LLMEngineOutput([*b"y"], FinishReason.STOP))
        sink.event(Annotated.from_complete_final())
        moved.set()

    model.script = lambda call: call.say("x")
    asking = asyncio.ensure_future(server.chat(stream=stream))
    call = await model.call()
    asyncio.get_running_loop().call_soon(ends_elsewhere)
    await moved.wait()

    assert (await asking).status == 200
    assert (await server.record()).instance_id == 8


async def test_failures_before_the_model_lookup_are_counted(server: Any) -> None:
    await server.post("/v1/chat/completions", b"{")
    await server.chat(model="nope")
    await server.chat(temperature=9)

    def failures(kind: str, reason: str) -> Any:
        labels = {"class": kind, "reason": reason}
        return server.metrics.registry.get_sample_value("dynamo_frontend_failures_total", labels)

    assert failures("InvalidRequest", "validation") == 2
    assert failures("NotFound", "not_found") == 1


@pytest.mark.parametrize(
    "error",
    [ServiceOverloaded(retry_after=2.5), WorkerOverloaded("full"), Unavailable("no worker has registered yet")],
    ids=lambda error: type(error).__name__,
)
async def test_every_503_has_retry_after_and_a_request_id(server: Any, model: Any, error: Exception) -> None:
    model.refusal = error

    for stream in (False, True):
        body = {"model": "m", "messages": [_user("Hi")], "stream": stream}
        reply = await server.post("/v1/chat/completions", body, x_request_id="mine")
        assert reply.status == 503
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert reply.headers["x-request-id"] == "mine"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
