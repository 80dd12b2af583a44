"""The three routers. They read core's load and count nothing themselves."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence

from dynamo_core import PluginConfig, PoolView, Route, Router, RouterServices, RoutingRequest, no_worker
from dynamo_core.protocol import Instance
from pydantic import Field


class LoadAwareConfig(PluginConfig):
    """Settings of all three routers."""

    seed: int | None = Field(default=None, description="Makes the choices repeatable, for tests.")


class LoadAwareRouter(Router):
    """The common part: the random generator, and the errors when no worker can be chosen."""

    Config = LoadAwareConfig

    def __init__(self, config: LoadAwareConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        # Spreads load, keeps no secret.
        self._random = random.Random(config.seed)  # noqa: S311
        self._tracker = services.tracker

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        """Choose a worker, then one of its ranks."""
        eligible = pool.eligible(request.excluded)
        if not eligible:
            raise no_worker(pool)
        instance = self._choose(eligible, pool)
        facts = pool.cards[instance.instance_id].runtime_config
        start, size = facts.data_parallel_start_rank, facts.data_parallel_size
        rank = start if size == 1 else self._choose_rank(instance.instance_id, range(start, start + size))
        return Route(instance, rank)

    @abstractmethod
    def _choose(self, eligible: Sequence[Instance], pool: PoolView) -> Instance:
        """Return one of the workers, of which there is at least one."""

    def _choose_rank(self, instance_id: int, ranks: range) -> int:
        """Return the rank with the least to prefill, then with the fewest blocks; any of them if several are alike."""
        loads = [
            (self._tracker.prefill_tokens(instance_id, rank), self._tracker.blocks(instance_id, rank)) for rank in ranks
        ]
        least = min(loads)
        return self._random.choice([rank for rank, load in zip(ranks, loads, strict=True) if load == least])

    def _below(self, limit: int) -> int:
        """Return a random number from 0 up to, not including, `limit`."""
        return int(self._random.random() * limit)


class RandomRouter(LoadAwareRouter):
    """Any worker and any of its ranks, each with the same chance."""

    NAME = "random"

    def _choose(self, eligible: Sequence[Instance], pool: PoolView) -> Instance:
        return eligible[self._below(len(eligible))]

    def _choose_rank(self, instance_id: int, ranks: range) -> int:
        return ranks[self._below(len(ranks))]


class PowerOfTwoRouter(LoadAwareRouter):
    """The less loaded of two workers drawn at random; if equal, either."""

    NAME = "power-of-two"

    def _choose(self, eligible: Sequence[Instance], pool: PoolView) -> Instance:
        count = len(eligible)
        first = self._below(count)
        if count == 1:
            return eligible[first]
        # Of the others, so that the two differ and each pair has the same chance.
        second = self._below(count - 1)
        if second >= first:
            second += 1
        one, other = eligible[first], eligible[second]
        # Which of the two was drawn first is random already: a tie needs no further draw.
        return other if self._tracker.requests(other.instance_id) < self._tracker.requests(one.instance_id) else one


class LeastLoadedRouter(LoadAwareRouter):
    """The worker with the fewest active requests, then with the fewest tokens to be prefilled; if equal, any."""

    NAME = "least-loaded"

    def _choose(self, eligible: Sequence[Instance], pool: PoolView) -> Instance:
        requests = [self._tracker.requests(instance.instance_id) for instance in eligible]
        fewest = min(requests)
        idlest = [instance for instance, active in zip(eligible, requests, strict=True) if active == fewest]
        if len(idlest) == 1:
            return idlest[0]
        if fewest:
            # Workers without requests have nothing to prefill.
            tokens = [self._prefill_tokens(instance.instance_id, pool) for instance in idlest]
            least = min(tokens)
            idlest = [instance for instance, left in zip(idlest, tokens, strict=True) if left == least]
        return idlest[self._below(len(idlest))]

    def _prefill_tokens(self, instance_id: int, pool: PoolView) -> int:
        facts = pool.cards[instance_id].runtime_config
        start = facts.data_parallel_start_rank
        return sum(self._tracker.prefill_tokens(instance_id, start + rank) for rank in range(facts.data_parallel_size))
