"""docs/reference/ollama.md says what Ollama's API does with every field, and which routes it has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dynamo_generation.requests import fields
from dynamo_plugin_frontend_ollama.requests import (
    CHAT_PASSIVE,
    EMBED_PASSIVE,
    GENERATE_PASSIVE,
    OPTIONS_PASSIVE,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "ollama.md").read_text()
READ = (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
TABLES = (CHAT_PASSIVE, EMBED_PASSIVE, GENERATE_PASSIVE, OPTIONS_PASSIVE)
#: What is said in other words.
OTHERWISE = {"model", "tool_call_id"}


def test_every_field_is_in_the_tables_and_no_other() -> None:
    known = {name for kind in READ for name in kind.__struct_fields__} | {name for table in TABLES for name in table}
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", PAGE.split("## Requests")[1], re.MULTILINE)
    first = {name for cell, _ in rows for name in re.findall(r"`(\w+)`", cell)}
    all_of_them = {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)}

    assert known - OTHERWISE <= all_of_them
    assert first <= known


@pytest.mark.parametrize("name", OPTIONS_PASSIVE)
def test_the_page_lists_options_without_effect(name: str) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line.split(" | ")[0]]

    assert ("without effect" in row) is fields.has_no_effect(OPTIONS_PASSIVE[name])
