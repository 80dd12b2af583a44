"""A tiny model with random weights, made on the spot; tests that need it are skipped where the library is not."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder, save_llama

HAS_LIBRARY = find_spec("torch") is not None and find_spec("transformers") is not None


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Llama of 0.3 million parameters and a tokenizer. The same weights each time."""
    if not HAS_LIBRARY:
        pytest.skip("torch and transformers are not installed; `make test-transformers` has them")
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("tiny"), vocab_size=600)
    names = json.loads((folder / "generation_config.json").read_text())
    save_llama(folder, vocab_size=600, bos_token_id=names["bos_token_id"], eos_token_id=names["eos_token_id"])
    (folder / "generation_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="session")
def library_model(model_folder: Path) -> Any:
    """Return the same model, loaded by the library and asked without us.

    On a GPU if there is one, as the engine does.
    """
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")
