"""docs/reference/api.md says what the frontend does with every field."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.pages.api import fields, is_passive

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
#: The sections that list the fields of a schema.
SECTIONS = {
    "ChatRequest": "Honoured",
    "CompletionRequest": "Honoured",
    "EmbeddingRequest": "Honoured",
    "PairsRequest": "Scores and reranking",
    "RerankRequest": "Scores and reranking",
    "NvExt": "nvext",
}


def section(heading: str) -> str:
    return re.split(r"^##+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("schema", SECTIONS)
def test_every_field_that_has_an_effect_is_listed(schema: str) -> None:
    honoured = {name for name, field in fields(schema).items() if not is_passive(field)}

    # `user` is checked like a field that is honoured, but nothing acts on it.
    assert {name for name in honoured if f"`{name}`" not in section(SECTIONS[schema])} <= {"user", "model"}


def test_no_field_is_listed_as_honoured_that_is_not_there() -> None:
    known = {name for schema, heading in SECTIONS.items() if heading == "Honoured" for name in fields(schema)}

    in_prose = section("Honoured").split("Beyond it:")[0].split("The chat template gets")[0]
    in_table = "".join(re.findall(r"^\| (.*?) \|", section("Honoured"), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", in_prose + in_table)) <= known | {"include_usage"}
