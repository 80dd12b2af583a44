"""A real model served with one line, in processes of its own: the same tokens as from the library alone.

Run by `make test-transformers`, in an environment that has the library.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder, save_llama
from dynamo_text import load_tokenizer

from tests.e2e.asking import read_to_end

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None,
        reason="torch and transformers are not installed; `make test-transformers` has them",
    ),
]

PROMPTS = [[10 + (7 * place + 11 * which) % 500 for place in range(30)] for which in range(6)]
SETTINGS = ("kv_cache_tokens=4096", "threads=1", "dtype=float32")
PROCESSES = ("--request-plane", "tcp", "--discovery-backend", "file")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Llama with random weights."""
    folder = make_tokenizer_folder(tmp_path_factory.mktemp("model") / "tiny-llama", vocab_size=600)
    save_llama(folder, vocab_size=600)
    return folder


@pytest.fixture(scope="module", params=[(), PROCESSES], ids=["one process", "several processes"])
def server(request: pytest.FixtureRequest, serve_for_module: Any, folder: Path) -> Any:
    sets = [word for setting in SETTINGS for word in ("--set", f"workers.transformers.engine.{setting}")]
    server = serve_for_module(None, "--engine", "transformers", "--model", str(folder), *sets, *request.param)
    assert server.until(lambda: server.request("GET", "/ready")[0] == 200, 60), server.log
    return server


def alone(folder: Path, count: int) -> list[list[int]]:
    """Return what the library says without us: the most likely tokens after each prompt. On a GPU if there is one."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).to(device)
    with torch.no_grad():
        made = [
            model.generate(
                torch.tensor([prompt], device=device),
                do_sample=False,
                max_new_tokens=count,
                eos_token_id=-1,
                pad_token_id=0,
            )
            for prompt in PROMPTS
        ]
    return [whole[0].tolist()[len(prompt) :] for whole, prompt in zip(made, PROMPTS, strict=True)]


def ids_by_bytes(folder: Path) -> dict[bytes, int]:
    """Return the id of each token by its bytes, which no two tokens of this vocabulary share."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    tokenizer = load_tokenizer("hf", files)
    by_bytes = {tokenizer.token_bytes(token): token for token in range(600)}
    assert len(by_bytes) == 600
    return by_bytes


def test_the_stack_generates_the_tokens_of_the_library(server: Any, folder: Path) -> None:
    ids = ids_by_bytes(folder)
    expected = alone(folder, 24)
    client_streams = [
        server.raw(
            "POST",
            "/v1/completions",
            {
                "model": "tiny-llama",
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": 0,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "logprobs": 0,
                "return_tokens_as_token_ids": False,
            },
        )
        for prompt in PROMPTS
    ]
    answers = [json.loads(read_to_end(connection).split(b"\r\n\r\n", 1)[1]) for connection in client_streams]

    def token(text: str) -> int:
        data = text.encode()
        if text.startswith("bytes:"):
            data = bytes.fromhex(text.removeprefix("bytes:").replace("\\x", ""))
        return ids[data]

    seen = [[token(text) for text in answer["choices"][0]["logprobs"]["tokens"]] for answer in answers]
    assert seen == expected
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [24] * len(PROMPTS)


def test_an_option_that_the_engine_does_not_have_is_refused_by_name(server: Any) -> None:
    asked = {"model": "tiny-llama", "prompt": "hi", "response_format": {"type": "json_object"}}

    status, _, body = server.request("POST", "/v1/completions", asked)

    error = json.loads(body)["error"]
    assert (status, error["param"]) == (400, "response_format")
    assert "it cannot constrain its output" in error["message"]


def test_a_chat_with_the_models_own_template_is_answered(server: Any) -> None:
    asked = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "seed": 3}

    answers = [json.loads(server.request("POST", "/v1/chat/completions", asked)[2]) for _ in range(2)]

    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert answers[0]["usage"]["completion_tokens"] <= 8
