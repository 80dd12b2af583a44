"""Scores of texts, and documents sorted by them."""

from __future__ import annotations

from typing import Any

import pytest

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v2/rerank")
SCORE_PATHS = ("/v1/score", "/score")


@pytest.fixture
async def scoring(cold_server: Any) -> Any:
    """Return a server whose model gives an eighth for each character of a document."""
    cold_server.add_model(model_types=["score", "rerank"], capabilities=["score", "rerank"])
    await cold_server.start()
    return cold_server


def scored(server: Any) -> Any:
    return server.directory.models["m"].scored[-1]


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_each_pair_has_a_score_in_the_order_of_the_request(scoring: Any, path: str) -> None:
    reply = await scoring.post(path, {"model": "m", "text_1": "q", "text_2": ["abcd", "ab"]})

    body = reply.json()
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": f"score-{reply.headers['x-request-id']}",
        "object": "list",
        "model": "m",
        "data": [{"object": "score", "index": 0, "score": 0.5}, {"object": "score", "index": 1, "score": 0.25}],
        # A byte each, and the line ends between them.
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert (await scoring.record()).endpoint == "score"


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_come_by_relevance_and_equal_ones_in_their_order(scoring: Any, path: str) -> None:
    documents = ["ab", {"text": "abcd"}, "cd"]

    reply = await scoring.post(path, {"model": "m", "query": "q", "documents": documents})

    assert reply.json() == {
        "id": f"rerank-{reply.headers['x-request-id']}",
        "model": "m",
        "results": [
            {"index": 1, "relevance_score": 0.5, "document": {"text": "abcd"}},
            {"index": 0, "relevance_score": 0.25, "document": {"text": "ab"}},
            {"index": 2, "relevance_score": 0.25, "document": {"text": "cd"}},
        ],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }
    assert (await scoring.record()).endpoint == "rerank"


@pytest.mark.parametrize(("top_n", "left"), [(None, [1, 2, 0]), (0, [1, 2, 0]), (1, [1]), (2, [1, 2]), (9, [1, 2, 0])])
async def test_only_the_best_are_named_if_few_are_asked_for(scoring: Any, top_n: int | None, left: list[int]) -> None:
    body = {"model": "m", "query": "q", "documents": ["a", "abc", "ab"], "top_n": top_n, "return_documents": False}

    results = (await scoring.post("/v1/rerank", body)).json()["results"]

    assert [result["index"] for result in results] == left
    assert all("document" not in result for result in results)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_texts_have_the_names_that_clients_of_vllm_know(scoring: Any, names: tuple[str, str]) -> None:
    texts = {names[0]: ["q", {"text": "r"}], names[1]: ["a", "b"]}

    reply = await scoring.post("/v1/score", {"model": "m", **texts})

    assert reply.status == 200
    assert (scored(scoring).queries, scored(scoring).documents) == (["q", "r"], ["a", "b"])


async def test_limits_reach_the_engine_and_zero_is_none(scoring: Any) -> None:
    body = {"model": "m", "query": "q", "documents": "a"}
    limits = {"max_tokens_per_query": 3, "max_tokens_per_doc": 0, "truncate_prompt_tokens": -1}

    assert (await scoring.post("/v1/rerank", body | limits)).status == 200

    asked = scored(scoring)
    assert (asked.max_tokens_per_query, asked.max_tokens_per_doc, asked.truncate_prompt_tokens) == (3, None, -1)


@pytest.mark.parametrize("path", [*SCORE_PATHS, *RERANK_PATHS])
async def test_a_model_that_cannot_is_not_asked(server: Any, path: str) -> None:
    body = {"text_1": "q", "text_2": "d"} if "score" in path else {"query": "q", "documents": ["d"]}

    missing = await server.post(path, {"model": "nope", **body})
    reply = await server.post(path, {"model": "m", **body})

    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert reply.status == 501
    assert reply.json()["message"] == f"Model 'm' does not serve {'score' if 'score' in path else 'rerank'}"


async def test_a_rerank_only_model_has_no_score_route(cold_server: Any) -> None:
    cold_server.add_model(model_types=["rerank"], capabilities=["rerank"])
    await cold_server.start()

    assert (await cold_server.post("/v1/score", {"model": "m", "text_1": "q", "text_2": "d"})).status == 501
    assert (await cold_server.post("/v1/rerank", {"model": "m", "query": "q", "documents": "d"})).status == 200


async def test_an_engine_for_text_gets_the_body_of_an_embedding_request(cold_server: Any) -> None:
    cold_server.add_model(capabilities=["embed"], model_input="text")
    cold_server.add_model("tokens", capabilities=["embed"])
    await cold_server.start()
    body = {"model": "m", "input": ["a"], "encoding_format": "base64"}

    assert (await cold_server.post("/v1/embeddings", body)).status == 200
    assert (await cold_server.post("/v1/embeddings", body | {"model": "tokens"})).status == 200

    models = cold_server.directory.models
    assert models["m"].embedded[0].body == body
    assert models["tokens"].embedded[0].body is None
