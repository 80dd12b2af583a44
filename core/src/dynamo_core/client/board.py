"""The load board: what every worker and rank is doing, as far as frontends have it do it. Core's accounting, for any
router."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dynamo_core.client.other_loads import OtherLoads
from dynamo_core.contracts.router import Route
from dynamo_core.kv.sequences import ActiveSequences
from dynamo_core.protocol.events import PlacedLoad


class LoadBoard:
    """Counts requests in when their route is entered, completes their prefill, and counts them out.

    The requests of this process are counted exactly; those of other frontends are added as `others` last heard.
    """

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], ActiveSequences] = {}
        #: Active requests by worker: those of this process, and with them those of others.
        self._requests: dict[int, int] = {}
        self._all_requests: dict[int, int] = {}
        #: What other frontends told. Nothing, unless somebody listens to them.
        self.others = OtherLoads(self._add)
        #: Called with a worker and rank whenever this process changed something there.
        self.on_change: Callable[[tuple[int, int]], None] | None = None

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
        self._all_requests[instance_id] = self._all_requests.get(instance_id, 0) + 1
        self._note(key)
        return Ticket(self, key, attempt_id)

    def requests(self, instance_id: int) -> int:
        """Requests active on a worker now, all ranks together."""
        return self._all_requests.get(instance_id, 0)

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        """Tokens still to be prefilled on a rank."""
        rank = self._ranks.get((instance_id, dp_rank))
        own = rank.prefill_tokens if rank is not None else 0
        return own + self.others.prefill_tokens(instance_id, dp_rank) if self.others else own

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        """Different KV blocks held by active requests on a rank."""
        rank = self._ranks.get((instance_id, dp_rank))
        own = rank.blocks if rank is not None else 0
        return own + self.others.blocks(instance_id, dp_rank) if self.others else own

    @property
    def total_requests(self) -> int:
        """Requests of this process that are active on all workers."""
        return sum(self._requests.values())

    # For those who tell others.

    def own_ranks(self) -> Collection[tuple[int, int]]:
        """Workers and ranks on which this process has requests."""
        return self._ranks.keys()

    def placed(self, key: tuple[int, int]) -> PlacedLoad:
        """What this process has on a worker and rank."""
        rank = self._ranks.get(key)
        if rank is None:
            return PlacedLoad(*key, 0, 0, 0)
        return PlacedLoad(*key, rank.requests, rank.prefill_tokens, rank.blocks)

    # For tickets.

    def prefilled(self, key: tuple[int, int], attempt_id: str) -> None:
        """An attempt has its first item."""
        self._ranks[key].complete_prefill(attempt_id)
        self._note(key)

    def left(self, key: tuple[int, int], attempt_id: str) -> None:
        """An attempt is over."""
        rank = self._ranks[key]
        rank.free(attempt_id)
        if not rank.requests:
            del self._ranks[key]
        left = self._requests[key[0]] - 1
        if left:
            self._requests[key[0]] = left
        else:
            del self._requests[key[0]]
        self._add(key[0], -1)
        self._note(key)

    def _add(self, instance_id: int, requests: int) -> None:
        total = self._all_requests.get(instance_id, 0) + requests
        # A worker that is gone must leave nothing here.
        if total:
            self._all_requests[instance_id] = total
        else:
            self._all_requests.pop(instance_id, None)

    def _note(self, key: tuple[int, int]) -> None:
        if self.on_change is not None:
            self.on_change(key)


class Ticket:
    """One attempt on the board."""

    __slots__ = ("_attempt_id", "_board", "_key")

    def __init__(self, board: LoadBoard, key: tuple[int, int], attempt_id: str) -> None:
        self._board: LoadBoard | None = board
        self._key = key
        self._attempt_id = attempt_id

    def first_item(self) -> None:
        """The prompt has been prefilled."""
        if self._board is not None:
            self._board.prefilled(self._key, self._attempt_id)

    def leave(self) -> None:
        """Counts the attempt out. Safe twice."""
        board, self._board = self._board, None
        if board is not None:
            board.left(self._key, self._attempt_id)
