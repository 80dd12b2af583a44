"""The load board: what every worker and rank is doing, as seen from this process. Core's accounting, for any router."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo_core.contracts.router import Route
from dynamo_core.kv.sequences import ActiveSequences


class LoadBoard:
    """Counts requests in when their route is entered, completes their prefill, and counts them out."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], ActiveSequences] = {}
        self._requests: dict[int, int] = {}

    def enter(
        self, route: Route, attempt_id: str, *, prompt_tokens: int, block_size: int | None, hashes: Sequence[int]
    ) -> Ticket:
        """Counts an attempt in; the ticket counts it out. Cached blocks of the route are not prefilled again."""
        instance_id = route.instance.instance_id
        key = (instance_id, route.dp_rank)
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = ActiveSequences()
        cached = route.overlap * (block_size or 0)
        rank.add(attempt_id, hashes, max(0, prompt_tokens - cached))
        self._requests[instance_id] = self._requests.get(instance_id, 0) + 1
        return Ticket(rank, attempt_id, lambda: self._left(instance_id, key))

    def requests(self, instance_id: int) -> int:
        """Requests active on a worker now, all ranks together."""
        return self._requests.get(instance_id, 0)

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        """Tokens still to be prefilled on a rank."""
        rank = self._ranks.get((instance_id, dp_rank))
        return rank.prefill_tokens if rank is not None else 0

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        """Different KV blocks held by active requests on a rank."""
        rank = self._ranks.get((instance_id, dp_rank))
        return rank.blocks if rank is not None else 0

    @property
    def total_requests(self) -> int:
        """Requests active on all workers."""
        return sum(self._requests.values())

    def _left(self, instance_id: int, key: tuple[int, int]) -> None:
        left = self._requests[instance_id] - 1
        if left:
            self._requests[instance_id] = left
        else:
            del self._requests[instance_id]
        rank = self._ranks.get(key)
        if rank is not None and not rank.requests:
            del self._ranks[key]


class Ticket:
    """One attempt on the board."""

    __slots__ = ("_attempt_id", "_left", "_rank")

    def __init__(self, rank: ActiveSequences, attempt_id: str, left: Callable[[], None]) -> None:
        self._rank = rank
        self._attempt_id = attempt_id
        self._left: Callable[[], None] | None = left

    def first_item(self) -> None:
        """The prompt has been prefilled."""
        self._rank.complete_prefill(self._attempt_id)

    def leave(self) -> None:
        """Counts the attempt out. Safe twice."""
        left, self._left = self._left, None
        if left is not None:
            self._rank.free(self._attempt_id)
            left()
