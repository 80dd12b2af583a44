"""Streams: their exact bytes, and what becomes of them when something is slow or breaks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from dynamo_core import BackendError, FinishReason, LLMEngineOutput
from dynamo_core.errors import Disconnected, ServiceOverloaded

#: The end of a chunked body, with the end of the chunk before: an id at the end of the head may end in 0, too.
LAST_CHUNK = b"\n0\r\n\r\n"

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}


async def fill(call: Any) -> int:
    """Say more than an unread connection takes, until the engine is asked to pause or the answer is cut off."""
    sent = 0
    while not (call.grip.paused.is_set() or call.released.is_set()):
        size = 65536 if sent < 1 << 22 else 1
        call.say("x" * size)
        sent += size
        await asyncio.sleep(0)
    return sent


async def test_a_chat_stream_has_exactly_the_bytes_of_the_seed(server: Any) -> None:
    connection, call = await server.asked(CHAT, body())
    call.say("Hello")
    call.finish()

    reply = await connection.reply()

    first = json.loads(reply.body.split(b"\n\n")[0][6:])
    head = f'"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"m"'
    assert reply.body.decode() == (
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"role":"assistant"}},"finish_reason":null}}]}}\n\n'
        f'data: {{{head},"choices":[{{"index":0,"delta":{{"content":"Hello"}},"finish_reason":null}}]}}\n\n'
        f'data: {{{head},"choices":[{{"index":0,"delta":{{}},"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert first["id"].startswith("chatcmpl-")


async def test_stream_headers_forbid_buffering_and_compression(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="x")

    reply = await server.post(CHAT, body(), accept_encoding="gzip")

    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in reply.headers


async def test_the_first_token_leaves_at_once_with_the_headers(server: Any) -> None:
    connection, call = await server.asked(CHAT, body())
    call.say("A")

    await connection.head()
    chunk = await connection.until(b'"content":"A"},"finish_reason":null}]}\n\n\r\n')

    assert chunk.count(b"\r\n") == 2, "role and first content share one HTTP chunk"
    call.finish()
    await connection.until(LAST_CHUNK)


async def test_tokens_that_wait_together_become_one_chunk_and_later_ones_another(server: Any) -> None:
    connection, call = await server.asked(CHAT, body())
    call.say("a")
    await connection.until(b'"content":"a"')

    call.say("b")
    call.say("c")
    await connection.until(b'"content":"bc"')
    call.say("d")
    await connection.until(b'"content":"d"')
    call.finish(FinishReason.LENGTH, "e")

    rest = await connection.until(LAST_CHUNK)
    assert b'"content":"e"' in rest
    assert b'"finish_reason":"length"' in rest
    record = await server.record()
    assert (record.output_tokens, record.finish_reason, record.status) == (5, "length", "success")


async def test_http_1_0_clients_get_plain_bytes_until_the_connection_ends(server: Any) -> None:
    connection, call = await server.asked(CHAT, body(), version="1.0", connection="keep-alive")
    call.say("one ")
    await connection.until(b'"content":"one "')
    call.finish(text="two")

    rest = await connection.ended()

    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"content":"two"' in rest


async def test_every_chunk_of_an_answer_has_the_same_identity(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="abc")

    one = await server.chat(stream=True, stream_options={"include_usage": True})
    other = await server.chat(stream=True)

    identities = {(e["id"], e["created"], e["model"]) for e in one.events[:-1]}
    assert len(identities) == 1
    assert other.events[0]["id"] != one.events[0]["id"]


async def test_completion_chunks_carry_text(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text='a"b')

    reply = await server.complete(stream=True)

    first = reply.events[0]
    head = f'"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"m"'
    assert reply.body.decode() == (
        f'data: {{{head},"choices":[{{"text":"a\\"b","index":0,"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {{{head},"choices":[{{"text":"","index":0,"logprobs":null,"finish_reason":"stop"}}]}}\n\n'
        "data: [DONE]\n\n"
    )
    assert first["id"].startswith("cmpl-")


async def test_a_stop_string_over_two_chunks_ends_the_stream_and_stops_the_engine(server: Any) -> None:
    connection, call = await server.asked(CHAT, body(stop=["END"], stream_options={"include_usage": True}))
    call.say("one E")
    call.say("ND two")

    reply = await connection.reply()

    assert reply.text() == "one "
    assert reply.events[-3]["choices"][0]["finish_reason"] == "stop"
    assert reply.events[-2]["usage"]["completion_tokens"] == 7
    await asyncio.wait_for(call.grip.closed.wait(), 5)
    assert call.request.stop_conditions.stop == ["END"]


async def test_held_back_text_is_given_at_the_end(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="one EN")

    reply = await server.chat(stream=True, stop="END")

    assert reply.text() == "one EN"


@pytest.mark.parametrize("skip", [True, False])
async def test_an_end_of_sequence_token_ends_the_stream_and_is_not_shown(server: Any, skip: bool) -> None:
    connection, call = await server.asked(CHAT, body(skip_special_tokens=skip))
    call.put(LLMEngineOutput([104, 105, 257, 33]))

    reply = await connection.reply()

    assert reply.text() == "hi"
    await asyncio.wait_for(call.grip.closed.wait(), 5)


async def test_a_stream_that_is_complete_without_a_reason_ends_with_stop(server: Any, model: Any) -> None:
    def script(call: Any) -> None:
        call.say("x")
        call.complete()

    model.script = script

    reply = await server.chat(stream=True)

    assert reply.events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_normal_end_does_not_cancel_the_worker(server: Any) -> None:
    connection, call = await server.asked(CHAT, body())
    call.put(LLMEngineOutput([104], FinishReason.STOP))
    await connection.until(LAST_CHUNK)

    assert not call.grip.closed.is_set()
    call.complete()

    await asyncio.wait_for(call.released.wait(), 5)


async def test_an_error_before_the_first_token_is_a_plain_http_error(server: Any, model: Any) -> None:
    model.script = lambda call: call.fail(BackendError.InvalidArgument("too odd"))

    reply = await server.chat(stream=True)

    assert reply.status == 400
    assert reply.json()["message"] == "too odd"


async def test_a_refusal_is_a_plain_http_error_also_for_streams(server: Any, model: Any) -> None:
    model.refusal = ServiceOverloaded(retry_after=2.2)

    reply = await server.chat(stream=True)

    assert reply.status == 503
    assert reply.headers["retry-after"] == "3"


@pytest.mark.parametrize("together", [True, False])
async def test_a_mid_stream_error_is_sent_and_the_connection_cut(server: Any, together: bool) -> None:
    connection, call = await server.asked(CHAT, body())
    call.say("a")
    await connection.until(b'"content":"a"},"finish_reason":null}]}\n\n\r\n')
    if together:
        call.say("b")
    call.fail(Disconnected("worker 10.0.0.1 lost"))

    rest = await connection.ended()

    assert (b'"content":"b"' in rest) is together
    assert b'data: {"error":{"message":"The worker of this request was lost, please retry"' in rest
    assert b"10.0.0.1" not in rest
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n")
    record = await server.record()
    assert (record.status, record.error_type, record.http_status) == ("error", "unavailable", 503)
    await asyncio.wait_for(call.released.wait(), 5)


async def test_an_engine_that_ends_with_an_error_item_is_an_error(server: Any, model: Any) -> None:
    model.script = lambda call: call.put(LLMEngineOutput.error("secret detail"))

    reply = await server.chat(stream=True)

    assert reply.status == 500
    assert b"secret" not in reply.body


async def test_silence_before_the_first_token_commits_the_stream_with_comments(cold_server: Any) -> None:
    cold_server.add_model()
    cold_server.keep_alive = 0.02
    await cold_server.start()
    connection, call = await cold_server.asked(CHAT, body())

    await connection.until(b": keep-alive\n\n")
    await connection.until(b": keep-alive\n\n")
    call.say("a")
    await connection.until(b'"content":"a"')
    await connection.until(b": keep-alive\n\n")
    call.finish()

    rest = await connection.until(LAST_CHUNK)
    assert b"[DONE]" in rest


@pytest.mark.parametrize("phase", ["accepting", "waiting", "streaming", "keep-alive", "unary"])
async def test_a_client_that_leaves_takes_its_request_along(cold_server: Any, phase: str) -> None:
    server = cold_server
    model = server.add_model()
    if phase == "keep-alive":
        server.keep_alive = 0.02
    await server.start()
    if phase == "accepting":
        model.gate = asyncio.Event()
    connection = await server.connect()
    connection.send(CHAT, body(stream=phase != "unary"))
    await asyncio.wait_for(model.entered.wait(), 5)
    call: Any = None if phase == "accepting" else await model.call()
    if phase in ("streaming", "unary"):
        call.say("a")
    if phase == "streaming":
        await connection.until(b'"content":"a"')
    if phase == "keep-alive":
        await connection.until(b": keep-alive")

    connection.writer.transport.abort()

    record = await server.record()
    assert (record.status, record.error_type) == ("error", "cancelled")
    assert server.metrics.registry.get_sample_value("dynamo_frontend_disconnected_clients") == 1
    if call is not None:
        await asyncio.wait_for(call.released.wait(), 5)
        assert call.grip.closed.is_set()
    await asyncio.wait_for(model.left.wait(), 5)
    for gauge in ("active_requests", "inflight_requests", "queued_requests"):
        assert server.gauge(gauge) == 0


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_client_that_closes_its_sending_half_gets_its_whole_stream(server: Any, version: str) -> None:
    connection, call = await server.asked(CHAT, body(), version=version)
    call.say("one ")
    await connection.until(b'"content":"one "')

    connection.writer.write_eof()
    # Nothing comes of the engine: a comment finds out whether the client is there.
    await connection.until(b": keep-alive\n\n")
    call.finish(text="two")

    rest = await connection.ended()
    assert b'"content":"two"' in rest
    assert b"data: [DONE]\n\n" in rest
    assert (await server.record()).status == "success"


async def test_a_slow_reader_pauses_its_request_and_goes_on_when_it_reads(cold_server: Any) -> None:
    model = cold_server.add_model()
    cold_server.config = cold_server.config.model_copy(update={"write_buffer": 64 * 1024})
    await cold_server.start()
    connection = await cold_server.connect(receive_buffer=4096, limit=2**16)
    connection.send(CHAT, body())
    call = await model.call()
    call.say("a")
    await connection.head()
    connection.reader._transport.pause_reading()
    sent = await fill(call)
    call.say("late")

    connection.reader._transport.resume_reading()
    drain = asyncio.ensure_future(connection._chunks())
    await asyncio.wait_for(call.grip.resumed.wait(), 10)
    call.finish()
    data, whole = await asyncio.wait_for(drain, 10)

    assert whole
    assert data.count(b"x") >= sent
    assert b"late" in data
    assert data.endswith(b"[DONE]\n\n")


async def test_a_reader_that_never_reads_is_cut_off(cold_server: Any) -> None:
    model = cold_server.add_model()
    cold_server.write_stall = 0.05
    cold_server.config = cold_server.config.model_copy(update={"write_buffer": 64 * 1024})
    await cold_server.start()
    connection = await cold_server.connect(receive_buffer=4096)
    connection.send(CHAT, body())
    call = await model.call()
    call.say("a")
    await connection.head()
    connection.reader._transport.pause_reading()

    await fill(call)

    record = await cold_server.record()
    assert (record.status, record.error_type) == ("error", "cancelled")
    await asyncio.wait_for(call.released.wait(), 5)


async def test_a_choice_that_ends_at_a_stop_string_is_stopped_while_others_go_on(server: Any, model: Any) -> None:
    connection = await server.connect()
    connection.send(CHAT, body(n=2, stop="END"))
    one, two = await model.call(), await model.call()
    one.say("x END")

    await asyncio.wait_for(one.released.wait(), 5)

    assert not two.grip.closed.is_set()
    two.finish(text="y")
    rest = await connection.until(LAST_CHUNK)
    assert b"[DONE]" in rest


async def test_a_release_goes_on_when_its_request_is_cancelled_twice(server: Any) -> None:
    released, finished = asyncio.Event(), asyncio.Event()
    connection, call = await server.asked(CHAT, body())
    closing = asyncio.Event()

    async def slow_close() -> None:
        closing.set()
        await released.wait()
        finished.set()

    call.grip.aclose = slow_close
    call.say("a")
    await connection.until(b'"content":"a"')
    task = next(task for task in asyncio.all_tasks() if "_handle_request" in repr(task.get_coro()))

    connection.writer.transport.abort()
    await asyncio.wait_for(closing.wait(), 5)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    released.set()

    await asyncio.wait_for(finished.wait(), 5)
    await asyncio.wait_for(call.released.wait(), 5)


async def test_an_item_for_an_unrequested_choice_is_an_error(server: Any, model: Any) -> None:
    model.script = lambda call: call.put(LLMEngineOutput([104], index=3))

    reply = await server.chat(stream=True)

    assert reply.status == 500


async def test_a_worker_that_is_lost_after_its_terminal_does_not_spoil_the_answer(server: Any, model: Any) -> None:
    def script(call: Any) -> None:
        call.put(LLMEngineOutput([104], FinishReason.STOP))
        call.fail(Disconnected("lost"))

    model.script = script

    reply = await server.chat(stream=True)

    assert reply.events[-1] == "data: [DONE]"
    assert (await server.record()).status == "success"
