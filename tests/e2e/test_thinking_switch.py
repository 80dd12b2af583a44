"""Hybrid models think or do not, as the client says in the words of each API: the answer and its usage are true to it.

The worker recognizes the formats by the templates of the models, and the frontend reads them in another process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import anthropic
import openai
import pytest

from tests.agents.formats import FORMATS
from tests.agents.models import config

THOUGHT = 'First "read" é,\nthen <edit> …'
ANSWER = "Oslo: **4°** & rain,\n\n  <b>soon</b>.\n"
#: What stands between the thought and the answer of both models.
CLOSING = "</think>\n\n"
#: What only the prompt of a model that is not to think has, or of one that is.
OFF_SIGN, ON_SIGN = "</think>", "<think>"

_QWEN = FORMATS["hermes"]
#: In the manner of Qwen 3: it thinks unless the prompt has an empty thought.
QWEN = replace(
    _QWEN,
    template=_QWEN.template
    + "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)
#: DeepSeek V3.1 thinks only if the prompt has begun the thought.
DEEPSEEK = FORMATS["deepseek_v31"]
#: What each writes of a thought, after its prompt.
MARKED = {"qwen": f"<think>\n{THOUGHT}\n{CLOSING}", "deepseek": f"{THOUGHT}{CLOSING}"}
MODELS = [
    ("qwen", QWEN, [{"match": OFF_SIGN, "text": ANSWER}, {"text": MARKED["qwen"] + ANSWER}]),
    ("deepseek", DEEPSEEK, [{"match": ON_SIGN, "text": MARKED["deepseek"] + ANSWER}, {"text": ANSWER}]),
]


@dataclass(frozen=True)
class Answer:
    """What a client got, in whatever API."""

    thought: str
    text: str
    #: Tokens of the whole answer, and those of them that are reasoning.
    tokens: int
    reasoning_tokens: int


@dataclass(frozen=True)
class Clients:
    """The official clients of one server."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


Fields: TypeAlias = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def clients(serve_for_module: Any, folder: Path) -> Iterator[Clients]:
    """Yield a frontend and a worker for each model, in processes of their own."""
    settings = json.loads(config(MODELS, folder)) | {
        "transport": {"use": "tcp"},
        "discovery": {"use": "file", "path": str(folder / "discovery")},
        "client": {"drain_grace": 0},
    }
    server = serve_for_module(json.dumps(settings))
    how: Any = {"api_key": "none", "max_retries": 0, "timeout": 90}
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", **how) as ours,
        anthropic.Anthropic(base_url=server.url, **how) as claude,
    ):
        yield Clients(ours, claude)


@pytest.fixture(params=[False, True], ids=["body", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def chat(clients: Clients, model: str, fields: Fields, *, stream: bool) -> Answer:
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
    if not stream:
        whole = clients.openai.chat.completions.create(**asked)
        messages, usage = [whole.choices[0].message.to_dict()], whole.usage
    else:
        parts = list(
            clients.openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
        messages, usage = [part.choices[0].delta.to_dict() for part in parts if part.choices], parts[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    return Answer(
        "".join(str(message.get("reasoning_content") or "") for message in messages),
        "".join(str(message.get("content") or "") for message in messages),
        usage.completion_tokens,
        usage.completion_tokens_details.reasoning_tokens or 0,
    )


def responses(clients: Clients, model: str, fields: Fields, *, stream: bool) -> Answer:
    asked: Any = {"model": model, "input": "Hi", **fields}
    if not stream:
        response = clients.openai.responses.create(**asked)
    else:
        parts = list(clients.openai.responses.create(**asked, stream=True))
        response = parts[-1].response
        told = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
        assert told == response.output_text
    assert response.usage is not None
    thoughts = [
        part["text"] for item in response.output if item.type == "reasoning" for part in item.to_dict()["content"]
    ]
    return Answer(
        "".join(thoughts),
        response.output_text,
        response.usage.output_tokens,
        response.usage.output_tokens_details.reasoning_tokens,
    )


def messages(clients: Clients, model: str, fields: Fields, *, stream: bool) -> Answer:
    asked: Any = {"model": model, "max_tokens": 4096, "messages": [{"role": "user", "content": "Hi"}], **fields}
    if not stream:
        message: Any = clients.anthropic.messages.create(**asked)
    else:
        with clients.anthropic.messages.stream(**asked) as events:
            message = events.get_final_message()
    return Answer(
        "".join(block.thinking for block in message.content if block.type == "thinking"),
        "".join(block.text for block in message.content if block.type == "text"),
        message.usage.output_tokens,
        message.usage.to_dict()["output_tokens_details"]["thinking_tokens"],
    )


def tokens_of(folder: Path, model: str, text: str, marked: str) -> tuple[int, int]:
    """Return how many tokens an answer has, and how many of them have some of the marked text at its beginning."""
    from tokenizers import Tokenizer

    offsets = Tokenizer.from_file(str(folder / model / "tokenizer.json")).encode(text).offsets
    return len(offsets), sum(start < len(marked) for start, _ in offsets)


def template(**values: bool) -> Fields:
    return {"extra_body": {"chat_template_kwargs": values}}


ON: list[Any] = [
    pytest.param(chat, {"reasoning_effort": "high"}, id="chat effort"),
    pytest.param(chat, template(enable_thinking=True), id="chat enable_thinking"),
    pytest.param(responses, {"reasoning": {"effort": "medium"}}, id="responses effort"),
    pytest.param(messages, {"thinking": {"type": "enabled", "budget_tokens": 2048}}, id="messages thinking"),
]
OFF: list[Any] = [
    pytest.param(chat, {"reasoning_effort": "none"}, id="chat effort"),
    pytest.param(chat, template(enable_thinking=False), id="chat enable_thinking"),
    pytest.param(responses, {"reasoning": {"effort": "none"}}, id="responses effort"),
    pytest.param(messages, {"thinking": {"type": "disabled"}}, id="messages thinking"),
]


LEFT = [pytest.param(ask, {}, id=f"{ask.__name__} left") for ask in (chat, responses, messages)]
CASES = [
    pytest.param(model, thinks, *asked.values, id=f"{model} {'thinks' if thinks else 'does not'}: {asked.id}")
    for model, by_default in (("qwen", True), ("deepseek", False))
    for thinks, cases in ((True, ON), (False, OFF), (by_default, LEFT))
    for asked in cases
]


@pytest.mark.parametrize(("model", "thinks", "ask", "fields"), CASES)
def test_a_thought_comes_apart_if_there_is_one_and_its_tokens_are_counted(
    clients: Clients, folder: Path, model: str, thinks: bool, ask: Any, fields: Fields, stream: bool
) -> None:
    answer = ask(clients, model, fields, stream=stream)

    marked = MARKED[model] if thinks else ""
    tokens = tokens_of(folder, model, marked + ANSWER, marked)
    assert answer == Answer(THOUGHT if thinks else "", ANSWER, *tokens)
    assert (answer.reasoning_tokens > 0) == thinks
