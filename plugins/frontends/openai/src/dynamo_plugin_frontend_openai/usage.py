"""How many tokens a request took."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynamo_plugin_frontend_openai.choices import Choice


def usage_of(choices: Iterable[Choice], prompt_tokens: int, *, engine_counts: bool) -> dict[str, Any]:
    """The `usage` object, over all choices.

    `engine_counts` says that only the engine knows, as with engines that take text; what it does not say falls back
    to the frontend's own count.
    """
    completion = 0
    cached: int | None = None
    prompt = 0
    for choice in choices:
        reported = choice.usage
        if reported is not None and reported.cached_tokens is not None:
            cached = (cached or 0) + reported.cached_tokens
        if engine_counts and reported is not None:
            completion += reported.completion_tokens
            prompt += reported.prompt_tokens
        else:
            completion += choice.completion_tokens
    if not prompt:
        prompt = prompt_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
