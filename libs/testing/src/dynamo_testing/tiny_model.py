"""A small Hugging Face style model folder, made on the spot: a real tokenizer without a download."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dynamo_core.contracts.model_folder import (
    GENERATION_CONFIG,
    MODEL_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)

BEGIN = "<|begin|>"
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|end|>"
START_OF_TURN = "<|im_start|>"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] %}{{- message['content'] }}{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

#: Tokens the model says it can hold.
CONTEXT_LENGTH = 8192

_LATIN = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu", "ch", "st", "an", "er", "in", "on", "é", "ü", "ß")
_OTHERS = ("你", "好", "世", "界", "語", "日", "本", "при", "вет", "мир", "ка", "का", "한", "국", "😀", "👍🏽", "👩‍🚀")


def make_tokenizer_folder(path: Path, *, vocab_size: int = 4000, seed: int = 0) -> Path:
    """Write the files of a byte-level BPE tokenizer with a chat template into `path`, and return `path`.

    The tokenizer is trained on made-up words in several scripts. The same arguments write the same bytes. `vocab_size`
    counts the 256 bytes and the special tokens; the vocabulary is that large unless the words run out before.

    Raises:
        ValueError: `vocab_size` leaves no room for merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = [BEGIN, END_OF_TURN, END_OF_TEXT, START_OF_TURN]
    if vocab_size <= 256 + len(special):
        raise ValueError(f"vocab_size must be larger than {256 + len(special)}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(seed, words=2 * vocab_size), trainer)
    bos = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, bos)]
    )
    eos = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]

    path.mkdir(parents=True, exist_ok=True)
    (path / TOKENIZER).write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    names = {"bos_token": BEGIN, "eos_token": END_OF_TURN}
    _write(path / TOKENIZER_CONFIG, {**names, "model_max_length": CONTEXT_LENGTH, "chat_template": CHAT_TEMPLATE})
    _write(path / SPECIAL_TOKENS, names)
    _write(path / GENERATION_CONFIG, {"bos_token_id": bos, "eos_token_id": eos})
    _write(
        path / MODEL_CONFIG,
        {
            "model_type": "tiny",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": CONTEXT_LENGTH,
            "bos_token_id": bos,
            "eos_token_id": eos[0],
        },
    )
    return path


def save_llama(folder: Path, *, vocab_size: int, device: str = "cpu", dtype: str = "float32", **more: object) -> None:
    """Save a Llama of random parameters into `folder`, the same each time on the same device.

    It needs torch and transformers. `more` goes to its config; without sizes there, it has 0.3 million parameters.
    `device` is where the parameters are drawn: for millions of them, a GPU saves the wait.
    """
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    torch.manual_seed(0)
    # Weights this large make the most likely token change from place to place.
    tiny = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    config = transformers.LlamaConfig(**{"vocab_size": vocab_size, **tiny, **more})
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)


def _lines(seed: int, words: int) -> Iterator[str]:
    chance = random.Random(seed)  # noqa: S311 - the words must be the same each time, not secret
    made = [_word(chance) for _ in range(words)]
    for start in range(0, words, 20):
        yield " ".join(made[start : start + 20]) + "\n"
    # Common words again, so that merges differ in how often they are found.
    for _ in range(words // 40):
        yield " ".join(chance.choices(made[:200], k=20)) + ".\n"


def _word(chance: random.Random) -> str:
    syllables = _OTHERS if chance.random() < 0.25 else _LATIN
    return "".join(chance.choices(syllables, k=chance.randint(1, 5)))


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
