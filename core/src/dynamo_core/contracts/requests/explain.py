"""Views for operators: why a request would be routed to a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank of a worker, for one prompt. Load is that of the load tracker.

    `state` is ``free``, ``busy``, ``down``, ``full``, ``cordoned`` or ``draining``. `overlap`, `shared` and `cost` are
    None if the router does not use them, or if the rank may not be chosen; `overlap` and `shared` are in blocks of the
    prompt.
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
    #: Whether the router would choose it, or one like it. None if the router reports no costs.
    best: bool | None = None


@dataclass(frozen=True, slots=True)
class RouteView:
    """The workers of one role as a prompt finds them now. `router` is the name of the router plugin.

    `refusal` says why no worker can be chosen, if so.
    """

    role: str
    router: str
    tokens: int
    block_size: int | None
    ranks: Sequence[RankView]
    refusal: str | None = None
