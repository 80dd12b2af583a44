"""The eligible ranks for a request."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core import Phase, PoolView, RoutingHints, RoutingRequest, no_worker
from dynamo_core.errors import InvalidArgument, Unavailable
from dynamo_core.kv import Rank
from dynamo_core.protocol import Instance

from dynamo_plugin_router_kv.index import Depths, KvIndex
from dynamo_plugin_router_kv.metrics import ranks_of


class Candidates:
    """Ranks, and where each stands in the sets of an index."""

    __slots__ = ("_bits", "_everybody", "_generation", "_outside", "instances", "ranks")

    def __init__(self, pairs: Sequence[tuple[Instance, Rank]]) -> None:
        #: The worker of each rank.
        self.instances: Sequence[Instance] = [instance for instance, _ in pairs]
        self.ranks: Sequence[Rank] = [rank for _, rank in pairs]
        self._generation = -1
        #: The bit of each rank with its number, all of them, and the numbers of those that have none.
        self._bits: dict[int, int] = {}
        self._everybody = 0
        self._outside: Sequence[int] = ()

    @classmethod
    def of(cls, instances: Sequence[Instance], pool: PoolView) -> Candidates:
        """Return all ranks of these workers."""
        cards = pool.cards
        return cls([(one, rank) for one in instances for rank in ranks_of(one.instance_id, cards[one.instance_id])])

    def of_rank(self, dp_rank: int) -> Candidates:
        """Return those with a rank of this number."""
        return Candidates([pair for pair in zip(self.instances, self.ranks, strict=True) if pair[1][1] == dp_rank])

    def overlaps(self, index: KvIndex, depths: Depths) -> list[int]:
        """Return the overlap of each rank, from what the index says of all."""
        if not depths:
            return [0] * len(self.ranks)
        if self._generation != index.generation:
            self._place(index)
        # Most ranks hold the same, if anything, so that fewer are left to be looked at one by one.
        usual, members = max(depths, key=_size)
        overlaps = [usual] * len(self.ranks)
        for number in self._outside:
            overlaps[number] = 0
        none = self._everybody & ~members
        for depth, ranks in depths:
            if ranks != members:
                none &= ~ranks
                self._set(overlaps, ranks, depth)
        self._set(overlaps, none, 0)
        return overlaps

    def _place(self, index: KvIndex) -> None:
        bits = [index.bit(rank) for rank in self.ranks]
        self._outside = [number for number, bit in enumerate(bits) if not bit]
        self._bits = {bit: number for number, bit in enumerate(bits) if bit}
        self._everybody = sum(self._bits)
        self._generation = index.generation

    def _set(self, overlaps: list[int], ranks: int, depth: int) -> None:
        position = self._bits.get
        while ranks:
            bit = ranks & -ranks
            ranks ^= bit
            number = position(bit)
            if number is not None:
                overlaps[number] = depth


def requested_worker(hints: RoutingHints, phase: Phase) -> int | None:
    """Return the worker that a request names, for this phase."""
    if phase is Phase.PREFILL:
        return hints.prefill_worker_id
    return hints.decode_worker_id if hints.decode_worker_id is not None else hints.backend_instance_id


def requested_rank(hints: RoutingHints, phase: Phase) -> int | None:
    """Return the rank that it names."""
    return hints.prefill_dp_rank if phase is Phase.PREFILL else hints.dp_rank


class CandidateSelector:
    """Finds the candidates of requests; those of requests without wishes are found once, until the pool changes."""

    def __init__(self) -> None:
        self._version = -1
        self._eligible: Sequence[Instance] = ()
        self._everybody: Candidates | None = None

    def candidates(self, request: RoutingRequest, pool: PoolView) -> Candidates:
        """Return the candidates, at least one.

        Raises:
            ServiceOverloaded: there are such workers, but none may be routed to now.
            Unavailable: there are none.
            InvalidArgument: no worker has the rank that the request names.
        """
        hints, phase = request.request.routing, request.phase
        if hints is not None:
            pinned = requested_worker(hints, phase)
            if pinned is not None:
                return _ranked(self._pinned(pinned, request, pool), hints, phase)
        eligible = pool.eligible(request.excluded)
        if hints is not None and hints.allowed_worker_ids is not None:
            allowed = set(hints.allowed_worker_ids)
            if allowed.isdisjoint(pool.in_service):
                raise Unavailable(f"none of the workers in routing.allowed_worker_ids serves model {pool.model!r} now")
            eligible = [instance for instance in eligible if instance.instance_id in allowed]
        if not eligible:
            raise no_worker(pool)
        if eligible is self._eligible and self._version == pool.version and self._everybody is not None:
            found = self._everybody
        else:
            found = Candidates.of(eligible, pool)
            if not request.excluded:
                # As long as it is held, no other list is this one.
                self._eligible, self._version, self._everybody = eligible, pool.version, found
        return found if hints is None else _ranked(found, hints, phase)

    @staticmethod
    def _pinned(worker_id: int, request: RoutingRequest, pool: PoolView) -> Candidates:
        instance = pool.instances.get(worker_id)
        if instance is None:
            raise Unavailable(
                f"worker {worker_id:016x}, which the request names, does not serve model {pool.model!r} now"
            )
        if instance.state:
            raise Unavailable(f"worker {worker_id:016x}, which the request names, is {instance.state}")
        if worker_id in request.excluded:
            raise no_worker(pool)
        return Candidates.of([instance], pool)


def _ranked(candidates: Candidates, hints: RoutingHints, phase: Phase) -> Candidates:
    wanted = requested_rank(hints, phase)
    if wanted is None:
        return candidates
    narrowed = candidates.of_rank(wanted)
    if not narrowed.ranks:
        name = "prefill_dp_rank" if phase is Phase.PREFILL else "dp_rank"
        raise InvalidArgument(f"routing.{name} is {wanted}, and no worker that may be chosen has this rank")
    return narrowed


def _size(group: tuple[int, int]) -> int:
    return group[1].bit_count()
