"""Routes that ask no worker: tokens of texts, texts of tokens, and whether a model can be asked."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import openai
import pytest

TEMPLATE = (
    b"{% for tool in tools or [] %}T{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"
    b"{% if name %}{{ name }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
async def template_server(cold_server: Any) -> Any:
    """Return a server whose model has a template that shows all it is given."""
    cold_server.add_model(files={"chat_template.jinja": TEMPLATE})
    await cold_server.start()
    return cold_server


# Tokens.


async def test_a_text_becomes_its_tokens(server: Any, model: Any) -> None:
    answer = (await server.post("/tokenize", {"model": "m", "prompt": "Hé"})).json()

    assert answer == {"count": 3, "max_model_len": 1000, "tokens": list("Hé".encode()), "token_strs": None}
    assert model.count == 0
    assert (await server.record()).endpoint == "tokenize"


async def test_tokens_can_be_shown_one_by_one(server: Any) -> None:
    answer = (await server.post("/tokenize", {"model": "m", "prompt": "Hé", "return_token_strs": True})).json()

    assert answer["token_strs"] == ["H", "\ufffd", "\ufffd"]


async def test_special_tokens_are_added_unless_they_are_not_wanted(server: Any, model: Any) -> None:
    class Marking(type(model.tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + list(text.encode())

    model.tokenizer = Marking()

    for wish, expected in ((None, [0, 72]), (True, [0, 72]), (False, [72])):
        body = {"model": "m", "prompt": "H", "add_special_tokens": wish}
        assert (await server.post("/tokenize", body)).json()["tokens"] == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user: Hi|assistant: "),
        ({"add_generation_prompt": False}, "user: Hi|"),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}], "continue_final_message": True},
            "assistant: Hi",
        ),
        ({"chat_template_kwargs": {"name": "Ann"}}, "user: Hi|Annassistant: "),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "Tuser: Hi|assistant: "),
    ],
)
async def test_a_conversation_becomes_the_tokens_of_its_prompt(
    template_server: Any, fields: dict[str, Any], text: str
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}

    answer = (await template_server.post("/tokenize", body)).json()

    assert bytes(answer["tokens"]).decode() == text
    assert answer["count"] == len(text)


@pytest.mark.parametrize("size", [3, 5000])
async def test_tokens_become_their_text_also_more_than_the_model_can_take(server: Any, size: int) -> None:
    text = "é" * size
    tokens = (await server.post("/tokenize", {"model": "m", "prompt": text, "return_token_strs": True})).json()

    answer = await server.post("/detokenize", {"model": "m", "tokens": tokens["tokens"]})

    assert len(tokens["token_strs"]) == tokens["count"] == 2 * size
    assert answer.json() == {"prompt": text}


async def test_special_tokens_are_part_of_the_text(server: Any, model: Any) -> None:
    class Marking(type(model.tokenizer)):  # type: ignore[misc]
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            return "H" if skip_special_tokens else "<s>H"

    model.tokenizer = Marking()

    assert (await server.post("/detokenize", {"model": "m", "tokens": [0, 72]})).json() == {"prompt": "<s>H"}


async def test_without_a_name_the_only_model_is_meant(cold_server: Any) -> None:
    await cold_server.start()
    assert (await cold_server.post("/tokenize", {"prompt": "H"})).status == 503

    cold_server.add_model()
    assert (await cold_server.post("/tokenize", {"prompt": "H"})).json()["tokens"] == [72]
    assert (await cold_server.post("/detokenize", {"tokens": [72]})).json() == {"prompt": "H"}

    cold_server.add_model("other")
    reply = await cold_server.post("/tokenize", {"prompt": "H"})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "model")
    assert (await cold_server.post("/tokenize", {"model": "nobody", "prompt": "H"})).status == 404


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools"),
        ("/tokenize", {"prompt": "x", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [72, 100000]}, "tokens[1]"),
        ("/detokenize", {"tokens": [72], "nonsense": 1}, "nonsense"),
    ],
)
async def test_invalid_fields_are_refused_by_name(server: Any, path: str, fields: dict[str, Any], param: str) -> None:
    reply = await server.post(path, {"model": "m", **fields})

    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


# Whether a model can be asked.


async def test_a_model_is_ready_when_no_role_is_missing(cold_server: Any) -> None:
    model = cold_server.add_model("org/name")
    await cold_server.start()

    ready = await cold_server.get("/v1/models/org/name/ready")
    model.missing_roles = ["prefill"]
    lacking = await cold_server.get(f"/v1/models/{quote('org/name', safe='')}/ready")

    assert (ready.status, ready.json()) == (
        200,
        {"model": "org/name", "ready": True, "reason": None, "missing_worker_types": []},
    )
    assert lacking.status == 503
    assert lacking.json() == {
        "model": "org/name",
        "ready": False,
        "reason": "model 'org/name' has no prefill worker now",
        "missing_worker_types": ["prefill"],
    }
    [changed_models] = (await cold_server.get("/dynamo/alpha/list-models")).json()["models"]
    assert (changed_models["ready"], changed_models["missing_worker_types"]) == (False, ["prefill"])


async def test_readiness_names_missing_workers_and_unknown_models_are_404(
    cold_server: Any,
) -> None:
    cold_server.add_model()
    cold_server.directory.waiting_for = {"big": ["decode"]}
    await cold_server.start()

    waiting, unknown = await cold_server.get("/v1/models/big/ready"), await cold_server.get("/v1/models/x/ready")

    assert (waiting.status, waiting.json()["missing_worker_types"]) == (503, ["decode"])
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_the_official_client_finds_a_model_with_slashes_in_its_name(cold_server: Any) -> None:
    cold_server.add_model("org/name")
    await cold_server.start()
    url = f"{cold_server.url}/v1"

    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as client:
        assert (await client.models.retrieve("org/name")).id == "org/name"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")
