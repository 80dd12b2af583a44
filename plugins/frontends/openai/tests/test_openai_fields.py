"""Every field that clients know is honoured, without effect, or refused: none is silently dropped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from dynamo_core import FinishReason, LLMEngineOutput, TopLogprob
from dynamo_generation.requests.fields import has_no_effect, schema_of
from dynamo_plugin_frontend_openai.chat import ChatEndpoint
from dynamo_plugin_frontend_openai.completions import CompletionEndpoint
from dynamo_plugin_frontend_openai.embeddings import EmbeddingEndpoint
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

HONOURED, WITHOUT_EFFECT, REFUSED = "honoured", "without effect", "refused"

CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ENDPOINTS: dict[str, Any] = {CHAT: ChatEndpoint, COMPLETE: CompletionEndpoint, EMBED: EmbeddingEndpoint}

#: The fields that the official SDK can send.
OFFICIAL: dict[str, set[str]] = {
    CHAT: set(chat_create_params.CompletionCreateParamsStreaming.__annotations__),
    COMPLETE: set(completion_create_params.CompletionCreateParamsStreaming.__annotations__),
    EMBED: set(embedding_create_params.EmbeddingCreateParams.__annotations__),
}

#: What clients of vLLM's server send beside them, on both routes or in chats only.
VLLM = """
    top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs bad_words
    allowed_token_ids add_special_tokens response_format structured_outputs guided_json guided_regex guided_choice
    guided_grammar guided_decoding_backend guided_whitespace_pattern priority request_id logits_processors
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
"""
VLLM_CHAT = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs
    include_reasoning
"""

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

#: A value of each field that asks for something, and what else the request must hold for that.
WISHES: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [5],
    "audio": {"voice": "alloy", "format": "mp3"},
    "bad_words": ["x"],
    "bad_words_token_ids": [[5]],
    "cache_salt": "salt",
    "chat_template": "{{ messages }}",
    "chat_template_args": {"extra": "!"},
    "chat_template_kwargs": {"extra": "!"},
    "continue_final_message": (True, {"messages": [{"role": "assistant", "content": "Well"}]}),
    "detokenize": False,
    "dimensions": 2,
    "documents": [{"text": "x"}],
    "enable_thinking": True,
    "echo": True,
    "encoding_format": "base64",
    "best_of": 2,
    "frequency_penalty": 0.5,
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_choice": ["yes", "no"],
    "guided_decoding_backend": ("xgrammar", {"guided_regex": "a+"}),
    "guided_grammar": 'root ::= "x"',
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_whitespace_pattern": (" ", {"guided_json": SCHEMA}),
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": (True, {"stop": "c"}),
    "input": "other",
    "kv_transfer_params": {"do_remote_decode": True},
    "length_penalty": 2.0,
    "logit_bias": {"5": 1},
    "logits_processors": ["x"],
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "other"}],
    "metadata": {"a": "b"},
    "min_p": 0.5,
    "min_tokens": 2,
    "mm_processor_kwargs": {"x": 1},
    "modalities": ["text", "audio"],
    "model": "other",
    "moderation": {"model": "omni-moderation-latest"},
    "n": 2,
    "nvext": {"top_k": 5},
    "parallel_tool_calls": (False, {"tools": TOOLS, "tool_choice": "required"}),
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "priority": 3,
    "prompt": "other",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "prompt_logprobs": 1,
    "reasoning_effort": "high",
    "repetition_penalty": 1.5,
    "request_id": "r",
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "safety_identifier": "s",
    "seed": 5,
    "service_tier": "flex",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": "c",
    "stop_token_ids": [99],
    "store": True,
    "stream": True,
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "structured_outputs": {"regex": "a+"},
    "suffix": "x",
    "thinking": {"type": "disabled"},
    "temperature": 0.5,
    "tool_choice": ("required", {"tools": TOOLS}),
    "tools": TOOLS,
    "top_k": 5,
    "top_logprobs": (2, {"logprobs": True}),
    "top_p": 0.5,
    "truncate_prompt_tokens": 5,
    "use_beam_search": True,
    "user": "u",
    "verbosity": "low",
    "vllm_xargs": {"x": 1},
    "web_search_options": {},
}
#: Where a field means something else on a route.
WISHES_OF: dict[str, dict[str, Any]] = {COMPLETE: {"logprobs": 2, "add_special_tokens": False}}

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{{ tools | tojson if tools }}{{ reasoning_effort }}{{ enable_thinking }}{{ extra }}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)


def treatment(path: str, field: str) -> str | None:
    """Return what the frontend's own table says of a field; None if it does not know it."""
    endpoint = ENDPOINTS[path]
    accepts = endpoint.PASSIVE.get(field)
    if accepts is not None:
        return WITHOUT_EFFECT if has_no_effect(accepts) else REFUSED
    if field == "user":
        return WITHOUT_EFFECT
    return HONOURED if field in endpoint.BODY.__struct_fields__ else None


