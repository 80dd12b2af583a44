"""The router against a real service: what it chooses, what the service learns, and what happens without one."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from dynamo_core import Phase, PreprocessedRequest, Route, RouterServices, RoutingRequest
from dynamo_core.errors import ConfigError, InvalidArgument, Unavailable
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import RuntimeConfig
from dynamo_plugin_router_slot_tracker.router import SlotTrackerConfig, SlotTrackerRouter
from dynamo_plugin_router_slot_tracker.schemas import Addition, Registration, Unregistration
from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings
from dynamo_runtime.dispatch.load.tracker import LoadTracker
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics
from dynamo_testing.faults import BlackHole, Direction, FaultProxy, HalfOpen, Raw

from plugins.conftest import until

TOKEN = "a-token-that-is-long-enough"


class House:
    """A pool, a tracker, a service, and a router between them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.pool = Pool("m", "aggregated")
        self.tracker = LoadTracker()
        self.metrics = Metrics()
        self.service: Service | None = None
        self._numbers = 0

    def worker(self, instance_id: int, ranks: int = 1, block_size: int | None = 4) -> None:
        facts = RuntimeConfig(data_parallel_size=ranks)
        card = ModelCard(name="m", instance_id=instance_id, kv_cache_block_size=block_size, runtime_config=facts)
        self.pool.add(Instance(instance_id=instance_id), card)

    async def serve(self, port: int = 0, **settings: Any) -> Service:
        self.service = Service(ServiceSettings(host="127.0.0.1", port=port, **settings))
        self._stack.push_async_callback(self.service.aclose)
        await self.service.start()
        return self.service

    async def router(self, url: str | None = None, **settings: Any) -> SlotTrackerRouter:
        services = RouterServices(
            pool=self.pool,
            tracker=self.tracker,
            events=cast(Any, None),
            directory=cast(Any, None),
            metrics=self.metrics,
            call=cast(Any, None),
        )
        if url is None:
            assert self.service is not None
            url = self.service.listener.url
        router = SlotTrackerRouter(SlotTrackerConfig(url=url, **({"seed": 1, "timeout": 5} | settings)), services)
        self._stack.push_async_callback(router.aclose)
        await router.start()
        return router

    async def running(self) -> SlotTrackerRouter:
        """Return a router, and a service that knows the one worker of its pool."""
        self.worker(1)
        await self.serve()
        router = await self.router()
        await self.known()
        return router

    async def known(self) -> None:
        """Return once the service knows the workers of the pool."""
        await until(lambda: self.registered == set(self.pool.instances))

    @property
    def registered(self) -> set[int]:
        assert self.service is not None
        return {worker.worker_id for worker in self.service.registry.workers()}

    @property
    def loads(self) -> dict[tuple[int, int], tuple[int, int]]:
        assert self.service is not None
        return {
            (load.worker_id, load.dp_rank): (load.active_prefill_tokens, load.active_decode_blocks)
            for load in self.service.registry.loads()
        }

    async def proxied(self) -> FaultProxy:
        """Return a service, and a network before it that may fail."""
        service = await self.serve()
        proxy = FaultProxy("127.0.0.1", service.listener.port, framing=Raw())
        return await self._stack.enter_async_context(proxy)

    def elsewhere(self, worker_id: int, blocks: int, tokens: int = 0) -> None:
        """Add a request that another client of the service placed."""
        assert self.service is not None
        self._numbers += 1
        self.service.registry.add(
            Addition(
                model_name="m",
                request_id=f"other{self._numbers}",
                worker_id=worker_id,
                dp_rank=0,
                sequence_hashes=list(range(1000 * self._numbers, 1000 * self._numbers + blocks)),
                new_isl_tokens=tokens,
            )
        )

    def reserve(self, route: Route, name: str, tokens: list[int]) -> Any:
        return self.tracker.reserve(route, name, prompt_tokens=len(tokens), block_size=4, hashes=())

    def decisions(self, source: str) -> float:
        text = self.metrics.render_now().decode()
        for line in text.splitlines():
            if line.startswith(f'dynamo_router_slot_tracker_decisions_total{{source="{source}"}}'):
                return float(line.split()[-1])
        return 0.0


