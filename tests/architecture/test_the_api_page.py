"""docs/reference/api.md says what the frontend does with every field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dynamo_generation.requests import fields
from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.completions import CompletionRequest
from dynamo_generation.requests.nvext import NvExt
from dynamo_plugin_frontend_openai.embeddings import EmbeddingRequest
from dynamo_plugin_frontend_openai.scoring import PASSIVE_FIELDS, PairsRequest, RerankRequest

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
REQUESTS = (ChatRequest, CompletionRequest, EmbeddingRequest)
PASSIVE = {**fields.CHAT, **fields.COMPLETIONS}

#: What the column of values says of fields that take more than a few.
KINDS: dict[str, tuple[type, ...]] = {"any": (object,), "a text": (str,), "an object of texts": (dict,)}
#: Values that clients send in one of those fields or another.
TRIED: list[Any] = [
    *(None, True, False, 0, 1, 2, "", "x", "none", "auto", "default", "flex", [], ["text"], ["audio"], {}),
    *({"type": "text"}, {"type": "json_object"}),
]


def section(heading: str) -> str:
    return re.split(r"^##+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def listed_without_effect() -> dict[str, str]:
    """The column of values by field."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section("Accepted without effect"), re.MULTILINE)
    return dict(rows)


def test_the_fields_without_effect_are_those_of_the_table_in_the_code() -> None:
    # `user` is checked like a field that is honoured, but nothing acts on it.
    assert set(listed_without_effect()) == set(PASSIVE) | {"user"}


@pytest.mark.parametrize("name", PASSIVE)
def test_the_values_that_are_accepted_are_those_listed(name: str) -> None:
    column = listed_without_effect()[name]
    listed = [json.loads(value) for value in re.findall(r"`(.*?)`", column)]

    for value in TRIED:
        expected = value is None or any(value == one and type(value) is type(one) for one in listed)
        expected |= isinstance(value, KINDS.get(column, ()))
        assert PASSIVE[name](value) is expected, value


@pytest.mark.parametrize(
    "name",
    sorted({*PairsRequest.__struct_fields__, *RerankRequest.__struct_fields__, *PASSIVE_FIELDS} - {"model"}),
)
def test_every_field_of_scores_is_listed_in_their_section(name: str) -> None:
    assert f"`{name}`" in section("Scores and reranking")


@pytest.mark.parametrize("name", sorted({name for cls in REQUESTS for name in cls.__struct_fields__}))
def test_every_other_field_is_listed_as_honoured_or_without_effect(name: str) -> None:
    assert f"`{name}`" in section("Honoured") or name in listed_without_effect()


@pytest.mark.parametrize("name", NvExt.__struct_fields__)
def test_every_field_of_nvext_is_listed(name: str) -> None:
    assert f"`{name}`" in section("nvext")


def test_no_field_is_listed_as_honoured_that_is_not_there() -> None:
    known = {name for cls in REQUESTS for name in cls.__struct_fields__} | {"include_usage"}

    in_prose = section("Honoured").split("Beyond it:")[0]
    in_table = "".join(re.findall(r"^\| (.*?) \|", section("Honoured"), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", in_prose + in_table)) <= known
