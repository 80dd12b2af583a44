"""The load tracker: the work that frontends have placed on every worker and rank, for any router."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dynamo_core.contracts.router import Route, RouteWatcher
from dynamo_core.kv.chains import ActiveChains
from dynamo_core.protocol.events import PlacedLoad

from dynamo_runtime.dispatch.load.peer_loads import PeerLoads
from dynamo_runtime.dispatch.load.used_blocks import Report, UsedBlocks


class LoadTracker:
    """Counts requests in when their route is reserved, completes their prefill, and counts them out.

    The requests of this process are counted exactly; those of other frontends are added as `peers` last reported.
    """

    def __init__(self) -> None:
        self._ranks = ActiveChains()
        self._used = UsedBlocks()
        #: Active requests by worker: those of this process, and with them those of others.
        self._requests: dict[int, int] = {}
        self._all_requests: dict[int, int] = {}
        #: What other frontends reported. Empty unless `PeerLoadSync` receives their messages.
        self.peers = PeerLoads(self._add, self._peers_changed)
        #: Called with a worker and rank whenever this process changed something there.
        self.on_change: Callable[[tuple[int, int]], None] | None = None
        #: The same, and also when others did.
        self.on_load: Callable[[tuple[int, int]], None] | None = None
        self._watchers: tuple[Callable[[], None], ...] = ()

    def reserve(
        self,
        route: Route,
        attempt_id: str,
        *,
        prompt_tokens: int,
        block_size: int | None,
        hashes: Sequence[int],
        held_tokens: int = 0,
    ) -> Reservation:
        """Count an attempt in; the reservation counts it out. Cached blocks of the route are not prefilled again.

        `held_tokens` are those whose KV cache it holds from the beginning, even if another worker computes them.
        They fill the blocks that `hashes` name; blocks beyond these count without a name.
        """
        instance_id = route.instance.instance_id
        key = (instance_id, route.dp_rank)
        cached = route.overlap * (block_size or 0)
        unhashed = max(0, -(-held_tokens // block_size) - len(hashes)) if block_size else 0
        added = self._ranks.add(key, attempt_id, hashes, max(0, prompt_tokens - cached), unhashed)
        report = self._used.last(key)
        if report is not None:
            report.placed += added
        self._requests[instance_id] = self._requests.get(instance_id, 0) + 1
        self._all_requests[instance_id] = self._all_requests.get(instance_id, 0) + 1
        self._note(key)
        if route.watcher is not None:
            route.watcher.entered(attempt_id)
        return Reservation(self, key, attempt_id, route.watcher, report, added)

    def requests(self, instance_id: int) -> int:
        """Return the requests active on a worker now, all ranks together."""
        return self._all_requests.get(instance_id, 0)

    def own_requests(self, instance_id: int) -> int:
        """See `ObservedLoads.own_requests`."""
        return self._requests.get(instance_id, 0)

    def own_prefill_tokens(self, instance_id: int, dp_rank: int) -> int:
        """See `ObservedLoads.own_prefill_tokens`."""
        return self._ranks.prefill_tokens((instance_id, dp_rank))

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        """Return tokens still to be prefilled on a rank."""
        own = self._ranks.prefill_tokens((instance_id, dp_rank))
        return own + self.peers.prefill_tokens(instance_id, dp_rank) if self.peers else own

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        """Return different KV blocks held by active requests on a rank."""
        own = self._ranks.blocks((instance_id, dp_rank))
        return own + self.peers.blocks(instance_id, dp_rank) if self.peers else own

    def used_blocks(self, instance_id: int, dp_rank: int, block_size: int | None) -> int:
        """Return KV blocks in use on a rank, by what its worker reported and what was placed; see `UsedBlocks`."""
        key = (instance_id, dp_rank)
        uncomputed = -(-self.prefill_tokens(instance_id, dp_rank) // block_size) if block_size else 0
        return self._used.used(key, self._ranks.held(key), self.peers.held(instance_id, dp_rank), uncomputed)

    def reported(self, key: tuple[int, int], blocks: int, now: float) -> None:
        """Record how many KV blocks a worker reported in use on a rank; heard at `now`, seconds of the loop's clock."""
        self._used.report(key, blocks, self._ranks.held(key), self.peers.held(*key), now)

    def forget_reports(self, key: tuple[int, int]) -> None:
        """Forget the worker's reports of a rank."""
        self._used.forget(key)

    def loads(self, ranks: Sequence[tuple[int, int]], chain: Sequence[int] = ()) -> Sequence[tuple[int, int, int]]:
        """Return of many ranks the tokens to be prefilled, the blocks held, and how many of a chain are among them."""
        loads, peers = self._ranks.loads(ranks, chain), self.peers
        if not peers:
            return loads
        return [
            (tokens + peers.prefill_tokens(*rank), blocks + peers.blocks(*rank), shared)
            for rank, (tokens, blocks, shared) in zip(ranks, loads, strict=True)
        ]

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back whenever this process changed something, until what is returned is called."""
        self._watchers = (*self._watchers, callback)

        def end() -> None:
            self._watchers = tuple(watcher for watcher in self._watchers if watcher is not callback)

        return end

    @property
    def total_requests(self) -> int:
        """Requests of this process that are active on all workers."""
        return sum(self._requests.values())

    # For the other frontends.

    def own_ranks(self) -> Collection[tuple[int, int]]:
        """Return workers and ranks on which this process has requests."""
        return self._ranks.ranks

    def placed(self, key: tuple[int, int]) -> PlacedLoad:
        """Return what this process has on a worker and rank."""
        ranks = self._ranks
        return PlacedLoad(*key, ranks.requests(key), ranks.prefill_tokens(key), ranks.blocks(key), ranks.held(key))

    # For reservations.

    def prefilled(self, key: tuple[int, int], attempt_id: str) -> None:
        """Record that an attempt has its first item."""
        self._ranks.complete_prefill(key, attempt_id)
        self._note(key)

    def released(self, key: tuple[int, int], attempt_id: str) -> None:
        """Record that an attempt is over."""
        self._ranks.free(key, attempt_id)
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
        for watcher in self._watchers:
            watcher()
        if self.on_load is not None:
            self.on_load(key)

    def _peers_changed(self, key: tuple[int, int], more: int, now: float) -> None:
        if more:
            self._used.others_changed(key, more, now)
        if self.on_load is not None:
            self.on_load(key)


class Reservation:
    """One attempt on the tracker."""

    __slots__ = ("_attempt_id", "_blocks", "_key", "_report", "_tracker", "_watcher")

    def __init__(
        self,
        tracker: LoadTracker,
        key: tuple[int, int],
        attempt_id: str,
        watcher: RouteWatcher | None,
        report: Report | None,
        blocks: int,
    ) -> None:
        """`report` is the worker's last one when the attempt was counted in, to which it added so many blocks."""
        self._tracker: LoadTracker | None = tracker
        self._key = key
        self._attempt_id = attempt_id
        self._watcher = watcher
        self._report = report
        self._blocks = blocks

    @property
    def contended(self) -> bool:
        """Whether prompts wait, or are being prefilled, on the rank that it is for."""
        return self._tracker is not None and self._tracker.prefill_tokens(*self._key) > 0

    def first_item(self) -> None:
        """Record that the prompt has been prefilled."""
        if self._tracker is not None:
            self._tracker.prefilled(self._key, self._attempt_id)
            if self._watcher is not None:
                self._watcher.prefilled()

    def release(self) -> None:
        """Count the attempt out. Safe twice."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            if self._report is not None:
                self._report.placed -= self._blocks
            tracker.released(self._key, self._attempt_id)
            if self._watcher is not None:
                self._watcher.left()
