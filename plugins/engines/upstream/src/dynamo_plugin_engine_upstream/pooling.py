"""Embeddings and scores: requests to the server, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

import msgspec
from dynamo_core import BackendError, EmbedOutput, EmbedRequest, ScoreOutput, ScoreRequest, invalid_argument
from dynamo_core.protocol import Unreadable, read

EMBEDDINGS = "embeddings"
SCORE = "score"
RERANK = "rerank"

T = TypeVar("T")

_answers = msgspec.json.Decoder()


def embedding_body(request: EmbedRequest, model: str) -> dict[str, Any]:
    """Return the client's body with the server's name of the model.

    The vectors are asked for as numbers, which every server can give, whatever the client wants.

    Raises:
        BackendError.InvalidArgument: the request has no body.
    """
    if not isinstance(request.body, dict):
        raise invalid_argument("the request has no body, which this engine needs")
    return request.body | {"model": model, "encoding_format": "float"}


def score_body(request: ScoreRequest, model: str, path: str) -> dict[str, Any]:
    """Return the texts and the limits that were set."""
    limits = {
        name: value
        for name in ("max_tokens_per_query", "max_tokens_per_doc", "truncate_prompt_tokens")
        if (value := getattr(request, name)) is not None
    }
    if path == RERANK:
        return {"model": model, "query": request.queries[0], "documents": request.documents} | limits
    one = len(request.queries) == 1
    return {
        "model": model,
        "text_1": request.queries[0] if one else request.queries,
        "text_2": request.documents,
    } | limits


def read_embeddings(body: bytes, inputs: int) -> EmbedOutput:
    """Return the vectors of an answer, in the order of the inputs.

    Raises:
        BackendError.Unknown: it is no such answer.
    """
    embeddings, tokens = _entries(body, "data", "embedding", inputs, _vector)
    return EmbedOutput(embeddings=embeddings, prompt_tokens=tokens)


def read_scores(body: bytes, documents: int, path: str) -> ScoreOutput:
    """Return the scores of an answer, in the order of the documents.

    Raises:
        BackendError.Unknown: it is no such answer.
    """
    where, name = ("results", "relevance_score") if path == RERANK else ("data", "score")
    scores, tokens = _entries(body, where, name, documents, _number)
    return ScoreOutput(scores=scores, prompt_tokens=tokens)


def _entries(body: bytes, where: str, name: str, count: int, make: Callable[[Any], T]) -> tuple[list[T], int]:
    """Return what the entries of a list hold, by their index, and how many tokens were read."""
    try:
        answer = read(_answers, body)
        found = {entry["index"]: make(entry[name]) for entry in answer[where]}
        return [found[index] for index in range(count)], _tokens(answer.get("usage"))
    except (Unreadable, KeyError, TypeError, ValueError, OverflowError) as error:
        raise BackendError.Unknown(f"the server's answer has no {where} with {count} times {name}") from error


def _vector(value: Any) -> list[float]:
    if not isinstance(value, list) or not value:
        raise TypeError("it is no vector")
    return [_number(each) for each in value]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("it is no number")
    number = float(value)
    if not isfinite(number):
        raise ValueError("it is not finite")
    return number


def _tokens(usage: Any) -> int:
    """Return the tokens as servers count them; 0 if they do not."""
    for name in ("prompt_tokens", "total_tokens"):
        value = usage.get(name) if isinstance(usage, dict) else None
        if isinstance(value, int) and value > 0:
            return value
    return 0
