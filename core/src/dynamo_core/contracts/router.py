"""The router contract: choose the worker of a request. Core keeps the accounting; the router only decides."""

from __future__ import annotations

import enum
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_core import kv
from dynamo_core.contracts.config import PluginConfig, PluginRef
from dynamo_core.contracts.discovery import Discovery
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.requests.principal import ANONYMOUS, Principal
from dynamo_core.contracts.transports.call import Endpoint
from dynamo_core.contracts.transports.events import EventPlane
from dynamo_core.errors import DynamoError, PluginError, ServiceOverloaded, Unavailable
from dynamo_core.protocol.records import Instance, ModelCard
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import AsyncResource


class PoolView(Protocol):
    """The workers of one model in one role, as a router sees them. Reading it never waits."""

    @property
    def model(self) -> str:
        """The model's public name."""

    @property
    def role(self) -> str:
        """``aggregated``, ``prefill`` or ``decode``."""

    @property
    def version(self) -> int:
        """Counts up with every change of `instances`."""

    @property
    def instances(self) -> Mapping[int, Instance]:
        """All registered workers by instance id."""

    @property
    def cards(self) -> Mapping[int, ModelCard]:
        """Their model cards by instance id."""

    @property
    def in_service(self) -> Set[int]:
        """The `instances` that take new requests: neither cordoned nor draining, but perhaps busy or down."""

    def eligible(self, excluded: Collection[int] = ()) -> Sequence[Instance]:
        """Return workers that may be routed to now: in service, not excluded, not reported down, not busy.

        In order of registration.
        """


