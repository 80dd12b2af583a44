"""Embeddings and scores through the engine, over a real HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from dynamo_core import (
    BackendError,
    EmbedOutput,
    EmbedRequest,
    EngineContext,
    GenerateContext,
    ScoreOutput,
    ScoreRequest,
    WorkerConfig,
)
from dynamo_core.errors import NotSupported, WorkerOverloaded
from dynamo_plugin_engine_upstream.config import UpstreamConfig
from dynamo_plugin_engine_upstream.engine import UpstreamEngine
from dynamo_testing import EngineConformance, EngineFactory

EMBED = EmbedRequest(token_ids=[[1], [2]], body={"model": "ours", "input": ["a", "b"], "encoding_format": "base64"})
SCORE = ScoreRequest(queries=["q"], documents=["a", "bb"])


async def pool(peer: Any, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Return what a server with every route answers: a vector or a score for the length of each text, in any order."""
    usage = {"prompt_tokens": 9, "total_tokens": 9}
    if "messages" in body:
        return await endless(peer, http, body)
    if "input" in body:
        data = [{"index": index, "embedding": [len(text), 0.5]} for index, text in enumerate(body["input"])]
        return web.json_response({"data": data[::-1], "usage": usage})
    if "query" in body:
        ranked = [{"index": index, "relevance_score": len(text)} for index, text in enumerate(body["documents"])]
        return web.json_response({"results": ranked[::-1], "usage": {"total_tokens": 8}})
    scores = [{"index": index, "score": len(text)} for index, text in enumerate(body["text_2"])]
    return web.json_response({"data": scores, "usage": usage})


async def endless(peer: Any, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer: web.StreamResponse = await peer.endless(peer, http, body)
    return answer


async def hang(peer: Any, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def hang_after_the_head(peer: Any, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "application/json"})
    await answer.prepare(http)
    return await hang(peer, http, body)


@pytest.fixture
def everything(peer: Any) -> Any:
    peer.answer = pool
    return peer


@pytest.fixture
async def engine(everything: Any) -> Any:
    """Return an engine for all that there is."""
    made = make(everything.url, "chat", "embeddings", "score", "rerank")
    await made.start(1)
    yield made
    await made.cleanup()


def make(url: str, *types: str, **settings: Any) -> UpstreamEngine:
    config = UpstreamConfig.model_validate({"url": url, "start_timeout": 0} | settings)
    return UpstreamEngine(config, WorkerConfig(model_name="ours", endpoint_types=types))


def context(**metadata: str) -> GenerateContext:
    return GenerateContext(EngineContext("r1", metadata=metadata))


class TestContract(EngineConformance):
    @pytest.fixture
    def engine_factory(self, everything: Any) -> EngineFactory:
        return lambda: make(everything.url, "chat", "score", "rerank")


@pytest.mark.parametrize(
    ("types", "capabilities"),
    [
        (("chat", "completions"), {"multi_choice"}),
        (("embeddings",), {"multi_choice", "embed"}),
        (("score", "rerank"), {"multi_choice", "score", "rerank"}),
    ],
)
async def test_the_configured_types_become_capabilities(
    peer: Any, types: tuple[str, ...], capabilities: set[str]
) -> None:
    engine = make(peer.url, *types)

    config = await engine.start(1)

    await engine.cleanup()
    assert config.capabilities == capabilities


async def test_vectors_come_in_the_order_of_the_inputs(everything: Any, engine: Any) -> None:
    output = await engine.embed(EMBED, context(traceparent="00-aa-bb-01"))

    assert output == EmbedOutput(embeddings=[[1.0, 0.5], [1.0, 0.5]], prompt_tokens=9)
    [asked] = everything.asked
    assert asked == {"path": "/v1/embeddings", "model": "its-model", "input": ["a", "b"], "encoding_format": "float"}
    assert (everything.headers[-1]["x-request-id"], everything.headers[-1]["traceparent"]) == ("r1", "00-aa-bb-01")


async def test_scores_come_from_the_route_for_pairs(everything: Any, engine: Any) -> None:
    one = await engine.score(SCORE, context())
    request = ScoreRequest(queries=["q", "r"], documents=["a", "bb"], max_tokens_per_doc=3, truncate_prompt_tokens=-1)
    pairs = await engine.score(request, context())

    assert one == pairs == ScoreOutput(scores=[1.0, 2.0], prompt_tokens=9)
    path, model = "/v1/score", "its-model"
    limits = {"max_tokens_per_doc": 3, "truncate_prompt_tokens": -1}
    assert everything.asked == [
        {"path": path, "model": model, "text_1": "q", "text_2": ["a", "bb"]},
        {"path": path, "model": model, "text_1": ["q", "r"], "text_2": ["a", "bb"], **limits},
    ]
    assert len(everything.connections) == 1


async def test_a_rerank_only_server_gives_scores_too(everything: Any) -> None:
    engine = make(everything.url, "rerank")
    await engine.start(1)

    output = await engine.score(SCORE, context())

    await engine.cleanup()
    assert output == ScoreOutput(scores=[1.0, 2.0], prompt_tokens=8)
    assert everything.asked == [{"path": "/v1/rerank", "model": "its-model", "query": "q", "documents": ["a", "bb"]}]


async def test_a_request_without_a_body_cannot_be_embedded(engine: Any) -> None:
    with pytest.raises(BackendError.InvalidArgument, match="no body"):
        await engine.embed(EmbedRequest(token_ids=[[1]]), context())


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, BackendError.InvalidArgument), (404, NotSupported), (429, WorkerOverloaded), (500, BackendError.Unknown)],
)
async def test_a_refusal_has_the_type_that_it_has_for_answers(
    everything: Any, engine: Any, status: int, kind: type[Exception]
) -> None:
    async def refuse(peer: Any, http: web.Request, body: Any) -> Any:
        return web.json_response({"error": {"message": "no"}}, status=status)

    everything.answer = refuse

    with pytest.raises(kind):
        await engine.score(SCORE, context())


