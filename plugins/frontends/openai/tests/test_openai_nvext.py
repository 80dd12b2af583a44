"""`nvext`: every field of it has an effect that the engine sees, or the client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from dynamo_generation.requests.nvext import NvExt

PATHS = ["/v1/chat/completions", "/v1/completions"]
BASE = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = "user: Hi\nassistant: "

#: A value of each field, and what the engine is asked then and is not otherwise.
EFFECTS: dict[str, tuple[Any, Any]] = {
    "ignore_eos": (True, lambda request: request.stop_conditions.ignore_eos),
    "top_k": (40, lambda request: request.sampling_options.top_k == 40),
    "repetition_penalty": (1.1, lambda request: request.sampling_options.repetition_penalty == 1.1),
    "greedy_sampling": (True, lambda request: request.sampling_options.temperature == 0),
    "greed_sampling": (True, lambda request: request.sampling_options.temperature == 0),
    "use_raw_prompt": (True, lambda request: bytes(request.token_ids) == b"Hi"),
    "annotations": (["token_ids"], lambda request: request.annotations == ["token_ids"]),
    "session_id": ("s", lambda request: request.routing is not None and request.routing.session_id == "s"),
}


@pytest.fixture
def model(model: Any) -> Any:
    model.script = lambda call: call.finish(text="x")
    return model


async def asked(server: Any, model: Any, **fields: Any) -> Any:
    reply = await server.chat(**fields)
    assert reply.status == 200, reply.body
    return (await model.call()).request


def test_every_field_is_tried() -> None:
    # The form of annotations in a stream is no affair of the engine; it has a test of its own.
    assert set(EFFECTS) | {"annotations_in"} == set(NvExt.__struct_fields__)


@pytest.mark.parametrize("name", EFFECTS)
async def test_a_field_reaches_the_engine_and_is_not_there_if_it_is_not_given(
    server: Any, model: Any, name: str
) -> None:
    value, effect = EFFECTS[name]

    assert effect(await asked(server, model, nvext={name: value}))
    for nothing in ({}, {name: None}, None):
        assert not effect(await asked(server, model, nvext=nothing))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value", "other"), [("top_k", 5, 6), ("repetition_penalty", 1.5, 1.25), ("ignore_eos", True, False)]
)
async def test_a_field_may_repeat_in_nvext_with_the_same_value(
    server: Any, model: Any, path: str, name: str, value: Any, other: Any
) -> None:
    body = {"model": "m", "prompt": "Hi"} if path.endswith("/v1/completions") else BASE
    equal = await server.post(path, {**body, name: value, "nvext": {name: value}})
    different = await server.post(path, {**body, name: value, "nvext": {name: other}})
    reversed_ = await server.post(path, {**body, name: other, "nvext": {name: value}})

    assert equal.status == 200
    for reply in (different, reversed_):
        assert (reply.status, reply.json()["error"]["param"]) == (400, name)
        assert f"`{name}`" in reply.json()["message"]
        assert f"`nvext.{name}`" in reply.json()["message"]


async def test_nvext_greedy_sampling_overrides_sampling_options(server: Any, model: Any) -> None:
    sampling = (
        await asked(server, model, temperature=1.5, top_p=0.5, min_p=0.1, nvext={"greedy_sampling": True, "top_k": 5})
    ).sampling_options

    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, None, None, None)


async def test_the_two_spellings_of_greedy_sampling_must_agree(server: Any, model: Any) -> None:
    reply = await server.chat(nvext={"greedy_sampling": True, "greed_sampling": False})

    assert reply.status == 400
    assert "`nvext.greedy_sampling`" in reply.json()["message"]
    assert "`nvext.greed_sampling`" in reply.json()["message"]
    await asked(server, model, nvext={"greedy_sampling": True, "greed_sampling": True})


@pytest.mark.parametrize("value", [-1, 1, 2**31 - 1])
async def test_top_k_is_all_or_at_least_one(server: Any, model: Any, value: int) -> None:
    assert (await asked(server, model, nvext={"top_k": value})).sampling_options.top_k == value


@pytest.mark.parametrize("value", [0.1, 1, 2.0])
async def test_the_repetition_penalty_is_above_zero_up_to_two(server: Any, model: Any, value: float) -> None:
    assert (
        await asked(server, model, nvext={"repetition_penalty": value})
    ).sampling_options.repetition_penalty == value


async def test_annotations_report_the_engines_input(server: Any, model: Any) -> None:
    wanted = {"annotations": ["token_ids", "formatted_prompt", "timing"]}

    stream = await server.chat(stream=True, nvext=wanted)
    streamed = (await model.call()).request
    unary = (await server.chat(nvext=wanted)).json()["nvext"]

    comments = {
        item.split("\n")[0].removeprefix("event: "): json.loads(item.split("\n")[1].removeprefix(": "))
        for item in stream.body.decode().split("\n\n")
        if item.startswith("event: ")
    }
    assert json.loads(comments["token_ids"]) == list(streamed.token_ids) == unary["token_ids"]
    assert comments["formatted_prompt"] == unary["formatted_prompt"] == PROMPT
    assert set(comments["timing"]) == set(unary["timing"]) == {"request_received_ms", "ttft_ms", "total_time_ms"}


@pytest.mark.parametrize("path", ["chat", "completions"])
async def test_annotations_in_chunks_are_read_by_the_official_client(server: Any, model: Any, path: str) -> None:
    wanted = {"annotations": ["token_ids", "formatted_prompt", "timing"], "annotations_in": "chunks"}
    model.script = lambda call: call.finish(text="x")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        if path == "chat":
            asked: Any = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hi"}], stream=True, extra_body={"nvext": wanted}
            )
        else:
            asked = client.completions.create(model="m", prompt="Hi", stream=True, extra_body={"nvext": wanted})
        chunks = [chunk async for chunk in await asked]

    request = (await model.call()).request
    told = [chunk.nvext for chunk in chunks if not chunk.choices]
    assert [set(each) for each in told] == [
        {"token_ids", "formatted_prompt"},
        {"timing"},
    ]
    assert told[0]["token_ids"] == list(request.token_ids)
    assert told[0]["formatted_prompt"] == bytes(request.token_ids).decode()
    assert not chunks[0].choices
    assert not chunks[-2].choices
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_another_form_of_annotations_is_refused(server: Any) -> None:
    reply = await server.chat(stream=True, nvext={"annotations": ["timing"], "annotations_in": "headers"})

    assert (reply.status, reply.json()["error"]["param"]) == (400, "nvext.annotations_in")


async def test_the_raw_prompt_is_the_texts_of_all_messages(server: Any, model: Any) -> None:
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]

    request = await asked(server, model, messages=messages, nvext={"use_raw_prompt": True})

    assert bytes(request.token_ids) == b"Be\nHi"
