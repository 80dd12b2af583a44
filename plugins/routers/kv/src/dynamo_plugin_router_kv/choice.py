"""The cost of each rank, and the choice by cost. Pure: numbers in, numbers out."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo_core import RouterConfigOverride
from dynamo_core.kv import Load

from dynamo_plugin_router_kv.config import KvConfig


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of one choice."""

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    temperature: float = 0.0
    track_prefill_tokens: bool = True
    assume_kv_reuse: bool = True

    @classmethod
    def of(cls, config: KvConfig) -> Weights:
        """Return those of the router."""
        return cls(**{name: getattr(config, name) for name in cls.__slots__})

    def overridden(self, override: RouterConfigOverride) -> Weights:
        """Return those of one request."""
        return replace(
            self,
            overlap_score_credit=_or(override.overlap_score_credit, self.overlap_score_credit),
            prefill_load_scale=_or(override.prefill_load_scale, self.prefill_load_scale),
            temperature=_or(override.router_temperature, self.temperature),
            track_prefill_tokens=_or_bool(override.track_prefill_tokens, self.track_prefill_tokens),
            assume_kv_reuse=_or_bool(override.assume_kv_reuse, self.assume_kv_reuse),
        )


def costs(
    weights: Weights,
    *,
    tokens: int,
    blocks: int,
    block_size: int,
    overlaps: Sequence[int],
    loads: Sequence[Load],
    requests: Sequence[int] | None = None,
) -> list[float]:
    """Return the cost of giving a prompt of so many tokens, which fill so many blocks, to each rank; lower is better.

    ``scale × max(0, blocks to be prefilled − credit × overlap) + blocks held with the request + weight × requests``.
    `overlaps` are the blocks of the prompt that each rank has in its cache. `requests` may be left out if they weigh
    nothing.
    """
    scale, credit = weights.prefill_load_scale, weights.overlap_score_credit
    tracks = weights.track_prefill_tokens
    if not weights.assume_kv_reuse:
        loads = [(prefill, held, 0) for prefill, held, _ in loads]
    if tracks and scale == 1.0 and credit == 1.0 and not weights.overlap_score_credit_decay:
        # As it is by default; what is left out changes nothing.
        spared = tokens / block_size
        result = [
            (
                held + blocks - shared + raw
                if (raw := prefill / block_size + spared - overlap) > 0
                else held + blocks - shared
            )
            for overlap, (prefill, held, shared) in zip(overlaps, loads, strict=True)
        ]
    else:
        least = min(prefill for prefill, _, _ in loads)
        decay = weights.overlap_score_credit_decay / max(tokens, 1)
        result = []
        for overlap, (prefill, held, shared) in zip(overlaps, loads, strict=True):
            raw = (prefill + tokens) / block_size if tracks else 0.0
            worth = credit / (1.0 + decay * (prefill - least)) * overlap
            result.append(scale * max(0.0, raw - worth) + held + blocks - shared)
    weight = weights.decode_active_request_weight
    if weight and requests is not None:
        return [cost + weight * active for cost, active in zip(result, requests, strict=True)]
    return result


def choose(costs: Sequence[float], temperature: float, draw: random.Random) -> int:
    """Return which one to take: the cheapest, any of them if several are; or, with a temperature, one at random.

    Then the chance is proportional to ``exp(−(cost − least) / ((most − least) × temperature))``.
    """
    least = min(costs)
    if temperature > 0:
        spread = (max(costs) - least) * temperature
        if spread > 0:
            chances = [math.exp((least - cost) / spread) for cost in costs]
            return draw.choices(range(len(costs)), chances)[0]
    count = costs.count(least) if isinstance(costs, list) else sum(cost == least for cost in costs)
    if count == 1:
        return costs.index(least)
    cheapest = [index for index, cost in enumerate(costs) if cost == least]
    return cheapest[int(draw.random() * count)]


def best(costs: Sequence[float], count: int, chosen: int) -> list[int]:
    """Return the `count` cheapest by cost, with the chosen one in place of the last unless it is among them."""
    found = heapq.nsmallest(count, range(len(costs)), key=costs.__getitem__)
    if chosen not in found:
        found[-1] = chosen
    return found


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _or_bool(value: bool | None, default: bool) -> bool:
    return default if value is None else value
