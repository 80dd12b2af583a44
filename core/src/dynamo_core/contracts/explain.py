"""Why a request would be routed where it would be: what operators are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a worker, for one prompt. Load is that of the load tracker.

    `state` is ``free``, ``busy``, ``down`` or ``full``. `overlap`, `shared` and `cost` are None where the router goes
    by nothing of the kind, or the rank may not be chosen; `overlap` and `shared` are in blocks of the prompt.
    """

    instance_id: int
    worker: str
    dp_rank: int
    state: str
    requests: int
    prefill_tokens: int
    blocks: int
    overlap: int | None = None
    shared: int | None = None
    cost: float | None = None
    #: Whether it costs least. None where the router tells no costs.
    best: bool | None = None


@dataclass(frozen=True, slots=True)
class RouteView:
    """The workers of one role as a prompt finds them now, and `router`, the name of what chooses among them.

    `refusal` says why none of them can be chosen, if so.
    """

    role: str
    router: str
    tokens: int
    block_size: int | None
    ranks: Sequence[RankView]
    refusal: str | None = None