class LoadView(Protocol):
    """The load that core accounts for, per worker and rank."""

    def requests(self, instance_id: int) -> int:
        """Return the requests active on a worker now, all ranks together."""

    def prefill_tokens(self, instance_id: int, dp_rank: int = 0) -> int:
        """Return tokens still to be prefilled on a rank."""

    def blocks(self, instance_id: int, dp_rank: int = 0) -> int:
        """Return different KV blocks held by active requests on a rank."""

    def loads(self, ranks: Sequence[tuple[int, int]], chain: Sequence[int] = ()) -> Sequence[tuple[int, int, int]]:
        """Return the loads of many ranks (instance id and rank).

        They are tokens still to be prefilled, different KV blocks held, and how many blocks of `chain`, sequence hashes
        from the start of a prompt, active requests of this process hold.
        """

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` whenever a request of this process comes to a worker, has its prompt prefilled, or leaves.

        Return a function that unregisters it. The callback must be quick.
        """


class Phase(enum.StrEnum):
    """The part of a request that a worker is chosen for."""

    #: The whole inference.
    AGGREGATED = "aggregated"
    #: The prompt: its KV cache is computed and handed to a decode worker.
    PREFILL = "prefill"
    #: The answer, from a KV cache that a prefill worker hands over. Blocks of the prompt in the worker's own cache save
    #: nothing: a router gives no credit for overlap, does not count on shared blocks, and counts no tokens to be
    #: prefilled (nor does the load tracker). The request's `router_config_override` says the same.
    DECODE = "decode"


@dataclass(slots=True)
class RoutingRequest:
    """A request as routers see it. Hashes are computed once, on first use."""

    request: PreprocessedRequest
    request_id: str
    #: Workers already tried for this request, in this phase.
    excluded: frozenset[int] = frozenset()
    phase: Phase = Phase.AGGREGATED
    #: Who asks; anonymous where an operator asks what a router would choose.
    principal: Principal = ANONYMOUS
    #: How many ranks `Route.candidates` is to list; 0 for none.
    wants_candidates: int = 0
    _hashes: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    _blocks: dict[int, list[int]] = field(default_factory=dict)

    def in_phase(self, phase: Phase, request: PreprocessedRequest) -> RoutingRequest:
        """Return a copy to choose another worker: `request` has the same prompt, so that known hashes are kept."""
        return RoutingRequest(request, self.request_id, phase=phase, principal=self.principal, _hashes=self._hashes)

    def known_hashes(self, block_size: int | None) -> list[int]:
        """Return the sequence hashes of the prompt if a router has computed them, else none."""
        known = self._hashes.get(block_size) if block_size else None
        return known[1] if known is not None else []

    def hashes(self, block_size: int) -> tuple[list[int], list[int]]:
        """Block hashes and sequence hashes of the prompt for a block size.

        Raises:
            OverflowError: a token id does not fit 32 bits.
        """
        known = self._hashes.get(block_size)
        if known is None:
            blocks = self.block_hashes(block_size)
            known = self._hashes[block_size] = (blocks, kv.sequence_hashes(blocks))
        return known

    def block_hashes(self, block_size: int) -> list[int]:
        """Return the first half of `hashes` alone. Raise as that does."""
        blocks = self._blocks.get(block_size)
        if blocks is None:
            hints = self.request.routing
            blocks = self._blocks[block_size] = kv.block_hashes(
                self.request.token_ids,
                block_size,
                lora_name=hints.lora_name if hints is not None else None,
                cache_salt=hints.cache_salt if hints is not None else None,
            )
        return blocks


class RouteWatcher(Protocol):
    """The load tracker calls it for a request on its route, in this order. Must be quick, and not raise."""

    def entered(self, attempt_id: str) -> None:
        """Count the request on the worker from now on. Not called for a route that is not taken."""

    def prefilled(self) -> None:
        """Record that its first item came. May be called more than once, or not at all."""

    def left(self) -> None:
        """Record that the request has ended. Called once for each route that was entered."""


@dataclass(frozen=True, slots=True)
class Route:
    """A decision: the worker, its rank, and how many blocks of the prompt it already holds.

    `blocks` are what the load tracker is to count as held by the request; None: the prompt's own, if the router has
    asked for their hashes. Without `prefill` no tokens count as to be prefilled. A `watcher` is told what becomes of
    the request. `candidates` are what `RoutingRequest.wants_candidates` asks for, by cost, with the chosen one among
    them; None from a router without costs.
    """

    instance: Instance
    dp_rank: int = 0
    overlap: int = 0
    blocks: Sequence[int] | None = None
    prefill: bool = True
    watcher: RouteWatcher | None = None
    candidates: Sequence[ScoredRank] | None = None


@dataclass(frozen=True, slots=True)
class ScoredRank:
    """One rank, as a router rates it for a request. Overlap and load are in blocks, `prefill_tokens` in tokens.

    `shared` are blocks of the prompt that running requests hold there. The rank with the lowest `cost` is chosen, or
    is the likeliest. A router that goes by more than costs marks what it would choose as `preferred`; then those that
    are not are not chosen.
    """

    instance_id: int
    dp_rank: int
    overlap: int
    prefill_tokens: int
    blocks: int
    shared: int
    cost: float
    preferred: bool = False


def _wraps_none(ref: PluginRef) -> Router:
    raise PluginError(f"the section of this router picks no router {ref.use!r} that it could wrap")


@dataclass(frozen=True, slots=True)
class RouterServices:
    """The services that a router is constructed with.

    `inner` makes the router that a section such as `then` picks, with the same services. The router that asks for it
    starts it and closes it.
    """

    pool: PoolView
    tracker: LoadView
    events: EventPlane
    directory: Discovery
    metrics: MetricsScope
    call: EndpointCaller
    inner: Callable[[PluginRef], Router] = _wraps_none


class EndpointCaller(Protocol):
    """Calls an endpoint of a worker and collects its items."""

    async def __call__(
        self, instance: Instance, endpoint: Endpoint, request: object, *, timeout: float
    ) -> list[object]:
        """Return all items of the stream.

        Raises:
            DynamoError: the call was refused, failed, or took longer than `timeout` seconds.
        """


def no_worker(pool: PoolView) -> DynamoError:
    """Return why no worker of the pool is eligible: `ServiceOverloaded` if one is in service, else `Unavailable`."""
    if pool.in_service:
        return ServiceOverloaded()
    if pool.instances:
        return Unavailable(f"all {pool.role} workers of model {pool.model!r} are cordoned or draining")
    return Unavailable(f"no worker serves model {pool.model!r} now")


class Router(Plugin, AsyncResource):
    """Chooses a worker. One object per pool.

    A router must not keep count of running requests: entering a route on the load tracker does, whatever the router.
    """

    def __init__(self, config: PluginConfig, services: RouterServices) -> None:
        self.config = config
        self.services = services

    async def start(self) -> None:
        """Start background work, such as reading events. Called once."""

    @abstractmethod
    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        """Choose among ``pool.eligible(request.excluded)``.

        Raises:
            ServiceOverloaded: workers exist but none may be routed to now.
            Unavailable: there are no workers.
        """

    @property
    def follows_caches(self) -> bool:
        """Whether `explain` tells overlaps as the workers report their caches, rather than from what was routed."""
        return False

    def explain(self, request: RoutingRequest, pool: PoolView) -> Sequence[ScoredRank] | None:
        """Rate every rank that may be chosen for a request now, without choosing or counting anything.

        None, the default: the router has no costs.

        Raises:
            DynamoError: as `route`.
        """
        return None

    async def aclose(self) -> None:
        """Stop background work. Safe twice, and without `start`."""
