"""The schema of token usage in the OpenAPI description."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct):
    """Prompt tokens found in engines' caches."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    """Reasoning tokens in the answers."""

    reasoning_tokens: int
