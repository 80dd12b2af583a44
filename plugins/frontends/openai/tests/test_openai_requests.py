"""What clients may send, what they are told otherwise, and what the engine is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import BackendError, DynamoError
from dynamo_core.errors import (
    Cancelled,
    ConnectionTimeout,
    DeadlineExceeded,
    Disconnected,
    InvalidArgument,
    NotSupported,
    ResponseTimeout,
    ServiceOverloaded,
    StreamIncomplete,
    Unavailable,
    Unknown,
    WorkerOverloaded,
    problem_of,
)
from dynamo_text import stop_strings

OVERLOADED = "Service temporarily unavailable: All workers are busy, please retry later"
LOST = "The worker of this request was lost, please retry"


@pytest.mark.parametrize(
    ("error", "status", "message", "metric"),
    [
        (InvalidArgument("bad", field="x"), 400, "bad", "validation"),
        (BackendError.InvalidArgument("bad"), 400, "bad", "validation"),
        (Unavailable("no worker has registered yet"), 503, "no worker has registered yet", "unavailable"),
        (ServiceOverloaded("whatever"), 503, OVERLOADED, "overload"),
        (WorkerOverloaded("10.0.0.1 is full"), 503, OVERLOADED, "overload"),
        (Cancelled("x"), 499, "Request cancelled", "cancelled"),
        (NotSupported("no"), 501, "no", "not_implemented"),
        (DeadlineExceeded("w7"), 504, "The model did not answer in time", "response_timeout"),
        (ResponseTimeout("w7"), 503, LOST, "unavailable"),
        (ConnectionTimeout("w7"), 503, LOST, "unavailable"),
        (Disconnected("w7"), 503, LOST, "unavailable"),
        (StreamIncomplete("w7"), 503, LOST, "unavailable"),
        (BackendError.CannotConnect("10.0.0.1"), 503, LOST, "unavailable"),
        (BackendError.EngineShutdown("its engine is gone"), 503, LOST, "unavailable"),
        (BackendError.Unknown("stack"), 500, "Internal server error", "internal"),
        (Unknown("stack"), 500, "Internal server error", "internal"),
        (ValueError("stack"), 500, "Internal server error", "internal"),
    ],
)
async def test_errors_become_http(
    server: Any, model: Any, error: DynamoError, status: int, message: str, metric: str
) -> None:
    model.refusal = error

    reply = await server.chat()

    assert reply.status == status
    answer = reply.json()
    assert list(answer) == ["error", "message", "type", "code"]
    assert (answer["message"], answer["code"]) == (message, status)
    assert answer["error"]["message"] == message
    record = await server.record()
    assert (record.error_type, record.http_status) == (metric, status)


async def test_overload_is_answered_before_any_work_with_the_seeds_message(server: Any, model: Any) -> None:
    model.precheck_refusal = ServiceOverloaded(retry_after=500)

    reply = await server.chat(messages=[{"role": "user", "content": "Hi"}], stream=True)

    answer = reply.json()
    assert {name: answer[name] for name in ("message", "type", "code")} == {
        "message": OVERLOADED,
        "type": "service_unavailable",
        "code": 503,
    }
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["retry-after"] == "60"
    assert model.count == 0


def test_waiting_times_stay_between_one_second_and_a_minute() -> None:
    assert [problem_of(ServiceOverloaded(retry_after=s)).retry_after for s in (0, 1.2, 99)] == [1, 2, 60]


async def test_an_unknown_model_is_404_and_names_it(server: Any) -> None:
    reply = await server.chat(model="nope")

    assert reply.status == 404
    assert reply.json()["message"] == "Model not found: 'nope' (served: m)"
    assert "nope" in reply.json()["message"]
    assert server.records == []


async def test_without_any_model_the_service_is_unavailable(cold_server: Any) -> None:
    await cold_server.start()

    reply = await cold_server.chat()
    models = await cold_server.get("/v1/models")

    assert (reply.status, reply.json()["message"]) == (503, "no worker has registered yet")
    assert models.json() == {"object": "list", "data": []}


async def test_the_first_of_several_faults_follows_the_documented_order(server: Any, model: Any) -> None:
    model.precheck_refusal = ServiceOverloaded()
    faults: list[tuple[dict[str, Any], int, str]] = [
        ({"top_p": "much"}, 400, "Failed to deserialize"),
        ({"messages": []}, 400, "Validation: The 'messages' field cannot be empty."),
        ({"foo": 1}, 400, "Unsupported parameter(s): `foo`"),
        ({"temperature": 3}, 400, "Validation: Temperature must be"),
        ({"model": "nope"}, 404, "Model not found"),
        ({}, 503, OVERLOADED),
    ]

    for at, (_, status, words) in enumerate(faults):
        fields = {name: value for fault, _, _ in faults[at:] for name, value in fault.items()}
        reply = await server.chat(**fields)
        assert (reply.status, reply.json()["message"][: len(words)]) == (status, words)

    assert reply.headers["retry-after"] == "1"
    assert model.count == 0


async def test_a_model_serves_only_its_own_endpoints(server: Any) -> None:
    server.add_model("c", model_types=["completions"])

    assert (await server.chat(model="c")).status == 404


CHAT_RANGES = [
    ({"model": " "}, "Model cannot be empty", "model"),
    ({"messages": []}, "The 'messages' field cannot be empty. At least one message is required.", "messages"),
    ({"temperature": 3}, "Temperature must be between 0 and 2, got 3", "temperature"),
    ({"temperature": -0.5}, "Temperature must be between 0 and 2, got -0.5", "temperature"),
    ({"top_p": 2}, "Top_p must be between 0 and 1, got 2", "top_p"),
    ({"min_p": 1.5}, "Min_p must be between 0 and 1, got 1.5", "min_p"),
    ({"top_k": -2}, "Top_k must be null or greater than or equal to -1", "top_k"),
    ({"frequency_penalty": 3}, "Frequency penalty must be between -2 and 2, got 3", "frequency_penalty"),
    ({"presence_penalty": -3}, "Presence penalty must be between -2 and 2, got -3", "presence_penalty"),
    ({"repetition_penalty": 0}, "Repetition penalty must be between 0 and 2, got 0", "repetition_penalty"),
    ({"n": 0}, "n must be between 1 and 128, got 0", "n"),
    ({"n": 129}, "n must be between 1 and 128, got 129", "n"),
    (
        {"n": 2, "temperature": 0},
        "When n > 1, temperature must be greater than 0 to ensure diverse outputs. Got n=2, temperature=0",
        "n",
    ),
    ({"max_tokens": 0}, "Max tokens must be greater than 0, got 0", "max_tokens"),
    (
        {"max_completion_tokens": 0},
        "Max completion tokens must be greater than 0, got 0",
        "max_completion_tokens",
    ),
    ({"stop": ""}, "Stop sequence cannot be empty", "stop"),
    ({"stop": []}, "Stop sequences array cannot be empty", "stop"),
    ({"stop": ["a", ""]}, "Stop sequence at index 1 cannot be empty", "stop"),
    ({"stop": ["a"] * 33}, "Stop sequences array must have at most 32 items, got 33", "stop"),
    ({"stop": "a" * 1025}, "Stop sequence must have at most 1024 characters, got 1025", "stop"),
    ({"stop": ["b", "a" * 1025]}, "Stop sequence at index 1 must have at most 1024 characters, got 1025", "stop"),
    ({"stop": ["a" * 1000] * 9}, "Stop sequences must have at most 8192 characters together, got 9000", "stop"),
    ({"logit_bias": {"5": 101}}, "Logit bias for token '5' must be between -100 and 100, got 101", "logit_bias"),
    ({"logit_bias": {"x": 1}}, "Logit bias key 'x' is not a token id", "logit_bias"),
    ({"top_logprobs": 21, "logprobs": True}, "Top_logprobs must be between 0 and 20, got 21", "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true", "top_logprobs"),
    ({"user": " "}, "User ID cannot be empty", "user"),
    (
        {"stream_options": {"include_usage": True}},
        "The 'stream_options' field is only allowed when 'stream' is set to true.",
        "stream_options",
    ),
    ({"nvext": {"top_k": 0}}, "top_k must be -1 or greater than or equal to 1", "nvext.top_k"),
    ({"nvext": {"top_k": -2}}, "top_k must be -1 or greater than or equal to 1", "nvext.top_k"),
    (
        {"nvext": {"repetition_penalty": 2.1}},
        "Repetition penalty must be between 0 and 2, got 2.1",
        "nvext.repetition_penalty",
    ),
    (
        {"top_k": 5, "nvext": {"top_k": 6}},
        "`top_k` and `nvext.top_k` were given different values; give one of them",
        "top_k",
    ),
    ({"messages": [{"role": "user"}]}, "The message of role 'user' has no content", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "Content of type 'image_url' is not supported by this model",
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("fields", "message", "param"), CHAT_RANGES)
async def test_chat_values_out_of_range_are_named(
    server: Any, model: Any, fields: dict[str, Any], message: str, param: str
) -> None:
    reply = await server.chat(**fields)

    assert (reply.status, reply.json()["message"]) == (400, f"Validation: {message}")
    assert reply.json()["error"]["param"] == param
    assert model.count == 0


COMPLETION_RANGES = [
    ({"prompt": ""}, "Prompt string cannot be empty"),
    ({"prompt": []}, "Prompt string array cannot be empty"),
    ({"prompt": ["a", ""]}, "Prompt string at index 1 cannot be empty"),
    ({"logprobs": 6}, "Logprobs must be between 0 and 5, got 6"),
    ({"best_of": 21}, "Best_of must be between 0 and 20, got 21"),
    ({"best_of": 1, "n": 2}, "Best_of must be at least n, got best_of=1, n=2"),
    ({"echo": True, "logprobs": 1}, "echo together with logprobs is not supported"),
    ({"prompt": [1, 258]}, "Token id 258 is not in the vocabulary of the model, which has 258 tokens"),
    ({"prompt": ["a"] * 65, "n": 2}, "The number of prompts times n must be at most 128, got 65 prompts and n=2"),
    (
        {"prompt": "x" * 1000},
        "The prompt has 1000 tokens and leaves no room for an answer: the context of the model is 1000 tokens",
    ),
]


@pytest.mark.parametrize(("fields", "message"), COMPLETION_RANGES)
async def test_completion_values_out_of_range_are_named(server: Any, fields: dict[str, Any], message: str) -> None:
    reply = await server.complete(**fields)

    assert (reply.status, reply.json()["message"]) == (400, f"Validation: {message}")


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"foo": 1, "bar": None}, "`foo`, `bar`"),
        ({"chat_template": "x"}, "`chat_template`"),
        ({"prompt": "x"}, "`prompt`"),
    ],
)
async def test_unknown_fields_are_refused_by_name(server: Any, fields: dict[str, Any], names: str) -> None:
    reply = await server.chat(**fields)

    assert reply.status == 400
    assert reply.json()["message"].startswith(f"Unsupported parameter(s): {names}")


async def test_neutral_fields_are_accepted(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="x")

    reply = await server.chat(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        prompt_cache_key="k",
        safety_identifier="s",
        prediction=None,
        temperature=None,
        stop=None,
        nvext=None,
    )

    assert reply.status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[]", None),
        (b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', None),
        (b'{"messages":[]}', "model"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[{}]}', "messages[0].role"),
        (b'{"model":"m","messages":"x"}', "messages"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":"hot"}', "temperature"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":-1}', "max_tokens"),
        (b'{"model":"m","messages":[{"role":"king","content":"x"}]}', "messages[0].role"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"nvext":{"nope":1}}', "nvext.nope"),
        (b'{"model":5,"messages":[{"role":"user","content":"x"}]}', "model"),
    ],
)
async def test_bodies_of_the_wrong_shape_are_refused(server: Any, body: bytes, param: str | None) -> None:
    reply = await server.post("/v1/chat/completions", body)

    assert reply.status == 400
    assert reply.json()["message"].startswith("Failed to deserialize the JSON body into the target type: ")
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "temperature: expected a number or null, got a string"),
        ({"stream": "yes"}, "stream: expected a boolean or null, got a string"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer or null, got a number"),
        ({"max_tokens": -1}, "max_tokens: expected an integer of at least 0"),
        ({"max_tokens": 2**40}, "max_tokens: expected an integer of at most 4294967295"),
        ({"stop": 5}, "stop: expected a string, a list or null, got an integer"),
        ({"stop": [True]}, "stop[0]: expected a string, got a boolean"),
        ({"messages": {}}, "messages: expected a list, got an object"),
        ({"messages": None}, "messages: expected a list, got null"),
        ({"messages": [{"content": "x"}]}, "messages[0]: missing field `role`"),
        ({"nvext": {"topk": 1}}, "nvext: unknown field `topk`"),
        ({"model": None}, "model: expected a string, got null"),
    ],
)
async def test_malformed_bodies_have_plain_error_messages(server: Any, fields: dict[str, Any], words: str) -> None:
    reply = await server.chat(**fields)

    assert reply.json()["message"] == f"Failed to deserialize the JSON body into the target type: {words}"


async def test_an_unknown_encoding_format_lists_the_known_ones(server: Any) -> None:
    reply = await server.post("/v1/embeddings", {"model": "m", "input": "x", "encoding_format": "hex"})

    assert reply.json()["message"].endswith("encoding_format: expected 'base64' or 'float', got 'hex'")
    assert reply.json()["error"]["param"] == "encoding_format"


async def test_a_refused_value_is_not_blamed_on_the_model(server: Any) -> None:
    reply = await server.chat(functions=[{"name": "f"}])

    assert reply.json()["message"] == "Unsupported value of parameter `functions`"


async def test_other_content_types_are_refused(server: Any) -> None:
    reply = await server.post("/v1/chat/completions", {}, content_type="text/plain")

    assert (reply.status, reply.json()["message"]) == (415, "Expected request with Content-Type application/json")


async def test_bodies_over_the_limit_are_refused(server: Any) -> None:
    reply = await server.post("/v1/chat/completions", b" " * (1024 * 1024 + 1))

    assert reply.status == 413


async def test_request_fields_reach_the_engine(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="x")

    await server.chat(
        max_tokens=9,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        seed=5,
        stop="a",
        min_p=0.1,
        min_tokens=1,
        stop_token_ids=[7],
        logit_bias={"5": 1},
        nvext={"top_k": 40, "repetition_penalty": 1.1, "annotations": ["timing"]},
    )

    request = (await model.call()).request
    stop, sampling = request.stop_conditions, request.sampling_options
    assert (stop.max_tokens, stop.stop, stop.min_tokens, stop.stop_token_ids) == (3, ["a"], 1, [7])
    assert (stop.stop_token_ids_hidden, request.eos_token_ids) == ([257], [257])
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 0.2)
    assert (sampling.top_k, sampling.repetition_penalty) == (40, 1.1)
    assert sampling.logit_bias == {"5": 1}
    assert request.annotations == ["timing"]
    assert request.model == "m"


async def test_a_limit_is_cut_to_the_room_in_the_context_and_without_one_the_engine_decides(
    server: Any, model: Any
) -> None:
    model.script = lambda call: call.finish(text="x")

    await server.complete(prompt="x" * 990)
    await server.complete(prompt="x" * 990, max_tokens=50)
    server.add_model("open", context_length=None).script = lambda call: call.finish(text="x")
    await server.complete(model="open")

    limits = [(await model.call()).request.stop_conditions.max_tokens for _ in range(2)]
    assert limits == [None, 10]
    assert (await server.directory.models["open"].call()).request.stop_conditions.max_tokens is None


async def test_ignore_eos_clears_every_stop(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="a\x00b")

    reply = await server.chat(stop="\x00", nvext={"ignore_eos": True}, ignore_eos=True)

    stop = (await model.call()).request.stop_conditions
    assert stop.ignore_eos
    assert stop.stop is stop.stop_token_ids is stop.stop_token_ids_hidden is None
    assert reply.json()["choices"][0]["message"]["content"] == "a\x00b"


async def test_the_choices_of_a_request_share_its_compiled_stop_strings(
    server: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    original = stop_strings.StopStrings.__init__

    def count(self: Any, given: Any) -> None:
        compiled.append(given)
        original(self, given)

    monkeypatch.setattr(stop_strings.StopStrings, "__init__", count)
    model.script = lambda call: (call.say("abc"), call.finish())

    reply = await server.chat(n=3, stop=["b", "x"])

    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == ["a"] * 3
    assert compiled == [["b", "x"]]
