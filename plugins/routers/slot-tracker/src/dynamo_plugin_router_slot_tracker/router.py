"""A router that asks a slot tracker for the load of each rank, and uses core's own load without one."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import struct
from collections.abc import Collection, Sequence

from dynamo_core import (
    Phase,
    PluginConfig,
    PoolView,
    Route,
    Router,
    RouterServices,
    RoutingRequest,
    SettingsMismatch,
    TaskSet,
    no_worker,
)
from dynamo_core.errors import ConfigError, InvalidArgument
from dynamo_core.kv import to_signed, unshared_blocks
from dynamo_core.protocol import Instance, ModelCard
from pydantic import Field, field_validator

from dynamo_plugin_router_slot_tracker.client import Refused, ServiceClient, ServiceUnreachable
from dynamo_plugin_router_slot_tracker.reservations import Reservation, Reservations
from dynamo_plugin_router_slot_tracker.schemas import (
    DEFAULT_TENANT,
    Addition,
    Projection,
    Registration,
    Unregistration,
)

log = logging.getLogger(__name__)

#: Seconds between two looks at the pool.
_LOOK = 1.0

#: Names a worker and a rank of it.
_RankKey = tuple[int, int]


class SlotTrackerConfig(PluginConfig):
    """The address of the service, and its timeout."""

    url: str = Field(default="http://127.0.0.1:8091", description="The service: scheme, host and port.")
    tenant_id: str = Field(default=DEFAULT_TENANT, description="The tenant that its workers are registered under.")
    token: str | None = Field(default=None, description="The bearer token that the service asks for; null sends none.")
    ca: str | None = Field(
        default=None, description="PEM file with the authority of its certificate, if a private one."
    )
    timeout: float = Field(default=0.5, gt=0, description="Seconds for one answer of the service.")
    pause: float = Field(
        default=1.0,
        ge=0,
        description="Seconds that a service which did not answer is left alone; loads decide meanwhile.",
    )
    expiry: float = Field(
        default=300.0,
        gt=0,
        description="Seconds after which the service expires a request, its `--expiry`: so long a `/free` is repeated.",
    )
    block_size: int = Field(default=16, ge=1, description="Tokens of a block for workers that do not say it.")
    seed: int | None = Field(default=None, description="Makes the choice among equals repeatable, for tests.")

    @field_validator("url")
    @classmethod
    def _url_holds_no_secret(cls, value: str) -> str:
        if any(sign in value for sign in "@?#"):
            raise SettingsMismatch("holds more than scheme, host and port, which would show in logs: set `token`")
        return value


class SlotTrackerRouter(Router):
    """Takes the rank with the least to prefill and to hold, in blocks, as the service projects it.

    Workers are made known to the service as they come and go; requests as they are placed, prefilled and over.
    """

    NAME = "slot-tracker"
    Config = SlotTrackerConfig

    def __init__(self, config: SlotTrackerConfig, services: RouterServices) -> None:
        super().__init__(config, services)
        if not config.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"router.url: {config.url!r} is no address of a service; give one such as http://host:8091"
            )
        self._settings = config
        self._loads = services.tracker
        # Spreads load, keeps no secret.
        self._random = random.Random(config.seed)  # noqa: S311
        self._client = ServiceClient(
            config.url, token=config.token, ca=config.ca, timeout=config.timeout, pause=config.pause
        )
        self._reservations = Reservations(self._client, expiry=config.expiry)
        self._tasks = TaskSet()
        self._watching = TaskSet()
        #: Workers that the service should know, those that it will not, and the pool's version that they are of.
        self._registered: set[int] = set()
        self._refused: set[int] = set()
        self._version = -1
        #: Whether the service has forgotten some of them.
        self._forgotten = False
        decisions = services.metrics.counter(
            "dynamo_router_slot_tracker_decisions_total",
            "Decisions by source: service (costs of the slot tracker), load (without them, the frontend's figures).",
            ("source",),
        )
        self._by_service = decisions.labels("service")
        self._by_load = decisions.labels("load")

    async def start(self) -> None:
        """Begin to tell the service of requests."""
        self._reservations.start()
        self._watching.spawn(self._watch(self.services.pool), name="slot-tracker-pool")

    async def route(self, request: RoutingRequest, pool: PoolView) -> Route:
        """Ask the service, within the deadline of one call; see `Router.route`.

        Raises:
            InvalidArgument: a token id is none.
        """
        if not pool.eligible(request.excluded):
            raise no_worker(pool)
        self._follow(pool)
        block_size = self._block_size(pool)
        decodes = request.phase is Phase.DECODE
        if decodes:
            # It is brought the blocks of its prompt: those that it holds already save nothing, and none are shared.
            tokens, hashes = 0, _unshared(len(request.request.token_ids) // block_size)
        else:
            tokens, hashes = len(request.request.token_ids), _hashes(request, block_size)
        costs = await self._ask(pool, block_size, [] if decodes else hashes, tokens)
        # Workers may have come, gone or become busy meanwhile.
        eligible = pool.eligible(request.excluded)
        if not eligible:
            raise no_worker(pool)
        ranks = _ranks_of(pool, eligible)
        known = [(rank, costs[rank]) for rank in ranks if rank in costs]
        if known:
            self._by_service.inc()
        else:
            self._by_load.inc()
            known = list(zip(ranks, self._own_costs(ranks, block_size), strict=True))
        instance_id, dp_rank = self._cheapest(known)

        def addition(attempt_id: str) -> Addition:
            return Addition(
                model_name=pool.model,
                tenant_id=self._settings.tenant_id,
                request_id=attempt_id,
                worker_id=instance_id,
                dp_rank=dp_rank,
                sequence_hashes=hashes,
                new_isl_tokens=tokens,
            )

        weight = len(hashes) + tokens / block_size
        watcher = Reservation(self._reservations, (instance_id, dp_rank), weight, addition)
        blocks = unshared_blocks(len(hashes)) if decodes else None
        return Route(pool.instances[instance_id], dp_rank, blocks=blocks, prefill=not decodes, watcher=watcher)

    async def aclose(self) -> None:
        """Tell the service what is left, for a moment, and leave. Its workers stay: other frontends may have them."""
        await self._watching.aclose()
        await self._tasks.aclose()
        await self._reservations.aclose()
        await self._client.aclose()

    async def _ask(self, pool: PoolView, block_size: int, hashes: list[int], tokens: int) -> dict[_RankKey, float]:
        """Return the cost of each rank that the service knows, in blocks; empty if it cannot be asked."""
        if not self._client.usable:
            return {}
        projection = Projection(
            model_name=pool.model,
            tenant_id=self._settings.tenant_id,
            sequence_hashes=hashes,
            new_isl_tokens=tokens,
        )
        try:
            loads = await self._client.potential_loads(projection)
        except ServiceUnreachable:
            return {}
        except Refused as refused:
            if refused.status != 404:
                return {}
            # It has been restarted, or was never told.
            loads = []
        unknown = self._reservations.unknown
        costs: dict[_RankKey, float] = {}
        for load in loads:
            rank = (load.worker_id, load.dp_rank)
            cost = load.potential_prefill_tokens / block_size + load.potential_decode_blocks
            costs[rank] = cost + unknown.get(rank, 0.0)
        answered = {worker_id for worker_id, _ in costs}
        if forgotten := self._registered - answered:
            self._registered -= forgotten
            self._forgotten = True
            self._follow(pool)
        return costs

    def _own_costs(self, ranks: Sequence[_RankKey], block_size: int) -> list[float]:
        loads = self._loads
        return [
            loads.prefill_tokens(*rank) / block_size + loads.blocks(*rank) + loads.requests(rank[0]) for rank in ranks
        ]

    def _cheapest(self, costs: Sequence[tuple[_RankKey, float]]) -> _RankKey:
        """Return any of those that cost least."""
        least = min(cost for _, cost in costs)
        return self._random.choice([rank for rank, cost in costs if cost == least])

    def _block_size(self, pool: PoolView) -> int:
        """Return what the workers of the pool say; they agree, as they serve one model."""
        for card in pool.cards.values():
            return card.kv_cache_block_size or self._settings.block_size
        return self._settings.block_size

    # The workers, as the service is to know them.

    async def _watch(self, pool: PoolView) -> None:
        """Watch for workers that come or go while no request asks for any, and for a service that comes later."""
        while True:
            self._follow(pool)
            await asyncio.sleep(_LOOK)

    def _follow(self, pool: PoolView) -> None:
        """Tell the service of workers that came or went, behind the request's back."""
        changed = self._forgotten or pool.version != self._version
        if changed and not len(self._tasks) and self._client.usable:
            self._tasks.spawn(self._register_workers(pool), name="slot-tracker-workers")

    async def _register_workers(self, pool: PoolView) -> None:
        version, self._forgotten = pool.version, False
        here = set(pool.instances)
        self._refused &= here
        tenant = self._settings.tenant_id
        try:
            for worker_id in self._registered - here:
                await self._client.unregister(
                    Unregistration(worker_id=worker_id, model_name=pool.model, tenant_id=tenant)
                )
                self._registered.discard(worker_id)
            for worker_id in here - self._registered - self._refused:
                card = pool.cards.get(worker_id)
                if card is not None:
                    await self._register(pool, worker_id, card)
        except ServiceUnreachable:
            return
        self._version = version

    async def _register(self, pool: PoolView, worker_id: int, card: ModelCard) -> None:
        facts = card.runtime_config
        registration = Registration(
            worker_id=worker_id,
            model_name=pool.model,
            tenant_id=self._settings.tenant_id,
            block_size=card.kv_cache_block_size or self._settings.block_size,
            dp_start=facts.data_parallel_start_rank,
            dp_size=facts.data_parallel_size,
        )
        try:
            await self._client.register(registration)
        except Refused as refused:
            log.warning(
                "the slot tracker does not take worker %016x, which is chosen by load only: %s", worker_id, refused
            )
            self._refused.add(worker_id)
        else:
            self._registered.add(worker_id)


def _hashes(request: RoutingRequest, block_size: int) -> list[int]:
    try:
        return [to_signed(value) for value in request.hashes(block_size)[1]]
    except OverflowError:
        raise InvalidArgument("token_ids holds a number that is no token id of 32 bits") from None


def _unshared(number: int) -> list[int]:
    """Return hashes that no other request has, of any client of the service."""
    return list(struct.unpack(f"{number}q", os.urandom(8 * number)))


def _ranks_of(pool: PoolView, instances: Collection[Instance]) -> list[_RankKey]:
    ranks = []
    for instance in instances:
        facts = pool.cards[instance.instance_id].runtime_config
        start = facts.data_parallel_start_rank
        ranks += [(instance.instance_id, rank) for rank in range(start, start + facts.data_parallel_size)]
    return ranks
