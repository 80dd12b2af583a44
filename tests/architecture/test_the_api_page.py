"""The pages on the APIs say what a frontend does with every field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.completions import CompletionRequest
from dynamo_generation.requests.nvext import NvExt
from dynamo_plugin_frontend_ollama import requests as ollama
from dynamo_plugin_frontend_openai.embedding_request import EmbeddingRequest
from dynamo_plugin_frontend_openai.scoring_request import PairsRequest, RerankRequest

from scripts.pages.api import PASSIVE

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "api.md").read_text()
REQUESTS = (ChatRequest, CompletionRequest, EmbeddingRequest)
OLLAMA = (
    ollama.OllamaChatRequest,
    ollama.OllamaEmbeddingsRequest,
    ollama.OllamaEmbedRequest,
    ollama.OllamaGenerateRequest,
    ollama.OllamaMessage,
    ollama.OllamaOptions,
)
WITHOUT_EFFECT = {name for table in PASSIVE.values() for name in table}


def section(heading: str) -> str:
    return re.split(r"^##+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        *((name, "Honoured") for name in sorted({name for cls in REQUESTS for name in cls.__struct_fields__})),
        *((name, "Scores and reranking") for cls in (PairsRequest, RerankRequest) for name in cls.__struct_fields__),
        *((name, "nvext") for name in NvExt.__struct_fields__),
    ],
)
def test_every_field_is_listed(name: str, heading: str) -> None:
    # `user` is checked like a field that is honoured, but nothing acts on it.
    assert f"`{name}`" in section(heading) or name in WITHOUT_EFFECT | {"user", "model"}


def test_no_field_is_listed_as_honoured_that_is_not_there() -> None:
    known = {name for cls in REQUESTS for name in cls.__struct_fields__} | {"include_usage"}

    in_prose = section("Honoured").split("Beyond it:")[0].split("The chat template gets")[0]
    in_table = "".join(re.findall(r"^\| (.*?) \|", section("Honoured"), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", in_prose + in_table)) <= known


def test_every_field_of_ollama_is_in_its_table_and_no_other() -> None:
    page = (REFERENCE / "ollama.md").read_text().split("## Requests")[1]
    known = {name for kind in OLLAMA for name in kind.__struct_fields__}
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    first = {name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    all_of_them = {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)}

    # The page says in other words what the two are for.
    assert known - WITHOUT_EFFECT - {"model", "tool_call_id"} <= all_of_them
    assert first <= known
