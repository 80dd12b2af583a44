"""Keys as clients meet them: the official SDKs, what a key may see, and what is written down of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from dynamo_core import Principal
from dynamo_http.auth import hash_of, new_key
from dynamo_http.settings import AuthSettings
from dynamo_runtime.telemetry.access_log import fields

FULL, NARROW = new_key(), new_key()
KEYS = AuthSettings.model_validate(
    {
        "keys": [
            {"id": "operator", "hash": hash_of(FULL)},
            {"id": "team-b", "hash": hash_of(NARROW), "models": ["m"], "tenant": "b", "priority": 3},
        ]
    }
)


@pytest.fixture
def keys() -> AuthSettings:
    return KEYS


class Clients:
    def __init__(self, url: str) -> None:
        self._url = url
        self._made: list[openai.AsyncOpenAI] = []

    def __call__(self, key: str) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=key, max_retries=0)
        self._made.append(client)
        return client

    async def aclose(self) -> None:
        for client in self._made:
            await client.close()


@pytest.fixture
async def sdk(guarded: Any) -> AsyncIterator[Clients]:
    clients = Clients(guarded.url)
    yield clients
    await clients.aclose()


async def chat(client: openai.AsyncOpenAI, model: str, **options: Any) -> Any:
    return await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], **options)


async def test_a_known_key_is_answered(sdk: Clients) -> None:
    answer = await chat(sdk(FULL), "secret")

    assert answer.choices[0].message.content == "yes"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_key_is_an_authentication_error(sdk: Clients, guarded: Any, stream: bool) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await chat(sdk("sk-nobody"), "m", stream=stream)

    assert caught.value.status_code == 401
    assert caught.value.code == "invalid_api_key"
    assert guarded.directory.models["m"].count == 0


async def test_without_a_key_nothing_is_shown(guarded: Any) -> None:
    for path in ("/v1/models", "/v1/models/m", "/v1/models/m/ready", "/dynamo/alpha/list-models"):
        reply = await guarded.get(path)

        assert reply.status == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
        assert b"secret" not in reply.body
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/tokenize"):
        assert (await guarded.post(path, {"model": "m"})).status == 401, path


async def test_a_key_sees_only_its_models(sdk: Clients, guarded: Any) -> None:
    client = sdk(NARROW)

    assert [model.id for model in (await client.models.list()).data] == ["m"]
    assert [model.id for model in (await sdk(FULL).models.list()).data] == ["m", "secret"]
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("secret")
    with pytest.raises(openai.NotFoundError):
        await client.get("/models/secret/ready", cast_to=object)
    assert (await chat(client, "m")).choices[0].message.content == "yes"


async def test_a_model_that_a_key_is_not_for_is_exactly_as_one_that_is_not_there(sdk: Clients, guarded: Any) -> None:
    with pytest.raises(openai.NotFoundError) as forbidden:
        await chat(sdk(NARROW), "secret")
    with pytest.raises(openai.NotFoundError) as absent:
        await chat(sdk(NARROW), "nothing")

    def shown(error: openai.NotFoundError, name: str) -> str:
        return error.response.text.replace(name, "NAME")

    assert shown(forbidden.value, "secret") == shown(absent.value, "nothing")
    assert guarded.directory.models["secret"].count == 0


async def test_other_routes_hide_foreign_models_too(guarded: Any) -> None:
    headers = {"x_api_key": NARROW}
    for path, body in (
        ("/v1/completions", {"model": "secret", "prompt": "Hi"}),
        ("/v1/embeddings", {"model": "secret", "input": "Hi"}),
        ("/v1/rerank", {"model": "secret", "query": "Hi", "documents": ["Ho"]}),
        ("/tokenize", {"model": "secret", "prompt": "Hi"}),
    ):
        assert (await guarded.post(path, body, **headers)).status == 404, path
    # Of two models it knows one: nobody has to say which is meant.
    assert (await guarded.post("/tokenize", {"prompt": "Hi"}, **headers)).status == 200


async def test_the_anthropic_api_has_its_own_authentication_error(guarded: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=guarded.url, api_key="nobody", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "Hi"}])

    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "authentication_error"


async def test_the_record_and_the_access_log_name_the_key_and_do_not_hold_it(sdk: Clients, guarded: Any) -> None:
    await chat(sdk(NARROW), "m")
    record = await guarded.record()

    assert record.key_id == "team-b"
    assert fields(record)["key_id"] == "team-b"
    assert NARROW not in repr(record)


async def test_admission_gets_the_principal(sdk: Clients, guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = guarded.directory.models["m"]
    asked: list[Principal] = []
    monkeypatch.setattr(model, "precheck", asked.append)

    await chat(sdk(NARROW), "m")

    (principal,) = asked
    assert (principal.key_id, principal.tenant, principal.priority) == ("team-b", "b", 3)