def known(path: str) -> set[str]:
    """Return every field that a test has to try on a route."""
    endpoint = ENDPOINTS[path]
    vllm = {CHAT: VLLM + VLLM_CHAT, COMPLETE: VLLM}.get(path, "")
    return OFFICIAL[path] | set(endpoint.BODY.__struct_fields__) | set(endpoint.PASSIVE) | set(vllm.split())


def wish(path: str, field: str) -> tuple[Any, dict[str, Any]]:
    value = WISHES_OF.get(path, {}).get(field, WISHES[field])
    return value if isinstance(value, tuple) else (value, {})


def answering(call: Any) -> None:
    """Say six letters, with scores if they are wanted."""
    wanted = call.request.output_options.logprobs
    for letter in b"abcdef":
        output = LLMEngineOutput([letter])
        if wanted is not None:
            output.log_probs = [-0.5]
            output.top_logprobs = [[TopLogprob(letter + at, -0.5 - at, at + 1) for at in range(wanted)]]
        call.put(output)
    call.finish(FinishReason.LENGTH)


class CountingTokenizer:
    """Marks texts that were given special tokens: only so can be seen that they were wanted."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([256] if add_special_tokens else []), *self._inner.encode(text)]


@pytest.fixture
async def server(cold_server: Any) -> Any:
    """Return a server whose models show what they are asked, down to the tools and the effort."""
    for name in ("m", "other"):
        model = cold_server.add_model(
            name,
            {"chat_template.jinja": TEMPLATE.encode()},
            model_types=["chat", "completions", "embeddings"],
            capabilities=["embed"],
        )
        model.tokenizer = CountingTokenizer(model.tokenizer)
        model.script = answering
    await cold_server.start()
    return cold_server


BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETE: {"model": "m", "prompt": "Hi"},
    EMBED: {"model": "m", "input": "Hi"},
}


async def seen(server: Any, path: str, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what an engine was asked and what the client was told, without what differs each time."""
    body = {**BASE[path], **fields}
    reply = await server.post(path, body)
    assert reply.status == 200, (fields, reply.body)
    model = server.directory.models[body["model"]]
    asked = model.embedded[-1] if path == EMBED else (await model.call()).request
    whole = reply.headers["content-type"].startswith("application/json")
    told = [reply.json()] if whole else [event for event in reply.events if isinstance(event, dict)]
    for item in told:
        item.pop("id", None)
        item.pop("created", None)
    return msgspec.to_builtins(asked), told


FIELDS = [(path, field) for path in ENDPOINTS for field in sorted(known(path))]


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in ENDPOINTS for field in sorted(OFFICIAL[path])])
def test_every_field_of_the_official_client_is_in_the_table(path: str, field: str) -> None:
    assert treatment(path, field) is not None


@pytest.mark.parametrize(("path", "field"), FIELDS)
async def test_fields_are_treated_as_the_table_of_the_page_says(server: Any, path: str, field: str) -> None:
    value, needed = wish(path, field)
    plain = await seen(server, path, needed)

    match treatment(path, field):
        case "honoured":
            assert await seen(server, path, {**needed, field: value}) != plain
        case "without effect":
            assert await seen(server, path, {**needed, field: value}) == plain
            assert await seen(server, path, {**needed, field: None}) == plain
        case how:
            reply = await server.post(path, {**BASE[path], **needed, field: value})
            assert (reply.status, reply.json()["error"]["param"]) == (400, field)
            assert f"`{field}`" in reply.json()["message"]
            if how is REFUSED:
                assert await seen(server, path, {**needed, field: None}) == plain


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, field in FIELDS if treatment(path, field) == REFUSED]
)
async def test_a_refused_field_is_accepted_with_a_neutral_value(server: Any, path: str, field: str) -> None:
    plain = await seen(server, path, {})

    for value in schema_of(ENDPOINTS[path].PASSIVE[field])["enum"]:
        assert await seen(server, path, {field: value}) == plain, value


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("field", ["n", "seed", "stop", "logprobs", "temperature", "top_k", "response_format"])
async def test_null_is_as_good_as_nothing(server: Any, path: str, field: str) -> None:
    assert await seen(server, path, {field: None}) == await seen(server, path, {})


# Constraints on the text: one meaning, however it is said.

FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "guided"),
    [
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        ({"response_format": FORMAT}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "g", "guided_decoding_backend": "outlines"}, {"grammar": "g", "backend": "outlines"}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, {"json": SCHEMA, "whitespace_pattern": " "}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"choice": ["a"]}),
        ({"structured_outputs": {"grammar": "g"}}, {"grammar": "g"}),
        ({"structured_outputs": {"structural_tag": "t"}}, {"structural_tag": "t"}),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, {"regex": "a+"}),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_answer_constraints_reach_the_engine(
    server: Any, path: str, fields: dict[str, Any], guided: dict[str, Any] | None
) -> None:
    asked, told = await seen(server, path, fields)

    assert asked["sampling_options"].get("guided_decoding") == guided
    # The text is content: no tool is called by it.
    assert told[0]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_a_lower_priority_number_is_more_urgent_at_the_engine(server: Any, path: str) -> None:
    urgent, _ = await seen(server, path, {"priority": -2})
    patient, _ = await seen(server, path, {"priority": 3})

    assert urgent["routing"]["priority"] > 0 > patient["routing"]["priority"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"nope": 1}}, "structured_outputs.nope"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"stream_options": {"continuous_usage_stats": True}, "stream": True}, "stream_options.continuous_usage_stats"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_invalid_values_are_refused_with_their_field(
    server: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = await server.post(path, {**BASE[path], **fields})

    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_two_conflicting_constraints_are_both_named(server: Any) -> None:
    reply = await server.chat(response_format=FORMAT, guided_regex="a")

    assert "`response_format`" in reply.json()["message"]
    assert "`guided_regex`" in reply.json()["message"]


async def test_an_answer_is_not_free_to_call_a_tool_and_bound_to_a_form(server: Any) -> None:
    auto = await server.chat(tools=TOOLS, guided_regex="a")
    regex = await server.chat(tools=TOOLS, tool_choice="required", guided_regex="a+")
    forced, _ = await seen(server, CHAT, {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT})
    never, _ = await seen(server, CHAT, {"tools": TOOLS, "tool_choice": "none", "response_format": FORMAT})

    assert (auto.status, auto.json()["error"]["param"]) == (400, "guided_regex")
    assert (regex.status, regex.json()["error"]["param"]) == (400, "guided_regex")
    # An answer that must be calls has no text to which a form could apply.
    assert forced["sampling_options"]["guided_decoding"]["json"]["type"] == "array"
    assert never["sampling_options"]["guided_decoding"]["json"] == SCHEMA


# The last message goes on.


async def test_a_message_of_the_assistant_can_be_continued(server: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "I s"}]}]

    asked, _ = await seen(server, CHAT, {"messages": messages, "continue_final_message": True})

    assert bytes(asked["token_ids"]) == b"user: Hi\nassistant: I s"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [{"role": "assistant", "content": ""}]},
        {"messages": [{"role": "assistant", "content": "x"}], "add_generation_prompt": True},
    ],
)
async def test_only_a_message_of_the_assistant_can_be_continued(server: Any, fields: dict[str, Any]) -> None:
    reply = await server.chat(continue_final_message=True, **fields)

    assert (reply.status, reply.json()["error"]["param"]) == (400, "continue_final_message")


async def test_a_template_that_hides_the_last_message_cannot_continue_it(cold_server: Any) -> None:
    model = cold_server.add_model("m", {"chat_template.jinja": b"fixed"})
    model.script = answering
    await cold_server.start()

    reply = await cold_server.chat(messages=[{"role": "assistant", "content": "x"}], continue_final_message=True)

    assert (reply.status, reply.json()["error"]["param"]) == (400, "continue_final_message")


# The best of several.


def saying(texts: dict[int, tuple[bytes, float]]) -> Any:
    """Return answers by the seed: a text, and how likely each of its tokens is."""

    def script(call: Any) -> None:
        text, logprob = texts[call.request.sampling_options.seed]
        call.put(LLMEngineOutput(list(text), log_probs=[logprob] * len(text)))
        call.finish()

    return script


async def test_best_of_returns_the_likeliest_answers_first(server: Any) -> None:
    model = server.directory.models["m"]
    model.script = saying({7: (b"unlikely", -3.0), 8: (b"best", -0.1), 9: (b"good", -1.0)})

    reply = await server.complete(prompt=["a", "b"], seed=7, best_of=3, n=2)

    choices = reply.json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [
        (0, "best"),
        (1, "good"),
        (2, "best"),
        (3, "good"),
    ]
    assert all(choice["logprobs"] is None for choice in choices)
    # What was made and not given was made all the same.
    assert reply.json()["usage"]["completion_tokens"] == 2 * len("unlikelybestgood")
    assert model.count == 6


async def test_best_of_needs_an_engine_with_log_probabilities(server: Any) -> None:
    server.directory.models["m"].script = lambda call: call.finish(text="x")

    reply = await server.complete(best_of=2)

    assert reply.status == 501
    assert "best_of" in reply.json()["message"]


async def test_best_of_cannot_be_streamed_unless_it_chooses_nothing(server: Any) -> None:
    chosen = await server.complete(best_of=2, stream=True)
    all_of_them = await server.complete(best_of=2, n=2, stream=True)

    assert (chosen.status, chosen.json()["error"]["param"]) == (400, "best_of")
    assert all_of_them.status == 200
    assert (await server.complete(best_of=20, prompt=["a"] * 7)).status == 400


# Usage in every chunk.


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
async def test_continuous_usage_is_in_every_chunk(server: Any, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    _, told = await seen(server, path, {"stream": True, "stream_options": options, "n": 2})

    counts = [chunk["usage"]["completion_tokens"] for chunk in told]
    assert counts == sorted(counts)
    assert (counts[-1], told[-1]["choices"]) == (12, [])
    assert {chunk["usage"]["prompt_tokens"] for chunk in told} == {told[-1]["usage"]["prompt_tokens"]}
    _, without = await seen(server, path, {"stream": True, "n": 2})
    assert not any("usage" in chunk for chunk in without)
