"""A router that takes workers in turn."""

from __future__ import annotations

from dynamo_core import PluginConfig, PoolView, Route, Router, RouterServices, RoutingRequest, no_worker


class RoundRobinRouter(Router):
    """Gives each request to the next eligible worker, and to the next rank of a worker with several."""

    NAME = "round-robin"

    def __init__(self, config: PluginConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        self._turn = 0

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        eligible = pool.eligible(request.excluded)
        if not eligible:
            raise no_worker(pool)
        turn = self._turn
        self._turn = turn + 1
        instance = eligible[turn % len(eligible)]
        ranks = pool.cards[instance.instance_id].runtime_config
        lap = turn // len(eligible)
        return Route(instance, ranks.data_parallel_start_rank + lap % ranks.data_parallel_size)
