"""A card's list of files is looked at before anything is fetched."""

from __future__ import annotations

import pytest
from dynamo_core.errors import Unavailable
from dynamo_core.protocol.records import ModelCard, ModelFile
from dynamo_runtime.dispatch.models.files import MAX_FILE, MAX_FILES, MAX_NAME, check_listing

SHA256 = "ab" * 32


def card(*files: ModelFile) -> ModelCard:
    return ModelCard(name="m", instance_id=1, files=list(files))


@pytest.mark.parametrize(
    "name", ["", ".hidden", "../secret", "a/b", "a\\b", "nul\0", "..", "/etc/passwd", "x" * (MAX_NAME + 1)]
)
def test_a_name_that_is_not_a_bare_file_name_is_refused(name: str) -> None:
    with pytest.raises(Unavailable, match="bad name"):
        check_listing(card(ModelFile(name, 1, SHA256)))


@pytest.mark.parametrize("size", [-1, MAX_FILE + 1, 2**70])
def test_an_implausible_size_is_refused(size: int) -> None:
    with pytest.raises(Unavailable, match=r"tokenizer\.json"):
        check_listing(card(ModelFile("tokenizer.json", size, SHA256)))


@pytest.mark.parametrize("checksum", ["", "ab", "../" + "a" * 61, "AB" * 32, "ab" * 33, SHA256 + "\n"])
def test_a_checksum_that_could_not_be_one_is_refused(checksum: str) -> None:
    with pytest.raises(Unavailable, match="no SHA-256"):
        check_listing(card(ModelFile("tokenizer.json", 1, checksum)))


def test_too_many_files_and_too_many_bytes_are_refused() -> None:
    with pytest.raises(Unavailable, match="65 files"):
        check_listing(card(*(ModelFile(f"f{number}", 1, SHA256) for number in range(MAX_FILES + 1))))
    with pytest.raises(Unavailable, match="bytes of files"):
        check_listing(card(*(ModelFile(f"f{number}", MAX_FILE, SHA256) for number in range(3))))


def test_a_file_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(Unavailable, match="twice"):
        check_listing(card(ModelFile("a", 1, SHA256), ModelFile("a", 2, SHA256)))


def test_an_honest_listing_passes() -> None:
    check_listing(card(ModelFile("tokenizer.json", 1000, SHA256), ModelFile("chat_template.jinja", 10, "cd" * 32)))
