from __future__ import annotations

from pathlib import Path

import pytest
from dynamo_core import load_folder
from dynamo_core.contracts import model_folder as folder_module
from dynamo_core.errors import ConfigError
from dynamo_text.byte_tokenizer import ByteTokenizer
from dynamo_text.hf_tokenizer import HFTokenizer
from dynamo_text.load import load_tokenizer


def test_only_known_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"hi")
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    files = load_folder(tmp_path)

    assert files == {"tokenizer.json": b"{}", "chat_template.jinja": b"hi"}


def test_the_template_for_tools_is_read_from_its_subfolder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_bytes(b"tools")
    (more / "rag.jinja").write_bytes(b"documents")

    assert load_folder(tmp_path) == {"tokenizer.json": b"{}", "tool_use.jinja": b"tools"}


def test_a_missing_folder_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model folder .*nowhere does not exist; set model\.path"):
        load_folder(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="is a file, not a folder"):
        load_folder(str(tmp_path / "file"))


def test_a_folder_without_a_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")

    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; export"):
        load_folder(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()

    with pytest.raises(ConfigError, match=r"cannot read .*tokenizer\.json: "):
        load_folder(tmp_path)


def test_a_file_over_the_limit_is_refused_and_one_at_the_limit_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "MAX_FILE_SIZE", 4)
    (tmp_path / "tokenizer.json").write_bytes(b"1234")

    assert load_folder(tmp_path) == {"tokenizer.json": b"1234"}

    (tmp_path / "tokenizer.json").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: it has more than"):
        load_folder(tmp_path)


def test_the_kind_chooses_the_tokenizer(tiny_files: dict[str, bytes]) -> None:
    assert isinstance(load_tokenizer("bytes", {}), ByteTokenizer)
    assert isinstance(load_tokenizer("hf", tiny_files), HFTokenizer)


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'tiktoken' is not known; known kinds: bytes, hf"):
        load_tokenizer("tiktoken", {})
