"""The harness of the router checks: a pool of workers, a real load tracker, and requests in every phase."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import ClassVar, TypeAlias

import msgspec
from dynamo_core.contracts.router import Phase, Route, Router, RouterServices, RoutingRequest
from dynamo_core.contracts.transports.call import Endpoint
from dynamo_core.errors import NotSupported, ServiceOverloaded, Unavailable
from dynamo_core.kv.hashes import block_hashes, sequence_hashes
from dynamo_core.protocol.events import KV_EVENTS, KvBlock, KvEvent, KvStored, RouterEvent
from dynamo_core.protocol.records import AGGREGATED, Instance, ModelCard, RuntimeConfig
from dynamo_core.protocol.request import PreprocessedRequest, RouterConfigOverride, RoutingHints
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_telemetry.metrics import Metrics

from dynamo_testing.optional_packages import pytest
from dynamo_testing.router.doubles import CountingTracker, EmptyDirectory, KitEvents, KitPool

#: Makes the router under test, not yet started.
RouterFactory: TypeAlias = Callable[[RouterServices], Router]

MODEL = "kit-model"
#: Tokens of a block, as the cards say.
BLOCK = 4


class Fleet:
    """One router, and the workers that a check gives it."""

    def __init__(self, make_router: RouterFactory, wait: float, role: str = AGGREGATED) -> None:
        self.pool = KitPool(MODEL, role)
        self.load = LoadTracker()
        self.tracker = CountingTracker(self.load)
        self.events = KitEvents()
        self.wait = wait
        self._numbers = count()
        self._told: dict[tuple[int, int], int] = {}
        self.router = make_router(self.services(self.pool))

    def services(self, pool: KitPool) -> RouterServices:
        """Return what a router of a pool is made with; all see one load tracker."""
        return RouterServices(pool, self.tracker, self.events, EmptyDirectory(), Metrics(), no_worker_answers)

    # The workers.

    def add(self, *workers: int, ranks: int = 1, first_rank: int = 0, block_size: int | None = BLOCK) -> None:
        """Add workers."""
        facts = RuntimeConfig(data_parallel_size=ranks, data_parallel_start_rank=first_rank, enable_local_indexer=False)
        for number in workers:
            card = ModelCard(
                name=MODEL,
                instance_id=number,
                worker_type=self.pool.role,
                kv_cache_block_size=block_size,
                runtime_config=facts,
            )
            self.pool.add(Instance(instance_id=number), card)

    def set_state(self, worker: int, state: str) -> None:
        """Take a worker out of service, or bring it back, as an operator does."""
        pool = self.pool
        pool.add(msgspec.structs.replace(pool.instances[worker], state=state), pool.cards[worker])

    def tell(self, worker: int, tokens: Sequence[int], rank: int = 0) -> None:
        """Report that a worker's cache holds the blocks of a prompt."""
        blocks = block_hashes(tokens, BLOCK)
        number = self._told.get((worker, rank), 0)
        self._told[worker, rank] = number + 1
        pairs = zip(sequence_hashes(blocks), blocks, strict=True)
        stored = KvStored([KvBlock(own, of_tokens) for own, of_tokens in pairs])
        self.events.send(KV_EVENTS, msgspec.msgpack.encode([RouterEvent(worker, KvEvent(number, stored, rank), 1)]))

    # The requests.

    def asked(
        self,
        tokens: Sequence[int] | None = None,
        *,
        excluded: Sequence[int] = (),
        phase: Phase = Phase.AGGREGATED,
        hints: RoutingHints | None = None,
    ) -> RoutingRequest:
        """Return a request as core makes one; without tokens, one of ten that no other has."""
        number = next(self._numbers)
        override = None
        if phase is Phase.DECODE:
            override = RouterConfigOverride(overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False)
        request = PreprocessedRequest(
            model=MODEL,
            token_ids=list(tokens) if tokens is not None else range_of(number),
            routing=hints,
            router_config_override=override,
        )
        return RoutingRequest(request, f"kit-{number}", frozenset(excluded), phase)

    async def route(self, asked: RoutingRequest | None = None, *, router: Router | None = None) -> Route:
        """Return a choice, within the time that anything may take; it must be of a worker that is there."""
        try:
            async with asyncio.timeout(self.wait):
                route = await (router or self.router).route(asked or self.asked(), self.pool)
        except TimeoutError:
            raise AssertionError(f"no worker was chosen within {self.wait} s, and no error was raised") from None
        assert route.instance is self.pool.instances.get(route.instance.instance_id), "this worker is not in the pool"
        return route

    async def refusal(self, asked: RoutingRequest | None = None) -> ServiceOverloaded | Unavailable:
        """Return why no worker can be chosen; a choice is a failure."""
        try:
            route = await self.route(asked)
        except (ServiceOverloaded, Unavailable) as error:
            return error
        raise AssertionError(f"worker {route.instance.instance_id} was chosen where none may be")

    def reserve(self, route: Route, asked: RoutingRequest) -> Reservation:
        """Take the route, as core does."""
        prefills = route.prefill and asked.phase is not Phase.DECODE
        size = self.pool.cards[route.instance.instance_id].kv_cache_block_size
        return self.load.reserve(
            route,
            f"{asked.request_id}-{next(self._numbers)}",
            prompt_tokens=len(asked.request.token_ids) if prefills else 0,
            block_size=size,
            hashes=route.blocks if route.blocks is not None else asked.known_hashes(size),
            held_tokens=len(asked.request.token_ids),
        )

    async def placed(self, asked: RoutingRequest | None = None) -> tuple[Route, Reservation]:
        """Return a request that is chosen for, and entered."""
        asked = asked or self.asked()
        route = await self.route(asked)
        return route, self.reserve(route, asked)

    # What there is to see.

    def ranks(self) -> list[tuple[int, int]]:
        """Return all ranks of the workers that are there."""
        found = []
        for number, card in self.pool.cards.items():
            start, size = card.runtime_config.data_parallel_start_rank, card.runtime_config.data_parallel_size
            found += [(number, rank) for rank in range(start, start + size)]
        return found

    def counted(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Return what the tracker counts, of the ranks where there is anything."""
        found = {}
        for rank in self.ranks():
            seen = (self.load.requests(rank[0]), self.load.prefill_tokens(*rank), self.load.blocks(*rank))
            if any(seen):
                found[rank] = seen
        return found


async def no_worker_answers(instance: Instance, endpoint: Endpoint, request: object, *, timeout: float) -> list[object]:
    """Return the caller of a kit; see `EndpointCaller`."""
    raise NotSupported("workers of the kit cannot be asked")


def range_of(number: int, length: int = 10) -> list[int]:
    """Return tokens of a prompt that begins as that of no other number."""
    return list(range(1000 * number, 1000 * number + length))


@pytest.mark.asyncio
class RouterHarness:
    """The author's part of a router kit: the fixture `make_router`, perhaps `held`, and some attributes."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0
    #: Whether a request can name the worker and the rank that it is to go to.
    CAN_PIN: ClassVar[bool] = False
    #: How many looks at the load tracker one choice takes at most, for each rank that may be chosen.
    READS_PER_RANK: ClassVar[int] = 3

    @pytest.fixture
    def make_router(self) -> RouterFactory:
        """Make the router from its services. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_router` that returns a function of RouterServices")

    def held(self, router: Router) -> int:
        """Return how much the router holds for requests now, such as places in a queue; 0 for one that holds none."""
        return 0

    @pytest.fixture
    async def fleet(self, make_router: RouterFactory) -> AsyncIterator[Fleet]:
        """Yield the started router, and three workers with nothing to do."""
        async with self.running(make_router) as fleet:
            fleet.add(1, 2, 3)
            yield fleet

    @asynccontextmanager
    async def running(self, make_router: RouterFactory, role: str = AGGREGATED) -> AsyncIterator[Fleet]:
        """Yield a started router without workers."""
        fleet = Fleet(make_router, self.WAIT, role)
        await fleet.router.start()
        try:
            yield fleet
        finally:
            await fleet.router.aclose()

    async def let_go(self, router: Router) -> None:
        """Return once the router holds nothing."""
        await self.until(lambda: not self.held(router), "the router still holds something for requests")

    async def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Return once a condition holds; `otherwise` says what is wrong if it never does."""
        try:
            async with asyncio.timeout(self.WAIT):
                while not condition():  # noqa: ASYNC110 - what is waited for need not be told
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"after {self.WAIT} s {otherwise}") from None
