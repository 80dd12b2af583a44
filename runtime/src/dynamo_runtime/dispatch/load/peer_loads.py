"""The load that other frontends have placed on workers, by their last reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dynamo_core.protocol.events import PlacedLoad, PlacedLoads

#: Seconds of silence after which what a frontend told counts no more: it is gone, and its requests with it.
EXPIRY = 3.0

Rank = tuple[int, int]

_NOTHING = PlacedLoad(0, 0, 0, 0, 0, 0)
#: Tokens to be prefilled, blocks with a hash, and all blocks.
_NO_SUMS = (0, 0, 0)


@dataclass(slots=True)
class _Frontend:
    """One frontend's reports, and the time of its last message."""

    number: int = -1
    heard: float = 0.0
    loads: dict[Rank, PlacedLoad] = field(default_factory=dict)


class PeerLoads:
    """Sums over all other frontends, kept as messages come, so that asking costs a look-up.

    A message says how things are, so one that is lost or comes twice does no lasting harm: the next that names the
    rank, and the next whole one, set it right. One that was overtaken is ignored. Times are seconds of one clock.

    `add` is called with a worker and how many requests it has more, or less, on the whole; `changed` with a rank after
    something there has changed, how many blocks requests hold more there, or less, and when that was heard.
    """

    def __init__(self, add: Callable[[int, int], None], changed: Callable[[Rank, int, float], None]) -> None:
        self._add = add
        self._changed = changed
        self._frontends: dict[int, _Frontend] = {}
        self._ranks: dict[Rank, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        """Return how many frontends have been heard of lately."""
        return len(self._frontends)

    def prefill_tokens(self, instance_id: int, dp_rank: int) -> int:
        """Return tokens of others that are still to be prefilled on a rank."""
        return self._ranks.get((instance_id, dp_rank), _NO_SUMS)[0]

    def blocks(self, instance_id: int, dp_rank: int) -> int:
        """Return KV blocks of others on a rank. What two frontends share there counts twice."""
        return self._ranks.get((instance_id, dp_rank), _NO_SUMS)[1]

    def held(self, instance_id: int, dp_rank: int) -> int:
        """Return the same, and beside them the blocks of which no hash is known."""
        return self._ranks.get((instance_id, dp_rank), _NO_SUMS)[2]

    def apply(self, message: PlacedLoads, now: float) -> None:
        """Take in a message."""
        frontend = self._frontends.get(message.frontend)
        if frontend is None:
            frontend = self._frontends[message.frontend] = _Frontend()
        elif message.number <= frontend.number:
            return
        frontend.number, frontend.heard = message.number, now
        named = {(load.worker_id, load.dp_rank): load for load in message.loads}
        if message.whole:
            self._clear(frontend, [rank for rank in frontend.loads if rank not in named], now)
        for rank, load in named.items():
            self._set(frontend, rank, load, now)

    def expire(self, now: float) -> None:
        """Forget frontends that have been silent for `EXPIRY`."""
        for frontend_id, frontend in list(self._frontends.items()):
            if now - frontend.heard >= EXPIRY:
                self._clear(frontend, list(frontend.loads), now)
                del self._frontends[frontend_id]

    def _clear(self, frontend: _Frontend, ranks: Iterable[Rank], now: float) -> None:
        for rank in ranks:
            self._set(frontend, rank, _NOTHING, now)

    def _set(self, frontend: _Frontend, rank: Rank, load: PlacedLoad, now: float) -> None:
        before = frontend.loads.pop(rank, _NOTHING)
        if load.requests:
            frontend.loads[rank] = load
        else:
            load = _NOTHING
        if load.requests != before.requests:
            self._add(rank[0], load.requests - before.requests)
        tokens, blocks, held = self._ranks.get(rank, _NO_SUMS)
        more = _held(load) - _held(before)
        sums = (tokens + load.prefill_tokens - before.prefill_tokens, blocks + load.blocks - before.blocks, held + more)
        # A worker that is gone must leave nothing here.
        if any(sums):
            self._ranks[rank] = sums
        else:
            self._ranks.pop(rank, None)
        self._changed(rank, more, now)


def _held(load: PlacedLoad) -> int:
    # A frontend of an earlier version tells only of blocks that have a hash.
    return load.blocks if load.held is None else load.held
