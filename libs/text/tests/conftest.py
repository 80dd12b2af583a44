from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import load_folder
from dynamo_testing.tiny_model import make_tokenizer_folder
from dynamo_text.hf_tokenizer import HFTokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_files(tiny_folder: Path) -> dict[str, bytes]:
    return load_folder(tiny_folder)


@pytest.fixture(scope="session")
def tiny(tiny_files: dict[str, bytes]) -> HFTokenizer:
    return HFTokenizer(tiny_files)


@pytest.fixture(scope="session")
def make_word_tokenizer() -> Callable[[list[str], dict[str, Any] | None], HFTokenizer]:
    """Make a tokenizer whose vocabulary is the given strings, with any decoder."""

    def make(vocabulary: list[str], decoder: dict[str, Any] | None) -> HFTokenizer:
        content = {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": index,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for index, token in enumerate(vocabulary)
                if token in {"<s>", "</s>"}
            ],
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": decoder,
            "model": {
                "type": "WordLevel",
                "vocab": {token: index for index, token in enumerate(vocabulary)},
                "unk_token": vocabulary[0],
            },
        }
        return HFTokenizer({"tokenizer.json": json.dumps(content).encode()})

    return make