class LateAdd:
    """Stands before a service, and passes each call on; `/add` late, and without an answer."""

    def __init__(self, service: str, when: asyncio.Event) -> None:
        self._service, self._when = service, when
        self._runner = web.ServerRunner(web.Server(self._pass))
        self._adds: list[asyncio.Task[None]] = []
        self.freed = 0
        self.url = ""

    async def __aenter__(self) -> LateAdd:
        self._session = aiohttp.ClientSession()
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._adds)
        await self._session.close()
        await self._runner.cleanup()

    async def _pass(self, http: web.BaseRequest) -> web.Response:
        body = await http.read()
        if http.path == "/add":
            self._adds.append(asyncio.create_task(self._add(body)))
            await self._when.wait()
        async with self._session.post(self._service + http.path, data=body, headers=http.headers) as answer:
            self.freed += http.path == "/free"
            return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")

    async def _add(self, body: bytes) -> None:
        await self._when.wait()
        headers = {"Content-Type": "application/json"}
        async with self._session.post(f"{self._service}/add", data=body, headers=headers):
            pass


def ask(tokens: list[int], *excluded: int, phase: Phase = Phase.AGGREGATED) -> RoutingRequest:
    return RoutingRequest(PreprocessedRequest(token_ids=tokens), "r", frozenset(excluded), phase)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        yield House(stack)


async def test_the_rank_with_the_least_to_do_is_chosen(house: House) -> None:
    for worker in (1, 2, 3):
        house.worker(worker)
    await house.serve()
    router = await house.router()
    await house.known()
    house.elsewhere(1, 5)
    house.elsewhere(2, 1, tokens=40)
    house.elsewhere(3, 3)

    assert (await router.route(ask([7] * 8), house.pool)).instance.instance_id == 3
    assert (await router.route(ask([7] * 8, 3), house.pool)).instance.instance_id == 1
    assert (await router.route(ask([7] * 8, 3, 1), house.pool)).instance.instance_id == 2
    assert (house.decisions("service"), house.decisions("load")) == (3, 0)


async def test_a_prompt_goes_where_its_blocks_are_active(house: House) -> None:
    for worker in (1, 2):
        house.worker(worker)
    await house.serve()
    router = await house.router()
    await house.known()
    prompt = list(range(80))
    first = await router.route(ask(prompt), house.pool)
    reservation = house.reserve(first, "first", prompt)
    reservation.first_item()
    there = (first.instance.instance_id, 0)
    await until(lambda: house.loads[there] == (0, 20))

    # Shared blocks cost nothing, where the other one would have to hold as many anew; what comes on top is a tie.
    house.elsewhere(3 - there[0], 1)
    for number in range(5):
        assert (await router.route(ask([*prompt, number]), house.pool)).instance.instance_id == there[0]
    # A decode worker is brought its blocks: only what it is busy with counts.
    decode = await router.route(ask(prompt, phase=Phase.DECODE), house.pool)
    assert decode.instance.instance_id == 3 - there[0]


async def test_the_service_gets_add_prefill_complete_and_free(house: House) -> None:
    house.worker(1, ranks=2)
    await house.serve()
    router = await house.router()
    await house.known()
    prompt = list(range(10))
    route = await router.route(ask(prompt), house.pool)
    key = (1, route.dp_rank)
    # A route that is not taken reserves nothing.
    assert set(house.loads.values()) == {(0, 0)}

    reservation = house.reserve(route, "r-0", prompt)
    await until(lambda: house.loads[key] == (10, 2))
    reservation.first_item()
    await until(lambda: house.loads[key] == (0, 2))
    reservation.release()
    await until(lambda: house.loads[key] == (0, 0))

    assert not router._reservations.unknown


async def test_decode_requests_share_no_blocks(house: House) -> None:
    """The cache of a prompt is brought to each request, whatever others of the same prompt hold."""
    router = await house.running()
    prompt = list(range(80))
    reservations = []
    for number in range(3):
        asked = ask(prompt, phase=Phase.DECODE)
        route = await router.route(asked, house.pool)
        blocks = route.blocks or ()
        reservations.append(house.tracker.reserve(route, f"r{number}", prompt_tokens=0, block_size=4, hashes=blocks))

    assert house.tracker.blocks(1) == 60
    await until(lambda: house.loads[1, 0] == (0, 60))
    for reservation in reservations:
        reservation.release()
    await until(lambda: house.loads[1, 0] == (0, 0))


