"""An explanation of routing now. Nothing is chosen, reserved, or counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from dynamo_core.contracts.requests.explain import RankView, RouteView
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import Phase, RoutingRequest, ScoredRank, no_worker
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.records import DECODE, PREFILL
from dynamo_core.protocol.request import PreprocessedRequest

from dynamo_runtime.dispatch.execution.prefill import decode_override
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.worker_group import WorkerGroup

_PHASES = {PREFILL: Phase.PREFILL, DECODE: Phase.DECODE}
#: Names the request in what a router logs.
_ID = "explain"

_Rank: TypeAlias = tuple[int, int]


def explain_group(
    group: WorkerGroup, tracker: LoadTracker, request: PreprocessedRequest, principal: Principal
) -> RouteView:
    """Return how the workers of one group look to a request."""
    pool = group.pool
    phase = _PHASES.get(pool.role, Phase.AGGREGATED)
    if phase is Phase.DECODE:
        request = msgspec.structs.replace(request, router_config_override=decode_override(request))
    asked = RoutingRequest(request, _ID, phase=phase, principal=principal)
    considered: Sequence[ScoredRank] | None = None
    refusal = None
    try:
        if not pool.eligible():
            raise no_worker(pool)
        considered = group.router.explain(asked, pool)
    except DynamoError as error:
        refusal = error.message
    sizes = [card.kv_cache_block_size for card in pool.cards.values()]
    ranks = _ranks(pool, tracker, considered)
    return RouteView(pool.role, group.router.NAME, len(request.token_ids), next(iter(sizes), None), ranks, refusal)


def _ranks(pool: Pool, tracker: LoadTracker, considered: Sequence[ScoredRank] | None) -> list[RankView]:
    known: dict[_Rank, ScoredRank] = {(one.instance_id, one.dp_rank): one for one in considered or ()}
    preferred = [one for one in known.values() if one.preferred] or known.values()
    least = min((one.cost for one in preferred), default=None)
    best = {(one.instance_id, one.dp_rank) for one in preferred if one.cost == least}
    found = []
    for instance in pool.instances.values():
        worker_id = instance.instance_id
        facts = pool.cards[worker_id].runtime_config
        first = facts.data_parallel_start_rank
        for rank in range(first, first + facts.data_parallel_size):
            one = known.get((worker_id, rank))
            view = RankView(
                worker_id,
                instance.worker,
                rank,
                pool.state(worker_id),
                tracker.requests(worker_id),
                tracker.prefill_tokens(worker_id, rank),
                tracker.blocks(worker_id, rank),
                overlap=one.overlap if one is not None else None,
                shared=one.shared if one is not None else None,
                cost=one.cost if one is not None else None,
                best=(worker_id, rank) in best if considered is not None else None,
            )
            found.append(view)
    return found
