"""Token usage of a request: local counts, and engine reports where they are plausible."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_generation.choices.choice import Choice

if TYPE_CHECKING:
    from dynamo_generation.answers.engine_stream_slices import Source

log = logging.getLogger(__name__)

#: Workers of which is remembered that they were warned of; with more, all are forgotten.
_WARNED = 4096


def usage_of(choices: Sequence[Choice], *, engine_counts: bool) -> dict[str, Any]:
    """Return the `usage` object, over all choices.

    `engine_counts` says that only the engine knows how long a prompt is, as with engines that take text; what it does
    not say falls back to the frontend's own count.
    """
    completion = 0
    prompts: dict[int, int] = {}
    reported: dict[int, int] = {}
    for choice in choices:
        completion += _completion(choice)
        prompts[choice.prompt] = choice.prompt_tokens
        if engine_counts and choice.usage is not None:
            reported[choice.prompt] = max(choice.usage.prompt_tokens, reported.get(choice.prompt, 0))
    prompt = sum(reported.values()) or sum(prompts.values())
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = cached_of(choices)
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": min(cached, prompt)}
    reasoning = [choice.reasoning_tokens for choice in choices if choice.reasoning_tokens is not None]
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": max(0, min(sum(reasoning), completion))}
    return usage


def cached_of(choices: Iterable[Choice]) -> int | None:
    """Return how many tokens of the prompts engines had in their caches; None if none says so.

    A prompt counts once, however many choices it has: what one of them had to compute was not cached.
    """
    least: dict[int, int] = {}
    for choice in choices:
        cached = None if choice.usage is None else choice.usage.cached_tokens
        if cached is not None and cached >= 0:
            least[choice.prompt] = min(cached, least.get(choice.prompt, cached))
    return sum(least.values()) if least else None


class UsageWatch:
    """A warning, once per worker, of engines that report impossible usage."""

    def __init__(self) -> None:
        self._warned: set[int | None] = set()

    def look(self, sources: Sequence[Source], model: str, *, engine_counts: bool) -> None:
        """Look at what the engines of a whole answer have reported."""
        for source in sources:
            worker = source.stream.instance_id
            if worker in self._warned:
                continue
            for choice in source.choices.values():
                fault = _fault(choice, engine_counts=engine_counts)
                if fault is None:
                    continue
                if len(self._warned) >= _WARNED:
                    self._warned.clear()
                self._warned.add(worker)
                log.warning(
                    "the engine of worker %016x of model %s reports a completion_usage that cannot be true: %s; "
                    "clients are told what was counted here, and this worker is not warned of again",
                    worker or 0,
                    model,
                    fault,
                )
                break


def _completion(choice: Choice) -> int:
    """Return the engine's count of an answer that it ended itself, if that can be true; else the frontend's."""
    reported = choice.reported
    return choice.completion_tokens if reported is None or _miscounted(choice, reported) else reported


def _miscounted(choice: Choice, reported: int) -> str | None:
    own, limit = choice.completion_tokens, choice.limit
    if reported < own:
        return f"{reported} completion tokens where {own} came"
    if limit is not None and reported > max(limit, own):
        return f"{reported} completion tokens where at most {limit} were asked for"
    return None


def _fault(choice: Choice, *, engine_counts: bool) -> str | None:
    usage, prompt = choice.usage, choice.prompt_tokens
    if usage is None:
        return None
    if choice.reported is not None and (fault := _miscounted(choice, choice.reported)):
        return fault
    if engine_counts:
        prompt = usage.prompt_tokens
    elif usage.prompt_tokens not in (0, prompt):
        return f"{usage.prompt_tokens} prompt tokens where {prompt} were sent"
    if usage.cached_tokens is not None and not 0 <= usage.cached_tokens <= prompt:
        return f"{usage.cached_tokens} cached tokens of a prompt of {prompt}"
    if usage.reasoning_tokens is not None and not 0 <= usage.reasoning_tokens <= usage.completion_tokens:
        return f"{usage.reasoning_tokens} reasoning tokens of a completion of {usage.completion_tokens}"
    return None
