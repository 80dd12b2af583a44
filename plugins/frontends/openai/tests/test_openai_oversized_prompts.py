"""A prompt that cannot fit is refused before its template and its tokenizer run, whatever API and field it came in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from dynamo_core import EMBED, RERANK, SCORE
from dynamo_text import TokenCacheStore, load_tokenizer

from libs.text.tests.test_bounded_encoding import kinds, of_kind

CONTEXT = 2000
MB = 1 << 20
LONG = "a" * (2 * MB)
TEMPLATE = b"{% for m in messages %}{{ m.content }}{% endfor %}{{ tools|tojson if tools else '' }}"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@dataclass
class Costs:
    """What templates and the tokenizer were given, in characters."""

    tokenizer: list[str] = field(default_factory=list)
    templates: int = 0


@pytest.fixture
async def costs(cold_server: Any, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Return a server with a byte-level tokenizer, and the costs of what it is asked."""
    seen = Costs()
    library, _ = of_kind("byte level")
    tokenizer: Any = load_tokenizer("hf", {"tokenizer.json": library.to_str().encode()}, TokenCacheStore(MB))
    encode = tokenizer._encode_many

    def watched(texts: Sequence[str], add_special_tokens: bool) -> Any:
        seen.tokenizer += texts
        return encode(texts, add_special_tokens)

    tokenizer._pieces._encode = watched
    cold_server.body_limit = 8 * MB
    model = cold_server.add_model(
        files={"chat_template.jinja": TEMPLATE}, context_length=CONTEXT, capabilities=[EMBED, RERANK, SCORE]
    )
    model.tokenizer = tokenizer
    await cold_server.start()
    store = cold_server.generation.chats.templates
    render = store._processes.render

    async def counted(*args: Any) -> Any:
        seen.templates += 1
        return await render(*args)

    monkeypatch.setattr(store._processes, "render", counted)
    return seen


def said(text: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, **more}]


TOOLS = [{"type": "function", "function": {"name": "f", "description": LONG}}]
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": LONG[: MB // 4]}] * 4}]
TURNS = [{"role": role, "content": "a" * 9000} for role in ("user", "assistant") * 100]

#: A path, a body and the field that is to blame.
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a message": (CHAT, {"messages": said(LONG)}, "messages"),
    "a message in parts": (CHAT, {"messages": IN_PARTS}, "messages"),
    "many turns": (CHAT, {"messages": TURNS}, "messages"),
    "a message without a template": (CHAT, {"messages": said(LONG), "nvext": {"use_raw_prompt": True}}, "messages"),
    "tools": (CHAT, {"messages": said("Hi"), "tools": TOOLS}, "messages"),
    "a prompt": ("/v1/completions", {"prompt": LONG}, "prompt"),
    "prompts": ("/v1/completions", {"prompt": ["Hi", LONG]}, "prompt"),
    "an input": ("/v1/embeddings", {"input": LONG}, "input"),
    "inputs": ("/v1/embeddings", {"input": ["Hi", LONG]}, "input"),
    "a text to score": ("/v1/score", {"text_1": "q", "text_2": LONG}, "text_2"),
    "a query to score": ("/v1/score", {"queries": LONG, "items": "d"}, "queries"),
    "a document": ("/v1/rerank", {"query": "q", "documents": ["d", {"text": LONG}]}, "documents"),
    "an Anthropic message": (MESSAGES, {"max_tokens": 5, "messages": said(LONG)}, "messages"),
    "an Anthropic system": (MESSAGES, {"max_tokens": 5, "messages": said("Hi"), "system": LONG}, "messages"),
    "an input of a response": (RESPONSES, {"input": LONG}, "input"),
    "instructions of a response": (RESPONSES, {"input": "Hi", "instructions": LONG}, "input"),
    "a prompt to explain": ("/route/explain", {"prompt": LONG}, "prompt"),
    "a conversation to explain": ("/route/explain", {"messages": said(LONG)}, "messages"),
}


@pytest.mark.parametrize("name", BODIES)
async def test_oversized_prompts_are_refused_before_templating_and_tokenizing(
    name: str, costs: Costs, cold_server: Any
) -> None:
    path, body, blamed = BODIES[name]

    reply = await cold_server.post(path, {"model": "m", **body})

    assert reply.status == 400
    error = reply.json()["error"]
    assert error.get("param", blamed) == blamed
    assert blamed in error.get("param", error["message"])
    assert "at least" in error["message"]
    assert f"the context of the model is {CONTEXT} tokens" in error["message"]
    assert (max(map(len, costs.tokenizer), default=0) < 100, costs.templates) == (True, 0)


COUNTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text": ("/tokenize", {"prompt": "%s"}, "count"),
    "a conversation": ("/tokenize", {"messages": said("%s")}, "count"),
    "Anthropic messages": (f"{MESSAGES}/count_tokens", {"messages": said("%s")}, "input_tokens"),
    "an input of a response": (f"{RESPONSES}/input_tokens", {"input": "%s"}, "input_tokens"),
}


def filled(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {name: filled(item, text) for name, item in value.items()}
    if isinstance(value, list):
        return [filled(item, text) for item in value]
    return text if value == "%s" else value


@pytest.mark.parametrize("name", COUNTED)
async def test_token_counts_reach_beyond_the_context_up_to_a_bound(
    name: str, costs: Costs, cold_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_generation.prompts.prompt_budget.MAX_TOKENS", 10 * CONTEXT)
    path, body, key = COUNTED[name]

    beyond = await cold_server.post(path, {"model": "m", **filled(body, "the one " * 4 * CONTEXT)})
    over = await cold_server.post(path, {"model": "m", **filled(body, LONG)})

    assert beyond.json()[key] > 4 * CONTEXT
    assert over.status == 400
    assert f"at most {10 * CONTEXT} are allowed" in over.json()["error"]["message"]
    assert LONG not in costs.tokenizer


@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
async def test_prompts_that_are_too_many_tokens_together_are_refused(
    path: str, name: str, costs: Costs, cold_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_generation.prompts.prompt_budget.MAX_TOKENS", 3 * CONTEXT)
    one = "the one " * (CONTEXT // 4)
    ids = [1] * (CONTEXT - 1)
    cold_server.directory.models["m"].script = lambda call: call.finish(text="x")

    texts = [await cold_server.post(path, {"model": "m", name: [one] * count}) for count in (3, 30)]
    tokens = [await cold_server.post(path, {"model": "m", name: [ids] * count}) for count in (3, 4)]

    for few, many in (texts, tokens):
        assert few.status == 200, few.body
        assert (many.status, many.json()["error"]["param"]) == (400, name)
        assert f"together: at most {3 * CONTEXT} are allowed" in many.json()["error"]["message"]


@kinds
async def test_a_prompt_of_one_token_less_than_the_context_is_answered(kind: str, cold_server: Any) -> None:
    library, tokenizer = of_kind(kind)
    text = "the one and the other\n" * 800 + "  12 " * 300 + " " * 1280
    size = len(library.encode(text).ids)
    for name, context in (("fits", size + 1), ("full", size)):
        model = cold_server.add_model(name, context_length=context, files={"chat_template.jinja": TEMPLATE})
        model.tokenizer = tokenizer
        model.script = lambda call: call.finish(text="x")
    cold_server.body_limit = 8 * MB
    await cold_server.start()

    for path, body in (("/v1/completions", {"prompt": text}), (CHAT, {"messages": said(text)})):
        # A template writes the special tokens itself.
        special = len(library.encode("").ids) if path == CHAT else 0
        fits = await cold_server.post(path, {"model": "fits", **body})
        full = await cold_server.post(path, {"model": "full", **body})
        assert fits.status == 200, fits.body
        assert fits.json()["usage"]["prompt_tokens"] == size - special
        if not special:
            assert full.status == 400
            assert f"the context of the model is {size} tokens" in full.json()["error"]["message"]


@pytest.mark.parametrize("limits", [{"truncate_prompt_tokens": 50}, {"max_tokens_per_doc": 50}])
async def test_a_document_that_is_to_be_cut_is_cut_before_it_is_tokenized(
    limits: dict[str, int], costs: Costs, cold_server: Any
) -> None:
    library, _ = of_kind("byte level")
    document = "the one and the other " * 100_000

    reply = await cold_server.post("/v1/rerank", {"model": "m", "query": "q", "documents": [document], **limits})

    assert reply.status == 200, reply.body
    (given,) = cold_server.directory.models["m"].scored[-1].documents
    assert len(given) < 2000
    assert library.encode(given).ids[:51] == library.encode(document[:2000]).ids[:51]
    assert sum(map(len, costs.tokenizer)) < 100_000


async def test_an_engine_that_takes_text_gets_all_of_it_and_its_load_is_estimated(
    costs: Costs, cold_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_generation.prompts.prompt_budget.MAX_TOKENS", 10 * CONTEXT)
    model = cold_server.add_model("t", context_length=CONTEXT, model_input="text")
    model.tokenizer = cold_server.directory.models["m"].tokenizer
    asked: list[Any] = []

    def answer(call: Any) -> None:
        asked.append(call.request)
        call.finish(text="x")

    model.script = answer
    text = "the one " * (MB // 4)

    reply = await cold_server.post("/v1/completions", {"model": "t", "prompt": text})

    assert reply.status == 200, reply.body
    assert asked[0].body["prompt"] == text
    assert CONTEXT < len(asked[0].token_ids) <= 10 * CONTEXT
