"""Fields that no API documents: refused by name, or left out and named in the answer where the operator wants that."""

from __future__ import annotations

from typing import Any

import pytest

HEADER = "x-dynamo-ignored-fields"
MESSAGES = [{"role": "user", "content": "Hi"}]

#: The fewest fields of every route that takes a body.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture
async def lenient(cold_server: Any) -> Any:
    """Return a server that ignores unknown fields, with a model for everything."""
    cold_server.configure(unknown_fields="ignore")
    model = cold_server.add_model(
        model_types=["chat", "completions", "embeddings"], capabilities=["embed", "score", "rerank"]
    )
    model.script = lambda call: call.finish(text="x")
    await cold_server.start()
    return cold_server


@pytest.mark.parametrize("path", BODIES)
async def test_ignored_fields_are_named_by_every_route(lenient: Any, path: str) -> None:
    reply = await lenient.post(path, {"model": "m", **BODIES[path], "wish": 1, "other": {"a": 2}})

    assert (reply.status, reply.headers.get(HEADER)) == (200, "wish, other"), reply.body
    assert HEADER not in (await lenient.post(path, {"model": "m", **BODIES[path]})).headers


async def test_a_stream_names_them_in_its_head(lenient: Any) -> None:
    reply = await lenient.chat(stream=True, wish=1)

    assert (reply.status, reply.headers[HEADER], reply.text()) == (200, "wish", "x")


async def test_ignored_fields_are_counted_by_route(lenient: Any) -> None:
    await lenient.chat(wish=1, other=2)
    await lenient.complete(wish=1)

    def counted(endpoint: str) -> float | None:
        value: float | None = lenient.metrics.registry.get_sample_value(
            "dynamo_frontend_ignored_fields_total", {"endpoint": endpoint}
        )
        return value

    assert (counted("chat_completions"), counted("completions")) == (2, 1)


async def test_unprintable_ignored_fields_are_escaped_in_the_header(lenient: Any) -> None:
    strange = {"a\r\nset-cookie: x": 1, "é" * 1000: 2, **{f"field{at}": 3 for at in range(30)}}

    reply = await lenient.chat(**strange)

    assert reply.status == 200
    assert reply.headers[HEADER].startswith(f"a??set-cookie??x, {'?' * 64}, field0, ")
    assert reply.headers[HEADER].endswith(", and 12 more")
    assert "set-cookie" not in reply.headers


async def test_an_engine_that_takes_text_does_not_get_them(cold_server: Any) -> None:
    cold_server.configure(unknown_fields="ignore")
    model = cold_server.add_model(model_input="text")
    model.script = lambda call: call.finish(text="x")
    await cold_server.start()

    await cold_server.chat(wish=1, service_tier="flex")

    body = (await model.call()).request.body
    assert ("wish" in body, body["service_tier"]) == (False, "flex")


async def test_fields_that_change_the_answer_are_still_refused(lenient: Any) -> None:
    template = await lenient.chat(chat_template="x")
    functions = await lenient.chat(functions=[{"name": "f"}])

    assert [(reply.status, reply.json()["error"]["param"]) for reply in (template, functions)] == [
        (400, "chat_template"),
        (400, "functions"),
    ]


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_refused_by_default(server: Any, path: str) -> None:
    reply = await server.post(path, {"model": "m", **BODIES[path], "wish": 1})

    assert reply.status == 400
    assert "`wish`" in reply.json()["error"]["message"]
    assert HEADER not in reply.headers
