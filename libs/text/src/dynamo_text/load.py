"""The tokenizer of a model card: from its kind and the model's files."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_core import Tokenizer
from dynamo_core.errors import ConfigError

from dynamo_text.prefix_cache import TokenCacheStore

#: `ModelCard.tokenizer` of models without files.
BYTES = "bytes"
#: `ModelCard.tokenizer` of models with a Hugging Face tokenizer among their files.
HF = "hf"


def load_tokenizer(kind: str, files: Mapping[str, bytes], memory: TokenCacheStore | None = None) -> Tokenizer:
    """Make the tokenizer of a model. Takes up to seconds of CPU for a large vocabulary: call it in a thread.

    `kind` is "bytes" or "hf"; `files` maps bare names to contents, as `load_folder` gives them. What the tokenizer
    encodes is remembered in `memory`, unless it is as fast as looking it up.

    Raises:
        ConfigError: the kind is not known, a file is missing or broken, or the extra `hf` is not installed.
    """
    if kind == BYTES:
        from dynamo_text.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    if kind == HF:
        from dynamo_text.hf_tokenizer import HFTokenizer

        return HFTokenizer(files, memory)
    raise ConfigError(f"tokenizer kind {kind!r} is not known; known kinds: {BYTES}, {HF}")
