"""A card's list of files is looked at before anything is fetched."""

from __future__ import annotations

import pytest
from dynamo_core.client.model_files import MAX_FILE, MAX_FILES, check_listing
from dynamo_core.errors import Unavailable
from dynamo_core.protocol.records import ModelCard, ModelFile


def card(*files: ModelFile) -> ModelCard:
    return ModelCard(name="m", instance_id=1, files=list(files))


@pytest.mark.parametrize("name", ["", ".hidden", "../secret", "a/b", "a\\b", "nul\0", ".."])
def test_a_name_that_is_not_a_bare_file_name_is_refused(name: str) -> None:
    with pytest.raises(Unavailable, match="bad name"):
        check_listing(card(ModelFile(name, 1, "")))


@pytest.mark.parametrize("size", [-1, MAX_FILE + 1])
def test_an_implausible_size_is_refused(size: int) -> None:
    with pytest.raises(Unavailable, match=r"tokenizer\.json"):
        check_listing(card(ModelFile("tokenizer.json", size, "")))


def test_too_many_files_and_too_many_bytes_are_refused() -> None:
    with pytest.raises(Unavailable, match="65 files"):
        check_listing(card(*(ModelFile(f"f{number}", 1, "") for number in range(MAX_FILES + 1))))
    with pytest.raises(Unavailable, match="bytes of files"):
        check_listing(card(*(ModelFile(f"f{number}", MAX_FILE, "") for number in range(3))))


def test_an_honest_listing_passes() -> None:
    check_listing(card(ModelFile("tokenizer.json", 1000, "ab"), ModelFile("chat_template.jinja", 10, "cd")))
