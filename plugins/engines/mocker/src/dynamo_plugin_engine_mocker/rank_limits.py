"""The limits of one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the scheduler of one rank."""

    #: Tokens per KV block.
    block_size: int
    #: Requests that hold a slot at once.
    max_num_seqs: int
    #: Tokens computed in one step: one per decoding request, the rest for prompts.
    max_num_batched_tokens: int
    #: Whether a prompt may be computed in parts, over several steps.
    chunked_prefill: bool = True
    #: Whether the request that runs longest gives way when blocks run out, or the one that came last.
    preempt_oldest: bool = False
