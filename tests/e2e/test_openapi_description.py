"""``/openapi.json`` against the server it describes: thousands of bodies made from it, and what the routes answer."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

NAME = "mock-model"
CONFIG = "workers: {mock: {model: {name: mock-model}, engine: {use: mocker, speedup_ratio: 0}}}"
CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
]
#: An answer takes as long as it has tokens.
MAX_TOKENS = 32
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
TEXT = {"model": NAME, "prompt": "Hi", "max_tokens": 4}

SCORES: list[dict[str, Any]] = [
    {"model": NAME, "text_1": "a", "text_2": ["a", "b"]},
    {"model": NAME, "queries": ["a"], "items": {"text": "a"}},
]
RANKS: list[dict[str, Any]] = [
    {"model": NAME, "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1},
    {"model": NAME, "query": "a", "documents": "a", "return_documents": False},
]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2},
        CHAT | {"nvext": {"annotations": ["token_ids", "timing"]}},
        CHAT | {"stop": "a"},
    ],
    "/v1/completions": [TEXT, TEXT | {"n": 2, "logprobs": 2}, TEXT | {"echo": True}, TEXT | {"prompt": [[72], [73]]}],
    "/v1/embeddings": [
        {"model": NAME, "input": ["a", "b"]},
        {"model": NAME, "input": "a", "encoding_format": "base64", "dimensions": 8},
    ],
    "/v1/score": SCORES,
    "/score": SCORES,
    "/v1/rerank": RANKS,
    "/rerank": RANKS,
    "/v2/rerank": RANKS,
    "/v1/messages": [CHAT, CHAT | {"stop_sequences": ["a"]}],
    "/v1/messages/count_tokens": [{"model": NAME, "messages": CHAT["messages"]}],
    "/v1/responses": [{"model": NAME, "input": "Hi", "max_output_tokens": 4}],
    "/tokenize": [{"prompt": "Hi"}, {"messages": CHAT["messages"], "return_token_strs": True}],
    "/detokenize": [{"tokens": [72, 105]}],
}
#: Routes that are tried in every run; the others are in the long lanes.
USUAL = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
#: A body that each route refuses, whatever it is about.
WRONG = {"model": NAME, "no_such_field": 1}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(CONFIG)


@pytest.fixture(scope="module")
def described(server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module")
def description(server: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.request("GET", "/openapi.json")[2])
    return found


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fits", "does not fit"])
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=() if path in USUAL else pytest.mark.full) for path in BODIES]
)
def test_no_body_that_can_be_made_from_the_description_breaks_the_server(
    described: Any, path: str, mode: GenerationMode
) -> None:
    """Bodies that fit the description, and bodies that do not: those are refused."""
    answered: set[int] = set()

    @given(case=described[path]["POST"].as_strategy(generation_mode=mode), sound=st.booleans())
    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def try_one(case: Any, sound: bool) -> None:
        if mode is GenerationMode.POSITIVE:
            # Else hardly any body would come as far as a worker.
            case.body |= BODIES[path][0] if sound else {}
            for name in LIMITS:
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], MAX_TOKENS)
        answered.add(case.call_and_validate(checks=CHECKS, timeout=90).status_code)

    try_one()

    assert answered <= ({200, 400, 404, 501} if mode is GenerationMode.POSITIVE else {400})


@pytest.mark.parametrize("path", BODIES)
def test_route_answers_match_the_openapi_description(server: Any, description: dict[str, Any], path: str) -> None:
    responses = description["paths"][path]["post"]["responses"]
    for body in BODIES[path]:
        status, _, answer = server.request("POST", path, body)
        assert status == 200, (body, answer)
        assert not faults(description, responses["200"], json.loads(answer)), body
    status, _, answer = server.request("POST", path, WRONG)
    assert status == 400
    assert not faults(description, responses["default"], json.loads(answer))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/{id}", "/v1/models/{id}/ready", "/dynamo/alpha/list-models"]
)
def test_model_routes_match_the_openapi_description(server: Any, description: dict[str, Any], path: str) -> None:
    responses = description["paths"][path]["get"]["responses"]

    status, _, answer = server.request("GET", path.replace("{id}", NAME))

    assert status == 200
    assert not faults(description, responses["200"], json.loads(answer))


def test_no_request_is_left_active(server: Any) -> None:
    """The last of the file, after thousands of bodies."""
    assert server.until(lambda: server.metric("dynamo_frontend_active_requests") == 0, 10)
    assert server.request("GET", "/health")[0] == 200


def test_an_answer_that_is_not_as_described_would_be_found(description: dict[str, Any]) -> None:
    responses = description["paths"]["/v1/chat/completions"]["post"]["responses"]

    assert faults(description, responses["200"], {"id": "1", "object": "chat.completion"})


def faults(description: dict[str, Any], response: dict[str, Any], answer: Any) -> list[str]:
    """Return what is wrong with an answer."""
    schema = response["content"]["application/json"]["schema"]
    validator = jsonschema_rs.Draft202012Validator({**schema, "components": description["components"]})
    return [error.message for error in validator.iter_errors(answer)]