@pytest.mark.parametrize(
    "body",
    [
        "nonsense",
        "[]",
        "{}",
        '{"data": {}}',
        '{"data": [{"index": 0, "score": 1, "embedding": [1]}]}',
        '{"data": [{"index": 0, "score": true, "embedding": []}, {"index": 1, "score": "2", "embedding": ["2"]}]}',
        '{"data": [{"index": 0, "score": 1e999, "embedding": 1}, {"index": [], "score": 1, "embedding": [1]}]}',
    ],
)
async def test_an_answer_that_cannot_be_understood_is_an_error_of_the_server(
    everything: Any, engine: Any, body: str
) -> None:
    async def answer(peer: Any, http: web.Request, asked: Any) -> Any:
        return web.Response(text=body, content_type="application/json")

    everything.answer = answer

    with pytest.raises(BackendError.Unknown):
        await engine.score(SCORE, context())
    with pytest.raises(BackendError.Unknown):
        await engine.embed(EMBED, context())


async def test_an_answer_that_is_a_stream_is_refused(everything: Any, engine: Any) -> None:
    everything.answer = endless

    with pytest.raises(BackendError.Unknown, match="not application/json"):
        await engine.score(SCORE, context())


async def test_an_answer_without_an_end_is_given_up(
    everything: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_plugin_engine_upstream.client._WHOLE_BODY", 1000)

    async def pour(peer: Any, http: web.Request, body: Any) -> Any:
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(http)
        while True:
            await answer.write(b" " * 500)

    everything.answer = pour

    with pytest.raises(BackendError.Unknown, match="more than 1000 bytes"):
        await engine.score(SCORE, context())
    await asyncio.wait_for(everything.left.wait(), 5)


@pytest.mark.parametrize("answer", [hang, hang_after_the_head])
async def test_a_client_that_leaves_closes_the_connection_to_the_server(
    everything: Any, engine: Any, answer: Any
) -> None:
    everything.answer = answer
    ctx = EngineContext("r")
    asking = asyncio.ensure_future(engine.score(SCORE, GenerateContext(ctx)))
    await asyncio.wait_for(everything.arrived.wait(), 5)

    ctx.stop_generating()

    with pytest.raises(BackendError.Cancelled):
        await asyncio.wait_for(asking, 5)
    await asyncio.wait_for(everything.left.wait(), 5)


async def test_a_request_that_was_stopped_before_is_not_sent(everything: Any, engine: Any) -> None:
    ctx = EngineContext("r")
    ctx.stop_generating()

    with pytest.raises(BackendError.Cancelled):
        await engine.score(SCORE, GenerateContext(ctx))

    assert not everything.asked


@pytest.mark.parametrize("answer", [hang, hang_after_the_head])
async def test_silence_ends_at_its_deadline(everything: Any, answer: Any) -> None:
    everything.answer = answer
    engine = make(everything.url, "score", first_byte_timeout=0.2)
    await engine.start(1)

    with pytest.raises(BackendError.ResponseTimeout, match=r"0\.2 s"):
        await engine.score(SCORE, context())
    await engine.cleanup()
