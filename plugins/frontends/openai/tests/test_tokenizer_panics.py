"""A tokenizer's library that panics costs one request: an orderly 500, and the process lives on."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from dynamo_core import FinishReason, LLMEngineOutput
from dynamo_text import load_tokenizer

_MODEL = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": ["a b"],
}
#: A second sequence in the template of one: the library takes it from a list that has one.
_PANICS_AT_ENCODE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"]}},
}
#: More characters to strip than a token has.
_PANICS_AT_DECODE = {"type": "Strip", "content": "a", "start": 0, "stop": 5}


def tokenizer(**parts: Any) -> Any:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    file = {"version": "1.0", "added_tokens": [], **empty, "model": _MODEL, **parts}
    return load_tokenizer("hf", {"tokenizer.json": json.dumps(file).encode()})


@pytest.mark.parametrize("prompt", ["ab", "ab" * 4000], ids=["in place", "in a thread"])
async def test_a_panic_while_encoding_is_a_500(server: Any, prompt: str, caplog: pytest.LogCaptureFixture) -> None:
    server.directory.models["m"].tokenizer = tokenizer(post_processor=_PANICS_AT_ENCODE)
    caplog.set_level(logging.ERROR)

    reply = await server.complete(prompt=prompt)

    assert reply.status == 500
    assert json.loads(reply.body)["error"]["type"] == "server_error"
    assert "panicked" not in reply.body.decode()
    assert "the library tokenizers panicked" in caplog.text
    assert (await server.record()).status == "error"
    assert (await server.get("/v1/models")).status == 200


async def asked(server: Any, stream: bool) -> tuple[Any, Any]:
    server.directory.models["m"].tokenizer = tokenizer(decoder=_PANICS_AT_DECODE)
    connection, call = await server.asked("/v1/completions", {"model": "m", "prompt": "ab", "stream": stream})
    return connection, call


async def test_a_panic_while_decoding_a_whole_answer_is_a_500(server: Any) -> None:
    connection, call = await asked(server, stream=False)
    call.put(LLMEngineOutput([0], FinishReason.STOP))
    call.complete()

    reply = await connection.reply()

    assert reply.status == 500
    assert json.loads(reply.body)["error"]["type"] == "server_error"
    assert (await server.record()).status == "error"
    assert call.released.is_set()


async def test_a_panic_in_the_middle_of_a_stream_is_its_last_event(server: Any) -> None:
    connection, call = await asked(server, stream=True)
    call.put(LLMEngineOutput([2]))
    head = await connection.head()
    call.put(LLMEngineOutput([0]))

    rest = await connection.ended()

    assert b" 200 " in head
    assert b'"text":"ab"' in rest
    assert b'data: {"error":{"message":"Internal server error"' in rest
    assert (await server.record()).status == "error"
    assert call.released.is_set()
