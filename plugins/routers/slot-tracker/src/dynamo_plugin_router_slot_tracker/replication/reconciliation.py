"""Reconciliation of the requests held for a replica with those that it reports."""

from __future__ import annotations

from collections import defaultdict

from dynamo_plugin_router_slot_tracker.errors import Full
from dynamo_plugin_router_slot_tracker.registry import RESTORED, Rank, Registry, Scope
from dynamo_plugin_router_slot_tracker.replication.events import Part, PartTopic, TrackerPart
from dynamo_plugin_router_slot_tracker.schemas import Held
from dynamo_plugin_router_slot_tracker.sequences import ActiveSequence

#: Seconds by which two entries of one request may differ in age; if it is more, the id was used twice.
_SAME_AGE = 1.0


def reconcile(registry: Registry, part: Part) -> int:
    """Make the registry hold of a bucket what its replica has there, as old as it is, and no other request of it.

    Return how many requests cannot be held here: their worker is not the same, or their id is that of another request.
    """
    owner = part.router_id
    bucket = PartTopic(owner, 0, part.bucket, part.of)
    now = registry.clock()
    told = {(one.model_name, one.tenant_id): one for one in part.trackers}
    fitting = 0
    for key, scope in registry.scopes():
        tracker = told.get(key)
        requests = {} if tracker is None else _fitting(scope, tracker, owner, registry.max_hashes)
        gone = [one for one, holder in scope.owners.items() if holder == owner and bucket.holds(one)]
        for request_id in gone:
            held = requests.get(request_id)
            if held is None or not _is_same(scope, held, now):
                _free(scope, request_id)
        fitting += _hold(scope, requests, owner, now)
    return sum(len(one.requests) for one in part.trackers) - fitting


def _fitting(scope: Scope, tracker: TrackerPart, owner: int, max_hashes: int) -> dict[str, Held]:
    if scope.block_size != tracker.block_size:
        return {}
    return {
        held.request_id: held
        for held in tracker.requests
        if (held.worker_id, held.dp_rank) in scope.ranks
        and len(held.sequence_hashes) <= max_hashes
        and (held.request_id not in scope.requests or scope.owners.get(held.request_id) in (owner, RESTORED))
    }


def _is_same(scope: Scope, held: Held, now: float) -> bool:
    rank = scope.requests[held.request_id]
    sequence = rank.active.get(held.request_id)
    return (
        sequence is not None
        and (rank.worker_id, rank.dp_rank) == (held.worker_id, held.dp_rank)
        and sequence.hashes == tuple(held.sequence_hashes)
        and held.new_isl_tokens in (sequence.prefill_tokens, 0)
        and abs(now - held.age - sequence.added) <= _SAME_AGE
    )


def _free(scope: Scope, request_id: str) -> None:
    rank = scope.forget(request_id)
    if rank is not None:
        rank.active.free(request_id)


def _hold(scope: Scope, requests: dict[str, Held], owner: int, now: float) -> int:
    """Hold these requests of a replica. Return how many there was room for."""
    left_out = 0
    missing: defaultdict[Rank, list[ActiveSequence]] = defaultdict(list)
    for request_id, held in requests.items():
        rank = scope.requests.get(request_id)
        if rank is None:
            rank = scope.ranks[held.worker_id, held.dp_rank]
            hashes = tuple(held.sequence_hashes)
            try:
                scope.hold(request_id, rank, len(hashes))
            except Full:
                left_out += 1
                continue
            missing[rank].append(ActiveSequence(request_id, hashes, held.new_isl_tokens, now - held.age))
        elif not held.new_isl_tokens:
            rank.active.complete_prefill(request_id)
        scope.owners[request_id] = owner
    for rank, sequences in missing.items():
        rank.insert(sequences)
    return len(requests) - left_out
