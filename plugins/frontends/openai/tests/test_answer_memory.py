"""Whole answers take a bounded amount of memory, and log-probabilities bounded turns of the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from asyncio import events
from typing import Any

import pytest
from dynamo_core import EmbedOutput, FinishReason, LLMEngineOutput, TopLogprob
from dynamo_generation.answers.answer_memory import SMALL

CHAT, COMPLETE, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
MB = 1024 * 1024
TALK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
#: Seconds of the loop's own time that one callback may take.
LONGEST = 0.1


def scored(count: int, width: int = 20) -> LLMEngineOutput:
    """Return so many tokens with so many alternatives each: about 60 bytes of JSON for every one."""
    tops = [TopLogprob(97 + rank, -0.1234567 * rank, rank) for rank in range(width)]
    return LLMEngineOutput([97] * count, log_probs=[-0.5] * count, top_logprobs=[tops] * count)


def refused(server: Any, bound: str) -> float:
    name = "dynamo_frontend_collected_too_large_total"
    return server.metrics.registry.get_sample_value(name, {"bound": bound}) or 0.0


def held(server: Any) -> float | None:
    value: float | None = server.metrics.registry.get_sample_value("dynamo_frontend_collected_bytes")
    return value


@pytest.fixture
async def narrow(cold_server: Any) -> Any:
    """Return a server that collects little."""
    cold_server.configure(unary_answer_limit_mb=2, unary_answers_limit_mb=3)
    cold_server.add_model(context_length=None)
    await cold_server.start()
    return cold_server


@pytest.mark.parametrize(
    ("path", "body", "field", "count", "scores"),
    [
        (CHAT, {"max_tokens": 3000, "logprobs": True, "top_logprobs": 20}, "max_tokens", "n", "top_logprobs"),
        (CHAT, {"max_tokens": 24, "n": 128, "logprobs": True, "top_logprobs": 20}, "max_tokens", "n", "top_logprobs"),
        (CHAT, {"max_completion_tokens": 40_000, "logprobs": True}, "max_completion_tokens", "n", "top_logprobs"),
        (COMPLETE, {"max_tokens": 50_000, "logprobs": 5}, "max_tokens", "n", "logprobs"),
        (COMPLETE, {"max_tokens": 6000, "best_of": 10, "logprobs": 5}, "max_tokens", "best_of", "logprobs"),
        (COMPLETE, {"max_tokens": 6000, "prompt": ["Hi"] * 10, "logprobs": 5}, "max_tokens", "n", "logprobs"),
    ],
)
async def test_a_request_for_a_too_large_answer_names_the_fields(
    narrow: Any, path: str, body: dict[str, Any], field: str, count: str, scores: str
) -> None:
    base = TALK if path == CHAT else {"model": "m", "prompt": "Hi"}

    reply = await narrow.post(path, base | body)

    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (400, field)
    for name in (field, count, scores, "stream", "2 MB"):
        assert name in error["message"]
    assert narrow.directory.models["m"].count == 0


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": 3000, "logprobs": True, "top_logprobs": 20, "stream": True},
        {"max_tokens": 3000},
        {"max_tokens": 300, "logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 20},
    ],
    ids=["streamed", "only text", "few tokens", "no limit"],
)
async def test_a_request_whose_answer_may_fit_is_sent(narrow: Any, body: dict[str, Any]) -> None:
    narrow.directory.models["m"].script = lambda call: call.finish(text="x")

    assert (await narrow.post(CHAT, TALK | body)).status == 200


async def test_the_context_of_the_model_bounds_an_answer_too(cold_server: Any) -> None:
    cold_server.configure(unary_answer_limit_mb=1)
    cold_server.add_model(context_length=1000).script = lambda call: call.finish(text="x")
    await cold_server.start()

    assert (await cold_server.chat(max_tokens=1_000_000, logprobs=True, top_logprobs=20)).status == 200


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"logprobs": True, "top_logprobs": 20}), (COMPLETE, {"logprobs": 5})]
)
async def test_an_answer_that_grows_too_large_is_given_up_and_its_engine_stopped(
    narrow: Any, path: str, asked: dict[str, Any]
) -> None:
    model = narrow.directory.models["m"]
    body = (TALK if path == CHAT else {"model": "m", "prompt": "Hi"}) | asked
    pending = asyncio.create_task(narrow.post(path, body))
    call = await model.call()

    while not call.grip.closed.is_set():
        call.put(scored(100))
        await asyncio.sleep(0)
    reply = await pending

    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (503, "service_unavailable")
    assert "2 MB" in error["message"]
    assert reply.headers["retry-after"] == "1"
    assert refused(narrow, "answer") == 1
    record = await narrow.record()
    assert (record.http_status, record.error_type) == (503, "unavailable")
    assert held(narrow) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, TALK),
        (COMPLETE, {"model": "m", "prompt": "Hi"}),
        (MESSAGES, {**TALK, "max_tokens": 10_000_000}),
        (RESPONSES, {"model": "m", "input": "Hi"}),
    ],
)
async def test_text_counts_in_every_api(narrow: Any, path: str, body: dict[str, Any]) -> None:
    model = narrow.directory.models["m"]
    pending = asyncio.create_task(narrow.post(path, body))
    call = await model.call()

    while not call.grip.closed.is_set():
        call.say("x" * 100_000)
        await asyncio.sleep(0)
    reply = await pending

    assert reply.status == 503
    assert "2 MB" in reply.json()["error"]["message"]
    assert held(narrow) == 0


async def test_large_answers_are_refused_when_all_together_exceed_the_memory(narrow: Any) -> None:
    model = narrow.directory.models["m"]
    ask = {**TALK, "logprobs": True, "top_logprobs": 20}
    large = [asyncio.create_task(narrow.post(CHAT, ask)) for _ in range(2)]
    calls = [await model.call() for _ in range(2)]

    for call in calls:
        call.put(scored(4800))
    async with asyncio.timeout(10):
        while not refused(narrow, "process"):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    model.script = lambda call: (call.put(scored(2)), call.finish())
    small = await narrow.post(CHAT, ask)
    for call in calls:
        call.finish()
    statuses = sorted([(await each).status for each in large])

    assert small.status == 200
    assert statuses == [200, 503]
    assert held(narrow) == 0
    assert SMALL < 4800 * 350


async def test_the_memory_of_collected_answers_is_a_metric(narrow: Any) -> None:
    model = narrow.directory.models["m"]
    pending = asyncio.create_task(narrow.post(CHAT, {**TALK, "logprobs": True, "top_logprobs": 20}))
    call = await model.call()

    call.put(scored(100))
    async with asyncio.timeout(10):
        while not (held(narrow) or 0) > 60_000:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    call.finish()

    assert len((await pending).json()["choices"][0]["logprobs"]["content"]) == 100
    assert held(narrow) == 0


async def test_a_disconnected_client_frees_its_answer_memory(narrow: Any) -> None:
    model = narrow.directory.models["m"]
    connection = await narrow.connect()
    connection.send(CHAT, {**TALK, "logprobs": True, "top_logprobs": 20})
    call = await model.call()
    call.put(scored(100))
    async with asyncio.timeout(10):
        while not held(narrow):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    await connection.aclose()
    async with asyncio.timeout(10):
        await call.grip.closed.wait()

    assert (await narrow.record()).error_type == "cancelled"
    assert held(narrow) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_is_paused_while_many_scores_wait_to_be_shown(server: Any, model: Any, stream: bool) -> None:
    pending = asyncio.create_task(server.chat(logprobs=True, top_logprobs=20, stream=stream))
    call = await model.call()

    call.put(scored(4_000))
    async with asyncio.timeout(30):
        await call.grip.paused.wait()
        await call.grip.resumed.wait()
    call.finish()
    reply = await pending

    if stream:
        told = [entry for event in reply.events[1:-2] for entry in event["choices"][0]["logprobs"]["content"]]
    else:
        told = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(told) == 4_000
    assert {len(entry["top_logprobs"]) for entry in told} == {20}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_item_that_ends_an_answer_may_have_many_scores(server: Any, model: Any, stream: bool) -> None:
    def script(call: Any) -> None:
        output = scored(1000)
        output.finish_reason = FinishReason.LENGTH
        call.put(output)
        call.complete()

    model.script = script

    reply = await server.chat(logprobs=True, top_logprobs=20, stream=stream)

    assert reply.whole
    assert b'"finish_reason":"length"' in reply.body
    assert reply.body.count(b'"top_logprobs"') == 1000
    assert (await server.record()).output_tokens == 1000


def whole(chunks: bytes) -> bytes:
    """Return the body that was sent in chunks."""
    parts = []
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        parts.append(chunks[: int(size, 16)])
        chunks = chunks[int(size, 16) + 2 :]
    return b"".join(parts)


async def test_a_large_answer_is_written_as_fast_as_the_client_reads_it(cold_server: Any) -> None:
    cold_server.write_stall = 0.4
    cold_server.add_model().script = lambda call: (call.put(scored(5000)), call.finish())
    await cold_server.start()
    connection = await cold_server.connect(receive_buffer=65536)
    connection.send(CHAT, {**TALK, "logprobs": True, "top_logprobs": 20}, connection="close")

    head = await connection.head()
    body = b""
    for _ in range(8):
        # Slowly for longer than a client may stand still.
        body += await connection.reader.read(65536)
        await asyncio.sleep(0.1)
    body += await connection.ended()

    assert b"transfer-encoding: chunked" in head.lower()
    assert len(json.loads(whole(body))["choices"][0]["logprobs"]["content"]) == 5000
    assert (await cold_server.record()).error_type == ""


@pytest.mark.parametrize(
    ("path", "more"), [(CHAT, {"logprobs": True, "top_logprobs": 3}), (COMPLETE, {"prompt": "Hi", "logprobs": 3})]
)
async def test_scores_of_a_long_answer_are_those_of_short_ones_together(
    server: Any, model: Any, path: str, more: dict[str, Any]
) -> None:
    body = {**(TALK if path == CHAT else {"model": "m"}), **more}
    made = scored(1200)

    def told(reply: Any) -> dict[str, Any]:
        scores: dict[str, Any] = reply.json()["choices"][0]["logprobs"]
        return scores

    model.script = lambda call: (call.put(made), call.finish())
    long = told(await server.post(path, body))
    few = scored(10)
    model.script = lambda call: (call.put(few), call.finish())
    short = told(await server.post(path, body))

    assert {len(values) for values in long.values() if values} == {1200}
    for name, values in long.items():
        if name != "text_offset" and values is not None:
            assert values[:10] == short[name], name


async def test_a_client_that_does_not_read_a_large_answer_is_cut(cold_server: Any) -> None:
    cold_server.write_stall = 0.2
    cold_server.add_model().script = lambda call: (call.put(scored(5000)), call.finish())
    await cold_server.start()
    connection = await cold_server.connect(limit=1024, receive_buffer=4096)
    connection.send(CHAT, {**TALK, "logprobs": True, "top_logprobs": 20})

    assert (await cold_server.record()).error_type == "cancelled"
    assert held(cold_server) == 0


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_many_answers_do_not_hold_the_loop(
    server: Any, model: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 answers arrive at once. Best of three, as other work on the machine may slow down any one."""
    output = scored(200)
    model.script = lambda call: (call.put(output), call.finish())
    original, taken = events.Handle._run, [0.0]

    def timed(self: events.Handle) -> None:
        begun = time.thread_time()
        original(self)
        taken.append(time.thread_time() - begun)

    best = 1e9
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(events.Handle, "_run", timed)
            # Read by a task of this loop, which takes as long as it takes.
            connection = await server.connect()
            connection.send(CHAT, {**TALK, "logprobs": True, "top_logprobs": 20, "n": 128, "stream": stream})
            size = 0
            while size < 128 * 200 * 1000:
                size += len(await connection.reader.read(1 << 20))
        await connection.aclose()
        best = min(best, max(taken))
        taken[:] = [0.0]

    assert best <= LONGEST


async def test_large_embeddings_are_made_while_they_are_written(
    cold_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = cold_server.add_model(model_types=["embeddings"], capabilities=["embed"])
    vectors = [[0.5, float(index)] * 64 for index in range(512)]

    async def embed(*_: Any) -> EmbedOutput:
        return EmbedOutput(embeddings=vectors, prompt_tokens=512)

    monkeypatch.setattr(model, "embed", embed)
    await cold_server.start()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    reply = await cold_server.post("/v1/embeddings", {"model": "m", "input": ["x"] * 512})
    others.cancel()

    assert [entry["embedding"] for entry in reply.json()["data"]] == vectors
    assert reply.json()["usage"] == {"prompt_tokens": 512, "total_tokens": 512}
    # The loop did other things after each vector.
    assert turns > len(vectors)