async def test_a_token_that_is_none_is_refused(house: House) -> None:
    house.worker(1)
    await house.serve()
    router = await house.router()

    with pytest.raises(InvalidArgument, match="token_ids"):
        await router.route(ask([1, 2, 3, 2**40]), house.pool)


async def test_a_burst_is_spread_although_the_service_does_not_know_of_it_yet(house: House) -> None:
    for worker in range(1, 5):
        house.worker(worker)
    await house.serve()
    router = await house.router()
    await house.known()
    chosen: Counter[int] = Counter()
    reservations = []
    for number in range(40):
        prompt = list(range(100 * number, 100 * number + 32))
        route = await router.route(ask(prompt), house.pool)
        chosen[route.instance.instance_id] += 1
        reservations.append(house.reserve(route, f"r{number}", prompt))

    assert set(chosen.values()) == {10}

    for reservation in reservations:
        reservation.release()
    await until(lambda: set(house.loads.values()) == {(0, 0)})
    await until(lambda: not router._reservations.unknown)


async def test_a_request_that_ends_before_its_report_is_not_reported(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.worker(1)
    service = await house.serve()
    router = await house.router()
    await house.known()
    prompt = list(range(8))
    told: list[str] = []
    add = service.registry.add

    def note(addition: Addition) -> int:
        told.append(addition.request_id)
        return add(addition)

    monkeypatch.setattr(service.registry, "add", note)
    route = await router.route(ask(prompt), house.pool)

    # No turn of the loop in between.
    house.reserve(route, "r", prompt).release()
    other = await router.route(ask(prompt), house.pool)
    reservation = house.reserve(other, "s", prompt)
    await until(lambda: house.loads[1, 0] == (8, 2))
    reservation.release()

    await until(lambda: house.loads[1, 0] == (0, 0))
    assert told == ["s"]
    assert not router._reservations.unknown


async def test_workers_that_come_and_go_are_made_known(house: House) -> None:
    router = await house.running()
    house.worker(2, ranks=3)
    house.pool.remove(1)

    # Whoever routes next tells the service, and does not wait for it.
    assert (await router.route(ask([1]), house.pool)).instance.instance_id == 2
    await house.known()
    await until(lambda: len(house.loads) == 3)


async def test_router_reregisters_a_worker_that_the_slot_tracker_lost(house: House) -> None:
    for worker in (1, 2):
        house.worker(worker)
    service = await house.serve()
    router = await house.router()
    await house.known()
    service.registry.unregister(Unregistration(worker_id=2, model_name="m"))

    assert (await router.route(ask([1]), house.pool)).instance.instance_id == 1
    await router.route(ask([1]), house.pool)

    await house.known()


async def test_a_worker_refused_by_the_service_is_warned_about_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    service = await house.serve()
    service.registry.register(Registration(worker_id=9, model_name="m", block_size=64, dp_start=0, dp_size=1))
    house.worker(1)
    router = await house.router()
    await until(lambda: "does not take worker 0000000000000001" in caplog.text)
    for _ in range(5):
        assert (await router.route(ask([1]), house.pool)).instance.instance_id == 1

    house.worker(2, block_size=64)
    await router.route(ask([1]), house.pool)
    await until(lambda: house.registered == {2, 9})
    assert caplog.text.count("does not take worker 0000000000000001") == 1
    # Worker 9 of somebody else is never chosen here, and not removed either.
    assert house.decisions("load") >= 5


async def test_without_a_service_loads_decide(house: House, caplog: pytest.LogCaptureFixture) -> None:
    for worker in (1, 2):
        house.worker(worker)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        router = await house.router(f"http://127.0.0.1:{taken.getsockname()[1]}")
        reservations = []
        for number in range(10):
            route = await router.route(ask([1] * 8), house.pool)
            reservations.append(house.reserve(route, f"r{number}", [1] * 8))

    assert house.tracker.requests(1) == house.tracker.requests(2) == 5
    assert house.decisions("load") == 10
    assert caplog.text.count("does not answer") == 1
    for reservation in reservations:
        reservation.release()
    await until(lambda: not router._reservations.unknown)


async def test_a_service_that_hangs_costs_its_deadline_once(house: House) -> None:
    house.worker(1)
    asked = 0

    async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await closing.wait()
        writer.close()

    closing = asyncio.Event()
    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        router = await house.router(f"http://127.0.0.1:{port}", timeout=0.05, pause=60)
        for _ in range(5):
            route = await router.route(ask([1]), house.pool)
            assert route.instance.instance_id == 1
        # One for the workers, one for the first request at most.
        assert asked <= 2
        assert house.decisions("load") == 5
        await router.aclose()
    finally:
        closing.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("answer", [b"nonsense", b'[{"worker_id": 1}]', b"{}"])
async def test_an_invalid_answer_of_the_service_counts_as_no_answer(house: House, answer: bytes) -> None:
    house.worker(1)

    async def handle(_: web.BaseRequest) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        router = await house.router(f"http://127.0.0.1:{runner.addresses[0][1]}")

        assert (await router.route(ask([1]), house.pool)).instance.instance_id == 1

        assert house.decisions("load") == 1
        await router.aclose()
    finally:
        await runner.cleanup()


async def test_the_router_uses_the_service_again_after_its_return(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    house.worker(1)
    first = await house.serve()
    router = await house.router(pause=0)
    await house.known()
    port = first.listener.port
    await first.aclose()
    await router.route(ask([1]), house.pool)
    assert "does not answer" in caplog.text

    await house.serve(port)
    await router.route(ask([1]), house.pool)
    await house.known()
    await router.route(ask([1]), house.pool)

    assert "answers again" in caplog.text
    assert house.decisions("service") == 1


async def test_a_token_is_sent_and_a_wrong_one_is_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.worker(1)
    await house.serve(token=TOKEN)
    await house.router(token=TOKEN)
    await house.known()

    stranger = await house.router(token=TOKEN + "x")
    await until(lambda: "does not answer (401" in caplog.text)
    await stranger.route(ask([1]), house.pool)

    assert house.decisions("load") == 1
    assert TOKEN not in caplog.text


async def test_workers_may_leave_while_the_service_is_asked(house: House) -> None:
    house.worker(1)
    house.worker(2)
    await house.serve()
    router = await house.router()
    await house.known()
    asking = asyncio.create_task(router.route(ask([1]), house.pool))
    await asyncio.sleep(0)
    house.pool.remove(1)

    assert (await asking).instance.instance_id == 2

    asking = asyncio.create_task(router.route(ask([1]), house.pool))
    await asyncio.sleep(0)
    house.pool.remove(2)
    with pytest.raises(Unavailable):
        await asking


async def placed(house: House, router: SlotTrackerRouter, number: int) -> list[Any]:
    """Return requests of two blocks each that the service counts."""
    reservations = []
    for one in range(number):
        prompt = list(range(100 * one, 100 * one + 8))
        reservations.append(house.reserve(await router.route(ask(prompt), house.pool), f"r{one}", prompt))
    await until(lambda: sum(blocks for _, blocks in house.loads.values()) == 2 * number)
    return reservations


async def hurry(router: SlotTrackerRouter) -> None:
    """Give the service up soon from now on. Before, it has the time that a busy machine may need."""
    # A call whose answer is still under way would fail with its connection, and count as a service that is away.
    await router._reservations._changed.join()
    router._client._timeout = aiohttp.ClientTimeout(total=0.2)
    await router._client.aclose()


async def left_while_it_hangs(house: House, number: int, *, pause: float) -> tuple[FaultProxy, SlotTrackerRouter]:
    """Return requests that end while the service does not answer: the network before it, and their router."""
    house.worker(1)
    proxy = await house.proxied()
    router = await house.router(f"http://127.0.0.1:{proxy.port}", pause=pause)
    await house.known()
    reservations = await placed(house, router, number)
    await hurry(router)
    hang = proxy.plan.inject(BlackHole(), direction=Direction.UP, times=None)
    for reservation in reservations:
        reservation.release()
    await hang.hit()
    return proxy, router


async def test_requests_that_end_while_the_service_hangs_are_freed_afterwards(house: House) -> None:
    proxy, router = await left_while_it_hangs(house, 20, pause=0.2)
    await until(lambda: not router._client.present and router._reservations.pending == 20)
    # A request is routed meanwhile, and waits for nothing.
    assert (await router.route(ask([1]), house.pool)).instance.instance_id == 1

    proxy.plan.clear()

    await until(lambda: house.loads == {(1, 0): (0, 0)})
    await until(lambda: router._reservations.pending == 0)


async def test_a_request_with_an_unanswered_add_is_freed(house: House) -> None:
    house.worker(1)
    proxy = await house.proxied()
    router = await house.router(f"http://127.0.0.1:{proxy.port}", pause=0.2)
    await house.known()
    prompt = list(range(8))
    route = await router.route(ask(prompt), house.pool)
    await hurry(router)
    proxy.plan.inject(HalfOpen(), direction=Direction.DOWN)
    reservation = house.reserve(route, "r", prompt)
    await until(lambda: house.loads[1, 0] == (8, 2) and not router._client.present)
    hang = proxy.plan.inject(BlackHole(), direction=Direction.UP, times=None)

    reservation.release()
    await until(lambda: router._reservations.pending == 1)
    proxy.plan.remove(hang)

    await until(lambda: house.loads == {(1, 0): (0, 0)})


async def test_an_add_that_its_free_has_overtaken_is_freed_again(house: House) -> None:
    house.worker(1)
    service = await house.serve()
    overtaken = asyncio.Event()
    async with LateAdd(service.listener.url, overtaken) as late:
        router = await house.router(late.url, pause=0)
        await house.known()
        prompt = list(range(8))
        route = await router.route(ask(prompt), house.pool)
        await hurry(router)
        reservation = house.reserve(route, "r", prompt)
        await until(lambda: not router._client.present)
        reservation.release()
        await until(lambda: late.freed == 1)
        overtaken.set()
        await until(lambda: house.loads == {(1, 0): (8, 2)})

        await until(lambda: house.loads == {(1, 0): (0, 0)})


async def test_a_request_unknown_to_the_service_is_not_freed(house: House) -> None:
    house.worker(1)
    first = await house.serve()
    router = await house.router(pause=60)
    await house.known()
    await first.aclose()
    prompt = list(range(8))
    for one in range(3):
        # The first finds the port closed, the others are not tried.
        reservation = house.reserve(await router.route(ask(prompt), house.pool), f"r{one}", prompt)
        await until(lambda: not router._reservations.unknown)
        reservation.release()

    await until(lambda: not router._reservations._changed.qsize())
    assert router._reservations.pending == 0


async def test_pending_reports_are_sent_when_the_router_closes(house: House) -> None:
    # Left alone for a minute: only the end of the router does not wait that long.
    proxy, router = await left_while_it_hangs(house, 20, pause=60)
    await until(lambda: router._reservations.pending == 20)
    proxy.plan.clear()

    await router.aclose()

    assert house.loads == {(1, 0): (0, 0)}


async def test_a_service_that_hangs_does_not_hold_up_the_end(house: House, caplog: pytest.LogCaptureFixture) -> None:
    _, router = await left_while_it_hangs(house, 5, pause=0.2)

    async with asyncio.timeout(20):
        await router.aclose()

    assert "5 requests could not be told to the slot tracker" in caplog.text


async def test_no_request_is_left_at_the_service_after_the_close(house: House) -> None:
    router = await house.running()
    prompt = list(range(8))
    routes = [await router.route(ask(prompt), house.pool) for _ in range(50)]
    reservations = [house.reserve(one, f"r{number}", prompt) for number, one in enumerate(routes)]
    await until(lambda: house.loads[1, 0] == (400, 2))
    for reservation in reservations:
        reservation.release()

    await router.aclose()
    await router.aclose()

    assert house.loads == {(1, 0): (0, 0)}
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not any(name.startswith("slot-tracker-") and name != "slot-tracker-expiry" for name in names)


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"url": "localhost:8091"}, "router.url: 'localhost:8091'"), ({"ca": "/nowhere"}, "router.ca: /nowhere")],
)
def test_a_set_up_that_cannot_work_is_named(settings: dict[str, Any], says: str) -> None:
    services = RouterServices(
        cast(Any, None), LoadTracker(), cast(Any, None), cast(Any, None), Metrics(), cast(Any, None)
    )

    with pytest.raises(ConfigError, match=says):
        SlotTrackerRouter(SlotTrackerConfig(**settings), services)
