"""The shared token cache of all tokenizers: token ids of earlier prompts."""

from __future__ import annotations

from dynamo_core import FrontendServices
from dynamo_text import TokenCacheStore


def token_memory(services: FrontendServices) -> TokenCacheStore | None:
    """Return what tokenizers remember of prompts, with its metrics; None if nothing is to be remembered."""
    if not services.token_cache:
        return None
    metrics, name = services.metrics, f"{services.metrics_prefix}_tokenizer_cache"
    hits = metrics.counter(f"{name}_hits_total", "Prompts and pieces of prompts whose tokens were remembered.")
    misses = metrics.counter(f"{name}_misses_total", "Prompts and pieces of prompts that had to be tokenized.")
    level = metrics.gauge(f"{name}_bytes", "Bytes that the remembered prompts and their tokens take.")
    return TokenCacheStore(
        services.token_cache, hit=hits.labels().inc, miss=misses.labels().inc, level=level.labels().set
    )
