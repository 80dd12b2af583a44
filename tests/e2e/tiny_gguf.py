"""Writes a tiny Llama with random weights as a GGUF file, for servers that read nothing else.

A script for an interpreter that has `gguf` and `numpy`: ``python tiny_gguf.py TOKENIZER_FOLDER OUT.gguf``.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, CONTEXT = 2, 64, 128, 2, 1, 2048


def write(folder: Path, out: Path) -> None:
    """Take the tokenizer and the chat template from the folder."""
    gguf: Any = import_module("gguf")
    numpy: Any = import_module("numpy")
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **special}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    chance = numpy.random.default_rng(0)
    head = WIDTH // HEADS

    file = gguf.GGUFWriter(str(out), "llama")
    file.add_context_length(CONTEXT)
    file.add_embedding_length(WIDTH)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_rope_dimension_count(head)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_vocab_size(len(tokens))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(tokens)
    file.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    file.add_token_merges(merges)
    file.add_bos_token_id(special[settings["bos_token"]])
    file.add_eos_token_id(special[settings["eos_token"]])
    file.add_chat_template(settings["chat_template"])

    def weights(name: str, *shape: int, spread: float = 0.1) -> None:
        file.add_tensor(f"{name}.weight", (chance.standard_normal(shape) * spread).astype(numpy.float32))

    weights("token_embd", len(tokens), WIDTH, spread=0.5)
    weights("output", len(tokens), WIDTH, spread=0.3)
    file.add_tensor("output_norm.weight", numpy.ones(WIDTH, numpy.float32))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            file.add_tensor(f"{block}.{norm}.weight", numpy.ones(WIDTH, numpy.float32))
        weights(f"{block}.attn_q", HEADS * head, WIDTH)
        weights(f"{block}.attn_k", KV_HEADS * head, WIDTH)
        weights(f"{block}.attn_v", KV_HEADS * head, WIDTH)
        weights(f"{block}.attn_output", WIDTH, HEADS * head)
        weights(f"{block}.ffn_gate", INNER, WIDTH)
        weights(f"{block}.ffn_up", INNER, WIDTH)
        weights(f"{block}.ffn_down", WIDTH, INNER)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
