"""What is told of the tokens of an answer, for the description of an API."""

from __future__ import annotations

import msgspec


class CachedTokens(msgspec.Struct):
    """How much of the prompts engines had in their caches."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    """How much of the answers was reasoning."""

    reasoning_tokens: int
