"""The accounting of the service: workers, their ranks, and the requests that are active on them. Pure: no I/O, no task.

Everything is scoped by model and tenant. A scope exists while it has workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from dynamo_plugin_router_slot_tracker.errors import Conflict, Malformed, Refusal, Unknown
from dynamo_plugin_router_slot_tracker.held_capacity import MAX_HELD, HeldCapacity
from dynamo_plugin_router_slot_tracker.schemas import (
    U32_MAX,
    Addition,
    Held,
    Load,
    PotentialLoad,
    Projection,
    Registration,
    RequestKey,
    Unregistration,
)
from dynamo_plugin_router_slot_tracker.sequences import ActivePrefixes, ActiveSequence, prefix_keys

#: Seconds after which a request may be taken for one that will never be freed.
EXPIRY = 300.0
#: Most seconds between two looks for such requests.
SWEEP = 30.0
#: Most ranks of all workers together.
MAX_RANKS = 65_536
#: Most pairs of model and tenant. Each is a row of every metric, too.
MAX_TRACKERS = 4096
#: Most hashes of one request. More than this many of 64 bits do not fit into a body.
MAX_HASHES = 131_072
#: Most characters of a name or an id.
MAX_NAME = 1024
#: The owner of a request that came with a snapshot of the whole service: some other replica.
RESTORED = 0


@dataclass(slots=True, eq=False)
class Rank:
    """A data-parallel rank of a worker, and its active requests."""

    worker_id: int
    dp_rank: int
    active: ActivePrefixes = field(default_factory=ActivePrefixes)

    def insert(self, sequences: Iterable[ActiveSequence]) -> None:
        """Add requests of any age, where `active.add` takes younger ones than it has only."""
        ordered = sorted([*self.active, *sequences], key=lambda sequence: sequence.added)
        self.active = ActivePrefixes()
        for sequence in ordered:
            self.active.add(*sequence)

    def __str__(self) -> str:
        return _rank_name(self.worker_id, self.dp_rank)


class Scope:
    """The workers of one model and tenant."""

    __slots__ = ("_room", "_tenant", "_weights", "block_size", "owners", "ranks", "requests", "workers")

    def __init__(self, block_size: int, tenant: str, room: HeldCapacity) -> None:
        self.block_size = block_size
        self._tenant = tenant
        self._room = room
        #: What each active request takes of the room.
        self._weights: dict[str, int] = {}
        self.workers: dict[int, Registration] = {}
        self.ranks: dict[tuple[int, int], Rank] = {}
        #: Where each active request is. Ids are unique in a scope.
        self.requests: dict[str, Rank] = {}
        #: The replica that took the `/add` of a request; those that are not here are this process's own.
        self.owners: dict[str, int] = {}

    def hold(self, request_id: str, rank: Rank, hashes: int) -> None:
        """List a request with so many hashes, which is not active yet; the rank does not count it by that.

        Raises:
            Full: there is no room for it.
        """
        self._weights[request_id] = self._room.take(self._tenant, request_id, hashes)
        self.requests[request_id] = rank

    def forget(self, request_id: str) -> Rank | None:
        """Take a request off the lists of this scope; the rank that still counts it, or None if it is not active."""
        self.owners.pop(request_id, None)
        weight = self._weights.pop(request_id, None)
        if weight is not None:
            self._room.give_back(self._tenant, weight)
        return self.requests.pop(request_id, None)


class Registry:
    """All scopes. `clock` gives seconds and never goes back; `expiry` is in seconds.

    Methods that change something raise a `Refusal` before they have changed anything.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        expiry: float = EXPIRY,
        max_ranks: int = MAX_RANKS,
        max_trackers: int = MAX_TRACKERS,
        max_hashes: int = MAX_HASHES,
        max_held: int = MAX_HELD,
    ) -> None:
        self.clock = clock
        self._expiry = expiry
        self._max_ranks = max_ranks
        self._max_trackers = max_trackers
        self.max_hashes = max_hashes
        self._room = HeldCapacity(max_held)
        self._ranks = 0
        self._scopes: dict[tuple[str, str], Scope] = {}
        #: Seconds between two looks for requests that are too old.
        self.sweep_interval = min(SWEEP, expiry)
        self._next_sweep = clock() + self.sweep_interval
        #: Requests that were counted out because of their age.
        self.expired = 0

    # Workers.

    def register(self, worker: Registration) -> None:
        """Add a worker with its ranks.

        Raises:
            Malformed: its sizes or its range are impossible, a name is too long, or there would be too many ranks or
                scopes.
            Conflict: it is there already, or others of its scope have another block size.
        """
        if worker.block_size == 0:
            raise Malformed("block_size must be greater than 0")
        if worker.dp_size == 0:
            raise Malformed("dp_size must be greater than 0")
        if worker.dp_start + worker.dp_size > U32_MAX:
            raise Malformed(f"dp range overflows u32: start={worker.dp_start} size={worker.dp_size}")
        _check_name("model_name", worker.model_name)
        _check_name("tenant_id", worker.tenant_id)
        key = (worker.model_name, worker.tenant_id)
        scope = self._scopes.get(key)
        if scope is not None and scope.block_size != worker.block_size:
            raise Conflict(
                f"block_size mismatch for {_scope_name(*key)}: "
                f"existing={scope.block_size}, requested={worker.block_size}"
            )
        if scope is not None and worker.worker_id in scope.workers:
            raise Conflict(f"worker {worker.worker_id} already registered for {_scope_name(*key)}")
        if self._ranks + worker.dp_size > self._max_ranks:
            raise Malformed(
                f"dp_size {worker.dp_size} is too large: at most {self._max_ranks} ranks can be tracked, "
                f"and {self._ranks} are"
            )
        if scope is None:
            if len(self._scopes) >= self._max_trackers:
                raise Malformed(
                    f"no slot tracker for {_scope_name(*key)}: at most {self._max_trackers} pairs of model and tenant "
                    "can be tracked"
                )
            scope = self._scopes[key] = Scope(worker.block_size, worker.tenant_id, self._room)
        scope.workers[worker.worker_id] = worker
        for dp_rank in _range_of(worker):
            scope.ranks[worker.worker_id, dp_rank] = Rank(worker.worker_id, dp_rank)
        self._ranks += worker.dp_size

    def unregister(self, worker: Unregistration) -> None:
        """Remove a worker with its ranks and the requests on them.

        Raises:
            Unknown: it is not there.
        """
        key = (worker.model_name, worker.tenant_id)
        scope = self._scopes.get(key)
        registration = scope.workers.pop(worker.worker_id, None) if scope is not None else None
        if scope is None or registration is None:
            raise Unknown(f"worker {worker.worker_id} not found for {_scope_name(*key)}")
        self._ranks -= registration.dp_size
        for dp_rank in _range_of(registration):
            for sequence in scope.ranks.pop((worker.worker_id, dp_rank)).active:
                scope.forget(sequence.request_id)
        if not scope.workers:
            del self._scopes[key]

    def workers(self, model_name: str | None = None, tenant_id: str | None = None) -> list[Registration]:
        """Return all workers, or those of a model, of a tenant, or of both; sorted by model, tenant and id."""
        return [
            scope.workers[worker_id]
            for _, scope in self._matching(model_name, tenant_id)
            for worker_id in sorted(scope.workers)
        ]

    # Requests.

    def add(self, addition: Addition, owner: int | None = None) -> int:
        """Count a request in on a rank; the block size of the scope. `owner` is the replica that took it, if another.

        Raises:
            Unknown: the scope or the rank is not there.
            Malformed: it has too many hashes, or its id is too long.
            Conflict: a request of that id is active.
            Full: its tenant holds as much as it may.
        """
        return self._add(addition, self._now(), owner)

    def complete_prefill(self, key: RequestKey) -> Rank:
        """Take the request's tokens off the prefill count of its rank, which is returned. Repeating changes nothing.

        Raises:
            Unknown: the scope is not there, or the request is not active.
        """
        self._now()
        rank = self.scope(key.model_name, key.tenant_id).requests.get(key.request_id)
        if rank is None:
            raise Unknown(f"Request {key.request_id} not found")
        rank.active.complete_prefill(key.request_id)
        return rank

    def free(self, key: RequestKey) -> Rank | None:
        """Count a request out; its rank, or None if it was not active, which is fine.

        Raises:
            Unknown: the scope is not there.
        """
        self._now()
        rank = self.scope(key.model_name, key.tenant_id).forget(key.request_id)
        if rank is not None:
            rank.active.free(key.request_id)
        return rank

    # Loads.

    def loads(self, model_name: str | None = None, tenant_id: str | None = None) -> list[Load]:
        """Return what every rank is busy with, idle ones too.

        Filtered as `workers`, sorted by model, tenant, id and rank.
        """
        self._now()
        return [
            Load(
                model_name=model,
                tenant_id=tenant,
                worker_id=rank.worker_id,
                dp_rank=rank.dp_rank,
                active_prefill_tokens=rank.active.prefill_tokens,
                active_decode_blocks=rank.active.blocks,
            )
            for (model, tenant), scope in self._matching(model_name, tenant_id)
            for _, rank in sorted(scope.ranks.items())
        ]

    def potential_loads(self, projection: Projection) -> list[PotentialLoad]:
        """Return what every rank of a scope would be busy with if this request were added there. Reserve nothing.

        Raises:
            Unknown: the scope is not there.
            Malformed: the request has too many hashes.
        """
        self._now()
        scope = self.scope(projection.model_name, projection.tenant_id)
        self._check_number(projection.sequence_hashes)
        # As in `add`, a hash counts once.
        keys = prefix_keys(list(dict.fromkeys(projection.sequence_hashes)))
        tokens = projection.new_isl_tokens
        loads = []
        for rank in scope.ranks.values():
            active = rank.active
            loads.append(
                PotentialLoad(
                    rank.worker_id,
                    rank.dp_rank,
                    active.prefill_tokens + tokens,
                    active.blocks + len(keys) - active.shared_prefix(keys),
                    active.requests,
                )
            )
        return loads

    def scope(self, model_name: str, tenant_id: str) -> Scope:
        """Return the scope of a model and tenant.

        Raises:
            Unknown: it has no worker.
        """
        scope = self._scopes.get((model_name, tenant_id))
        if scope is None:
            raise Unknown(f"no slot tracker for {_scope_name(model_name, tenant_id)}")
        return scope

    def scopes(self) -> Iterable[tuple[tuple[str, str], Scope]]:
        """Return every scope by model and tenant."""
        return self._scopes.items()

    # Age.

    def sweep(self) -> int:
        """Count out the requests that are older than `expiry`; return how many."""
        now = self.clock()
        self._next_sweep = now + self.sweep_interval
        before = now - self._expiry
        swept = 0
        for scope in self._scopes.values():
            for rank in scope.ranks.values():
                for request_id in rank.active.expire(before):
                    scope.forget(request_id)
                    swept += 1
        self.expired += swept
        return swept

    # Snapshots.

    def held(self) -> Iterator[Held]:
        """Yield every active request, with its age. Nothing may change while this is read."""
        now = self.clock()
        for key, scope in self._scopes.items():
            for rank in scope.ranks.values():
                for sequence in rank.active:
                    yield _held(key, rank, sequence, now)

    def own(self, key: tuple[str, str], chosen: Callable[[str], bool]) -> Iterator[Held]:
        """Return `held` of one scope: the requests with `chosen` ids that this process's own clients added."""
        now = self.clock()
        scope = self._scopes[key]
        for rank in scope.ranks.values():
            for sequence in rank.active:
                if sequence.request_id not in scope.owners and chosen(sequence.request_id):
                    yield _held(key, rank, sequence, now)

    def restore(self, requests: Iterable[Held]) -> int:
        """Count in the requests of a snapshot, as old as they are; return how many.

        Those that do not fit are left out. For a registry without requests: those that come later are younger.
        """
        now = self.clock()
        restored = 0
        # The oldest first, as they would have come.
        for held in sorted(requests, key=lambda held: -held.age):
            addition = Addition(
                model_name=held.model_name,
                tenant_id=held.tenant_id,
                request_id=held.request_id,
                worker_id=held.worker_id,
                dp_rank=held.dp_rank,
                sequence_hashes=held.sequence_hashes,
                new_isl_tokens=held.new_isl_tokens,
            )
            try:
                self._add(addition, now - held.age, RESTORED)
            except Refusal:
                continue
            restored += 1
        return restored

    # Inside.

    def _add(self, addition: Addition, added: float, owner: int | None) -> int:
        scope = self.scope(addition.model_name, addition.tenant_id)
        rank = scope.ranks.get((addition.worker_id, addition.dp_rank))
        if rank is None:
            raise Unknown(f"Worker {_rank_name(addition.worker_id, addition.dp_rank)} not found")
        self._check_number(addition.sequence_hashes)
        request_id = addition.request_id
        _check_name("request_id", request_id)
        holder = scope.requests.get(request_id)
        if holder is not None:
            raise Conflict(f"Request {request_id} already exists (assigned to worker {holder})")
        scope.hold(request_id, rank, len(addition.sequence_hashes))
        rank.active.add(request_id, addition.sequence_hashes, addition.new_isl_tokens, added)
        if owner is not None:
            scope.owners[request_id] = owner
        return scope.block_size

    def _check_number(self, hashes: list[int]) -> None:
        if len(hashes) > self.max_hashes:
            raise Malformed(f"sequence_hashes has {len(hashes)} entries: at most {self.max_hashes} are taken")

    def _now(self) -> float:
        """Return the time. Who asks also does the sweep that is due, so that no answer is later than that."""
        now = self.clock()
        if now >= self._next_sweep:
            self.sweep()
        return now

    def _matching(self, model_name: str | None, tenant_id: str | None) -> Iterator[tuple[tuple[str, str], Scope]]:
        for key in sorted(self._scopes):
            if (model_name is None or key[0] == model_name) and (tenant_id is None or key[1] == tenant_id):
                yield key, self._scopes[key]


def _held(key: tuple[str, str], rank: Rank, sequence: ActiveSequence, now: float) -> Held:
    return Held(
        model_name=key[0],
        tenant_id=key[1],
        request_id=sequence.request_id,
        worker_id=rank.worker_id,
        dp_rank=rank.dp_rank,
        sequence_hashes=list(sequence.hashes),
        new_isl_tokens=sequence.prefill_tokens,
        age=now - sequence.added,
    )


def _check_name(field: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise Malformed(f"{field} has {len(name)} characters: at most {MAX_NAME} are taken")


def _range_of(worker: Registration) -> range:
    return range(worker.dp_start, worker.dp_start + worker.dp_size)


def _scope_name(model_name: str, tenant_id: str) -> str:
    return f"model={model_name} tenant_id={tenant_id}"


def _rank_name(worker_id: int, dp_rank: int) -> str:
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
