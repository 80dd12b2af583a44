"""The engine over a real HTTP server: answers, refusals, silence, breaks, and clients that leave."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineContext,
    FinishReason,
    GenerateContext,
    PreprocessedRequest,
    RoutingHints,
    WorkerConfig,
)
from dynamo_core.errors import ConfigError, WorkerOverloaded
from dynamo_plugin_engine_upstream.config import UpstreamConfig
from dynamo_plugin_engine_upstream.engine import UpstreamEngine
from dynamo_testing import EngineConformance, EngineFactory
from dynamo_testing.servers.certificates import make_certificates
from dynamo_testing.servers.ports import free_port


class TestContract(EngineConformance):
    @pytest.fixture
    def engine_factory(self, peer: Any) -> EngineFactory:
        peer.answer = peer.endless
        config = UpstreamConfig(url=peer.url)
        return lambda: UpstreamEngine(config, WorkerConfig(model_name="ours"))


async def test_an_answer_has_its_text_its_reason_and_the_servers_usage(peer: Any, start: Any) -> None:
    worker = await start(peer.url)

    *items, last = await worker.answer(max_tokens=5)

    assert "".join(item.text for item in items) == "one two"
    assert last.finish_reason is FinishReason.STOP
    usage = last.completion_usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.reasoning_tokens) == (7, 4, 1)
    [asked] = peer.asked
    assert (asked["path"], asked["model"], asked["max_tokens"]) == ("/v1/chat/completions", "its-model", 5)


async def test_a_model_is_found_by_name_or_because_it_is_the_only_one(peer: Any, start: Any) -> None:
    alone = await start(peer.url)
    peer.models = {"data": [{"id": "a"}, {"id": "ours"}, {"id": "b"}, "nonsense"]}
    await (await start(peer.url)).answer()
    await (await start(peer.url, model="b")).answer()

    assert (alone.config.model, alone.config.model_input, alone.config.context_length) == ("ours", "text", 4096)
    assert [asked["model"] for asked in peer.asked] == ["ours", "b"]


async def test_a_server_without_the_model_is_a_matter_of_the_config(peer: Any, start: Any) -> None:
    peer.models = {"data": [{"id": "a"}, {"id": "b"}]}

    with pytest.raises(ConfigError, match=r"workers\.up\.engine\.model: .* has no model 'ours'; it lists a, b"):
        await start(peer.url)


async def test_a_server_without_a_list_is_asked_for_the_model_by_its_name_here(peer: Any, start: Any) -> None:
    peer.models_status = 404

    await (await start(peer.url)).answer()

    assert peer.asked[0]["model"] == "ours"


async def test_a_starting_worker_waits_for_a_server_that_is_not_up_yet(peer: Any, start: Any) -> None:
    port = peer.port
    await peer.aclose()
    starting = asyncio.ensure_future(start(f"http://127.0.0.1:{port}", start_timeout=30))
    await asyncio.sleep(0.1)
    assert not starting.done()
    await peer.start(port=port)

    worker = await starting

    assert await worker.answer()


async def test_without_a_server_the_start_fails(start: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"

    with pytest.raises(BackendError.EngineShutdown, match="cannot be reached"):
        await start(url)


async def test_prefill_and_decode_roles_are_refused() -> None:
    worker = WorkerConfig(model_name="ours", disaggregation_mode=DisaggregationMode.PREFILL)

    with pytest.raises(ConfigError, match="no prefill and decode roles"):
        await UpstreamEngine(UpstreamConfig(url="http://127.0.0.1:1"), worker).start(1)


async def test_the_key_goes_with_every_request_and_never_into_a_message(peer: Any, start: Any) -> None:
    async def refuse(peer: Any, http: web.Request, body: Any) -> Any:
        key = http.headers["authorization"]
        return web.json_response({"error": {"message": f"what a key, {key}"}}, status=400)

    peer.answer = refuse
    worker = await start(peer.url, api_key="sk-secret")

    with pytest.raises(BackendError.InvalidArgument) as caught:
        await worker.answer()

    assert [headers["authorization"] for headers in peer.headers] == ["Bearer sk-secret"] * 2
    assert caught.value.message == "what a key, Bearer …"


async def test_a_wrong_api_key_is_a_config_error(peer: Any, start: Any) -> None:
    peer.models_status = 401

    with pytest.raises(ConfigError, match="see `api_key`"):
        await start(peer.url, start_timeout=30)


async def test_the_trace_of_the_request_goes_on_at_the_server(peer: Any, start: Any) -> None:
    worker = await start(peer.url)
    ctx = EngineContext("r1", metadata={"traceparent": "00-aa-bb-01", "cookie": "mine"})

    await worker.answer(ctx=ctx)

    headers = peer.headers[-1]
    assert (headers["traceparent"], headers["x-request-id"]) == ("00-aa-bb-01", "r1")
    assert "cookie" not in headers


@pytest.mark.parametrize("forwards", [False, True])
async def test_client_headers_are_forwarded_only_if_configured(peer: Any, start: Any, forwards: bool) -> None:
    worker = await start(peer.url, forward_headers=forwards)
    told = {"x-team": "blue", "content-length": "1", "host": "elsewhere", "x-request-id": "theirs"}

    await worker.answer(ctx=EngineContext("r1"), routing=RoutingHints(headers=told))

    headers = peer.headers[-1]
    assert headers.get("x-team") == ("blue" if forwards else None)
    assert headers["x-request-id"] == "r1"
    assert headers["host"] != "elsewhere"
    assert int(headers["content-length"]) > 1


async def test_a_probe_lists_the_models_without_generating(peer: Any, start: Any) -> None:
    worker = await start(peer.url)
    probe = PreprocessedRequest(token_ids=[1], is_probe=True)

    def probing() -> Any:
        return worker.engine.generate(probe, GenerateContext(EngineContext("probe")))

    [item] = [item async for item in probing()]
    peer.models = {"data": [{"id": "another"}, {"id": "and-another"}]}
    with pytest.raises(ConfigError, match="has no model"):
        await anext(probing())

    assert item.finish_reason is FinishReason.STOP
    assert (peer.asked, peer.listed) == ([], 3)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_without_room_is_busy_not_broken(peer: Any, start: Any, status: int) -> None:
    async def refuse(peer: Any, http: web.Request, body: Any) -> Any:
        return web.json_response({"error": {"message": "later"}}, status=status)

    peer.answer = refuse
    worker = await start(peer.url)

    with pytest.raises(WorkerOverloaded, match="later"):
        await worker.answer()


async def test_an_error_in_the_middle_ends_the_answer_with_its_type(peer: Any, start: Any) -> None:
    async def fail(peer: Any, http: web.Request, body: Any) -> Any:
        return await peer.stream(http, *peer.words("half"), {"error": {"message": "boom", "code": 500}}, "[DONE]")

    peer.answer = fail
    answer = (await start(peer.url)).ask()

    assert (await anext(answer)).text == "half"
    with pytest.raises(BackendError.Unknown, match="boom"):
        await anext(answer)


async def test_a_server_that_breaks_off_is_disconnected(peer: Any, start: Any) -> None:
    async def die(peer: Any, http: web.Request, body: Any) -> Any:
        answer = await peer.stream(http, *peer.words("half"))
        assert http.transport is not None
        http.transport.abort()
        return answer

    peer.answer = die
    answer = (await start(peer.url)).ask()

    with pytest.raises(BackendError.Disconnected):
        [item async for item in answer]


async def test_an_end_without_a_reason_and_without_the_mark_is_no_end(peer: Any, start: Any) -> None:
    async def forget(peer: Any, http: web.Request, body: Any) -> Any:
        return await peer.stream(http, *peer.words("half"))

    peer.answer = forget

    with pytest.raises(BackendError.StreamIncomplete):
        await (await start(peer.url)).answer()


async def test_a_server_that_does_not_stream_is_an_error(peer: Any, start: Any) -> None:
    async def whole(peer: Any, http: web.Request, body: Any) -> Any:
        return web.json_response({"choices": []})

    peer.answer = whole

    with pytest.raises(BackendError.Unknown, match="not a stream"):
        await (await start(peer.url)).answer()


async def hang(peer: Any, http: web.Request, body: Any) -> Any:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_after_the_head(peer: Any, http: web.Request, body: Any) -> Any:
    await peer.begin(http)
    return await hang(peer, http, body)


async def hang_after_a_word(peer: Any, http: web.Request, body: Any) -> Any:
    await peer.stream(http, *peer.words("one"))
    return await hang(peer, http, body)


@pytest.mark.parametrize(
    ("answer", "limits"),
    [
        (hang, {"first_byte_timeout": 0.2}),
        (hang_after_the_head, {"first_byte_timeout": 0.2}),
        (hang_after_a_word, {"silence_timeout": 0.2}),
    ],
)
async def test_a_silent_server_times_out_and_its_connection_closes(
    peer: Any, start: Any, answer: Any, limits: dict[str, float]
) -> None:
    peer.answer = answer
    worker = await start(peer.url, **limits)

    with pytest.raises(BackendError.ResponseTimeout, match=r"0\.2 s"):
        await worker.answer()

    await asyncio.wait_for(peer.left.wait(), 5)


async def test_a_slow_reader_is_not_taken_for_a_silent_server(
    peer: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = asyncio.Event()

    async def wait(peer: Any, http: web.Request, body: Any) -> Any:
        answer = await peer.stream(http, *peer.words("one "))
        await read.wait()
        await peer.send(answer, *peer.words("two"), peer.END, "[DONE]")
        return answer

    peer.answer = wait
    worker = await start(peer.url, silence_timeout=60)
    answer = worker.ask()
    first = await anext(answer)
    # Longer than the server may be silent: it is not asked for anything meanwhile.
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 120)
    await asyncio.sleep(0.01)
    read.set()

    assert [first.text, *[item.text async for item in answer]] == ["one ", "two", None]


@pytest.mark.parametrize("answer", [hang, hang_after_the_head, hang_after_a_word])
async def test_a_client_that_leaves_closes_the_connection_to_the_server(peer: Any, start: Any, answer: Any) -> None:
    peer.answer = answer
    worker = await start(peer.url)
    ctx = EngineContext("r")
    asking = asyncio.ensure_future(worker.answer(ctx=ctx))
    await asyncio.wait_for(peer.arrived.wait(), 5)

    ctx.stop_generating()

    assert (await asyncio.wait_for(asking, 5))[-1].finish_reason is FinishReason.CANCELLED
    await asyncio.wait_for(peer.left.wait(), 5)


@pytest.mark.parametrize("answer", [hang, hang_after_a_word])
async def test_a_task_that_is_cancelled_closes_the_connection_too(peer: Any, start: Any, answer: Any) -> None:
    peer.answer = answer
    worker = await start(peer.url)
    asking = asyncio.ensure_future(worker.answer())
    await asyncio.wait_for(peer.arrived.wait(), 5)

    asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(peer.left.wait(), 5)


async def test_a_stream_that_is_closed_in_the_middle_closes_the_connection(peer: Any, start: Any) -> None:
    peer.answer = hang_after_a_word
    answer = (await start(peer.url)).ask()
    await anext(answer)

    await answer.aclose()

    await asyncio.wait_for(peer.left.wait(), 5)


async def test_connections_are_used_again(peer: Any, start: Any) -> None:
    worker = await start(peer.url)

    for _ in range(3):
        await worker.answer()

    assert len(peer.connections) == 1


async def test_a_connection_that_the_server_has_closed_meanwhile_costs_nothing(peer: Any, start: Any) -> None:
    worker = await start(peer.url)
    await worker.answer()

    async def close_once(peer: Any, http: web.Request, body: Any) -> Any:
        # As a server whose idle time is over in the moment in which the request is sent.
        peer.answer = peer.plain
        assert http.transport is not None
        http.transport.close()
        return web.Response()

    peer.answer = close_once

    assert (await worker.answer())[0].text == "one "


async def test_after_the_end_of_the_server_requests_are_refused_as_by_an_engine_that_is_down(
    peer: Any, start: Any
) -> None:
    worker = await start(peer.url)
    await peer.aclose()

    with pytest.raises(BackendError.EngineShutdown, match="cannot be reached"):
        await worker.answer()


async def test_an_encrypted_server_is_trusted_by_its_authority_only(peer: Any, start: Any, tmp_path: Path) -> None:
    folder = make_certificates(tmp_path, peer="IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "peer.crt", folder / "peer.key")
    await peer.aclose()
    await peer.start(tls=context)

    worker = await start(peer.url, tls={"ca": str(folder / "ca.crt")})

    assert (await worker.answer())[0].text == "one "
    with pytest.raises(BackendError.EngineShutdown, match="not trusted"):
        await start(peer.url)


async def test_a_file_that_holds_no_certificate_is_named(start: Any, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    with pytest.raises(ConfigError, match=r"engine\.tls\.ca: .*ca\.pem"):
        await start("https://127.0.0.1:1", tls={"ca": str(tmp_path / "ca.pem")})
