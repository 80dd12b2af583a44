"""A model folder for each format, with a tokenizer made on the spot, and a server that has all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tests.agents.formats import Format

HERE = Path(__file__).parent
#: Agents begin with many thousands of words, and tokens are short.
CONTEXT = 1_000_000

#: A name, a format, and what the model answers.
Model: TypeAlias = tuple[str, Format, Sequence[Mapping[str, Any]]]


@cache
def _trained(*, merges: bool) -> str:
    """Return a byte-level BPE that has seen enough to have tokens that are part JSON and part text.

    Else each byte is one.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = 1500 if merges else len(alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    texts = [(HERE / name).read_text() for name in ("formats.py", "templates.py")]
    tokenizer.train_from_iterator([line for text in texts for line in text.splitlines()], trainer)
    trained: str = tokenizer.to_str()
    return trained


def make_folder(form: Format, path: Path, *, merges: bool = True) -> Path:
    """Write the files of a model of that format."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(_trained(merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in form.special])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(form.template)
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": form.special[0], "bos_token": form.special[1]})
    )
    (path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(form.special[0])}))
    return path


def model_name(form: Format) -> str:
    """Return the name that clients ask for. It says nothing that a client could know a family by."""
    return f"tiny-{sum(form.name.encode()):x}"


def config(models: Iterable[Model], folder: Path, *, by_characters: bool = False, **frontend: Any) -> str:
    """Return a worker for each model, which answers by its script, in items sized by seed or by character."""
    workers = {}
    for seed, (name, form, script) in enumerate(models):
        path = make_folder(form, folder / name, merges=not by_characters)
        # Which parsers read it is for its files to say.
        model = {"name": name, "path": str(path), "tool_call_parser": "auto", "reasoning_parser": "auto"}
        engine = {
            "use": "mocker",
            "output": "script",
            "speedup_ratio": 0,
            "chunks": {"most": 1 if by_characters else 8, "seed": seed},
            "context_length": CONTEXT,
            "num_gpu_blocks": CONTEXT // 16,
            "script": list(script),
        }
        workers[name.replace("-", "_")] = {"model": model, "engine": engine, "grace_period": 0}
    return json.dumps({"workers": workers, "frontend": frontend})


def text_of(pieces: Iterable[str]) -> str:
    """Return an answer as the text of a script: the tokenizer makes single tokens of its markers."""
    return "".join(pieces)
