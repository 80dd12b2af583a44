"""Size limits of single fields, those of the official APIs where they have any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import truncated

#: Pairs of `metadata`, and characters of a key and of a value.
MAX_PAIRS = 16
MAX_KEY = 64
MAX_VALUE = 512
#: All that, in words.
PAIRS = (
    f"at most {MAX_PAIRS} pairs are allowed, with keys of at most {MAX_KEY} characters "
    f"and texts of at most {MAX_VALUE} characters as values"
)

#: The most characters of fields that are texts.
MAX_CHARACTERS = {
    "cache_salt": 512,
    "guided_grammar": 256 * 1024,
    "guided_regex": 64 * 1024,
    "guided_whitespace_pattern": 1024,
    "prompt_cache_key": 64,
    "safety_identifier": 64,
    "user": 512,
}

#: Texts to be scored.
MAX_TEXTS = 2048

#: The most entries of fields that are lists or objects.
MAX_ENTRIES = {
    "allowed_token_ids": 262_144,
    "bad_words_token_ids": 4096,
    "cache_control": 16,
    "chat_template_args": 256,
    "chat_template_kwargs": 256,
    "client_metadata": 256,
    "context_management": 64,
    "fallbacks": 64,
    "guided_choice": 4096,
    "logit_bias": 4096,
    "messages": 4096,
    "prompt_cache_options": 16,
    **dict.fromkeys(("data_1", "data_2", "documents", "items", "queries", "text_1", "text_2"), MAX_TEXTS),
    "stop_token_ids": 4096,
}


def check_limits(raw: Mapping[str, Any]) -> None:
    """Check how much fields hold, before any is looked at or copied.

    Raises:
        InvalidArgument: naming the field.
    """
    for name in raw.keys() & MAX_ENTRIES.keys():
        value, most = raw[name], MAX_ENTRIES[name]
        if isinstance(value, list | dict) and len(value) > most:
            raise _invalid(f"{name} must have at most {most} entries, got {len(value)}", name)
    for name in raw.keys() & MAX_CHARACTERS.keys():
        value, most = raw[name], MAX_CHARACTERS[name]
        if isinstance(value, str) and len(value) > most:
            raise _invalid(f"{name} must have at most {most} characters, got {len(value)}", name)
    check_pairs(raw.get("metadata"))


def check_pairs(metadata: Any) -> None:
    """Check the client's own notes.

    Raises:
        InvalidArgument: they are no object of texts, or out of bounds.
    """
    if metadata is None:
        return
    if not isinstance(metadata, dict):
        raise _invalid(f"metadata must be an object: {PAIRS}", "metadata")
    if len(metadata) > MAX_PAIRS:
        raise _invalid(f"metadata has {len(metadata)} pairs: {PAIRS}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_KEY:
            raise _invalid(f"metadata has a key of {len(key)} characters, '{truncated(key, 20)}': {PAIRS}", "metadata")
        if value is not None and not isinstance(value, str):
            raise _invalid(f"metadata has a value that is no text, that of '{truncated(key)}': {PAIRS}", "metadata")
        if value is not None and len(value) > MAX_VALUE:
            raise _invalid(
                f"metadata has a value of {len(value)} characters, that of '{truncated(key)}': {PAIRS}", "metadata"
            )


def _invalid(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"Validation: {message}", field=field)
