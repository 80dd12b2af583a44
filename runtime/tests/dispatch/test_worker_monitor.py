"""The worker monitor: which signal counts, when workers are looked at, and that nothing of them stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec
import pytest
from dynamo_core.contracts.discovery import Discovery, Lease
from dynamo_core.contracts.router import Route
from dynamo_core.contracts.thresholds import RankLoad, Thresholds
from dynamo_core.contracts.transports.events import EventPlane, Publisher
from dynamo_core.protocol.events import ActiveLoad, PlacedLoad, PlacedLoads
from dynamo_core.protocol.records import Instance, ModelCard, RuntimeConfig
from dynamo_runtime.dispatch.load.monitor import EXPIRY, WorkerMonitor
from dynamo_runtime.dispatch.load.tracker import LoadTracker, Reservation
from dynamo_runtime.dispatch.pools.pool import Pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule


class Plane(EventPlane):
    """Events of the test's own; an exception breaks the subscription."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def publisher(self, subject: str, lease: Lease) -> Publisher:
        raise NotImplementedError

    async def subscribe(self, subject: str, directory: Discovery) -> AsyncGenerator[tuple[int, int, bytes], None]:
        while True:
            event = await self.queue.get()
            if isinstance(event, Exception):
                raise event
            yield 1, 0, event


def told(*loads: ActiveLoad) -> bytes:
    return msgspec.msgpack.encode(list(loads))


class Watched:
    """A monitor over a pool of workers with ranks of 100 blocks and a batch of 1000."""

    def __init__(self, thresholds: Thresholds | None = None, *, ranks: int = 1, workers: int = 2) -> None:
        self.thresholds = thresholds
        self.asked = 0
        self.now = 0.0
        self.tracker = LoadTracker()
        self.plane = Plane()
        self.monitor = WorkerMonitor(
            self.tracker,
            self.plane,
            None,  # type: ignore[arg-type]
            rule=None if thresholds is None else self.is_busy,
        )
        self.pool = Pool("m", "aggregated")
        self.monitor.take(self.pool)
        config = RuntimeConfig(total_kv_blocks=100, max_num_batched_tokens=1000, data_parallel_size=ranks)
        for number in range(1, workers + 1):
            card = ModelCard(name="m", instance_id=number, kv_cache_block_size=16, runtime_config=config)
            self.pool.add(Instance(instance_id=number), card)

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        self.asked += 1
        assert self.thresholds is not None
        return self.thresholds.busy(ranks)

    def reserve(
        self, worker: int, tokens: int = 10, *, rank: int = 0, name: str = "r", hashes: Any = ()
    ) -> Reservation:
        route = Route(self.pool.instances[worker], rank)
        return self.tracker.reserve(route, name, prompt_tokens=tokens, block_size=16, hashes=hashes, held_tokens=tokens)

    def tell(self, *loads: ActiveLoad, after: float = 1.0) -> None:
        """Send the reports of workers, so many seconds after the last time."""
        self.now += after
        self.monitor.apply(told(*loads), self.now)

    @property
    def free(self) -> list[int]:
        return [instance.instance_id for instance in self.pool.eligible()]


def test_a_request_counts_the_moment_it_is_placed_and_until_its_prompt_is_computed() -> None:
    watched = Watched(Thresholds(None, 9))

    reservation = watched.reserve(1)
    placed = watched.free
    reservation.first_item()

    assert (placed, watched.free) == ([2], [1, 2])


def test_used_blocks_are_the_last_report_plus_later_placements() -> None:
    watched = Watched(Thresholds(0.5))
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=0), ActiveLoad(2, 0, kv_used_blocks=51))
    told_only = watched.free
    reservation = watched.reserve(1, hashes=range(51))
    placed = watched.free
    reservation.first_item()

    # The answer has its first block; then the engine counts less than the prompt, as only an engine can know.
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=52))
    grown = watched.monitor.load(1, 0).active_decode_blocks
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=50))

    assert (told_only, placed, grown, watched.free) == ([1], [], 52, [1])


@pytest.mark.parametrize("hashes", [True, False], ids=["with hashes", "without"])
def test_a_burst_before_any_word_of_the_workers_fills_each_up_to_its_threshold_and_with_one_more(hashes: bool) -> None:
    watched = Watched(Thresholds(0.5), workers=3)
    watched.tell(*(ActiveLoad(worker, 0, active_decode_blocks=20) for worker in (1, 2, 3)))
    placed = dict.fromkeys((1, 2, 3), 0)

    for number in range(50):
        free = watched.free
        if free:
            worker = free[number % len(free)]
            placed[worker] += 1
            blocks = range(100 * number, 100 * number + 10) if hashes else ()
            watched.reserve(worker, 160, name=f"r{number}", hashes=blocks)

    # Exactly half is not above it: with three more blocks of ten a worker has that, and then it is let one more in.
    assert placed == {1: 4, 2: 4, 3: 4}


def test_a_report_in_the_middle_of_a_burst_frees_no_room() -> None:
    watched = Watched(Thresholds(0.5), workers=1)
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=35))
    for number in range(2):
        watched.reserve(1, 160, name=f"r{number}")

    # It has heard of the first one only.
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=45), after=0.01)

    assert watched.free == []


def test_an_idle_worker_is_free_with_its_first_report() -> None:
    watched = Watched(Thresholds(0.5), workers=1)
    reservations = [watched.reserve(1, 1600, name=f"r{number}") for number in range(3)]
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=100))

    for reservation in reservations:
        reservation.release()
    ended = watched.free
    watched.tell(ActiveLoad(1, 0, active_decode_blocks=0), after=0.01)

    assert (ended, watched.free) == ([], [1])


def test_the_reported_total_overrides_the_cards() -> None:
    watched = Watched(Thresholds(0.5))

    watched.monitor.apply(told(ActiveLoad(1, 0, active_decode_blocks=51, kv_total_blocks=200)), 0)

    assert watched.free == [1, 2]
    assert watched.monitor.load(1, 0) == RankLoad(51, 200, 0, 1000)


def test_a_worker_with_an_idle_rank_is_free() -> None:
    watched = Watched(Thresholds(None, 5), ranks=2)
    watched.reserve(1, rank=0)
    one = watched.free
    watched.reserve(1, rank=1, name="s")

    assert (one, watched.free) == ([1, 2], [2])


def test_load_of_other_frontends_counts() -> None:
    watched = Watched(Thresholds(None, 9))

    watched.tracker.peers.apply(PlacedLoads(7, 1, True, [PlacedLoad(1, 0, 1, 10, 0)]), 0)
    busy = watched.free
    watched.tracker.peers.apply(PlacedLoads(7, 2, True, []), 0)

    assert (busy, watched.free) == ([2], [1, 2])


def test_new_thresholds_apply_at_once() -> None:
    watched = Watched(Thresholds())
    watched.reserve(1)
    before = watched.free

    watched.thresholds = Thresholds(None, 0)
    watched.monitor.reconsider("another")
    elsewhere = watched.free
    watched.monitor.reconsider("m")

    assert (before, elsewhere, watched.free) == ([1, 2], [1, 2], [2])


def test_reports_of_a_silent_worker_expire() -> None:
    watched = Watched(Thresholds(0.5))
    watched.monitor.apply(told(ActiveLoad(1, 0, active_decode_blocks=99)), 100)
    watched.monitor.apply(told(ActiveLoad(2, 0, active_decode_blocks=99)), 101)

    watched.monitor.expire(99 + EXPIRY)
    before = watched.free
    watched.monitor.expire(100 + EXPIRY)

    assert (before, watched.free) == ([], [1])


def test_a_load_that_comes_before_its_worker_counts_when_it_is_there() -> None:
    watched = Watched(Thresholds(0.5))
    watched.monitor.apply(told(ActiveLoad(3, 0, active_decode_blocks=51)), 0)

    watched.pool.add(Instance(instance_id=3), watched.pool.cards[1])

    assert watched.free == [1, 2]


def test_a_returned_worker_is_evaluated_anew() -> None:
    watched = Watched(Thresholds(None, 9))
    reservation = watched.reserve(1)
    watched.pool.remove(1)
    reservation.release()

    watched.pool.add(Instance(instance_id=1), watched.pool.cards[2])

    assert watched.free == [2, 1]


def test_without_thresholds_loads_are_tracked_but_no_worker_is_busy() -> None:
    watched = Watched()
    watched.reserve(1, tokens=1000)
    watched.monitor.apply(told(ActiveLoad(1, 0, active_decode_blocks=100)), 0)

    assert (watched.free, watched.tracker.on_load) == ([1, 2], None)
    assert watched.monitor.load(1, 0).active_decode_blocks == 100


def test_reading_the_eligible_workers_evaluates_none() -> None:
    watched = Watched(Thresholds(None, 9))
    watched.reserve(1)
    before = watched.asked

    for _ in range(100):
        watched.pool.eligible()

    assert watched.asked == before


def test_a_full_worker_is_eligible_again_after_its_next_report() -> None:
    watched = Watched(Thresholds(0.9))
    watched.pool.report_full(1)
    full = watched.free

    watched.monitor.apply(told(ActiveLoad(1, 0, active_decode_blocks=1)), 0)

    assert (full, watched.free) == ([2], [1, 2])


async def test_the_monitor_survives_malformed_reports_and_plane_failures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dynamo_runtime.dispatch.load.load_subscription.RETRY", 0.001)
    watched = Watched(Thresholds(0.5))
    watched.monitor.start()
    try:
        watched.plane.queue.put_nowait(b"\xc1")
        watched.plane.queue.put_nowait(RuntimeError("the plane is gone"))
        watched.plane.queue.put_nowait(told(ActiveLoad(1, 0, active_decode_blocks=51)))
        async with asyncio.timeout(5):
            while watched.free != [2]:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)
    finally:
        await watched.monitor.aclose()

    assert "cannot be read" in caplog.text
    assert "the plane is gone" in caplog.text
    assert watched.tracker.on_load is None


class Accounting(RuleBasedStateMachine):
    """Whatever happens in whatever order, the marks are what the rule says of the figures as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = Watched(Thresholds(0.5, 20), ranks=2, workers=3)
        self.reservations: list[Reservation] = []
        self.told: dict[tuple[int, int], int] = {}
        self.count = 0

    @rule(worker=st.integers(1, 3), rank=st.integers(0, 1), tokens=st.integers(0, 30))
    def place(self, worker: int, rank: int, tokens: int) -> None:
        if worker in self.watched.pool.instances:
            self.count += 1
            self.reservations.append(self.watched.reserve(worker, tokens, rank=rank, name=f"r{self.count}"))

    @rule(data=st.data(), leave=st.booleans())
    def advance(self, data: st.DataObject, leave: bool) -> None:
        if self.reservations:
            reservation = data.draw(st.sampled_from(self.reservations))
            if leave:
                self.reservations.remove(reservation)
                reservation.release()
            else:
                reservation.first_item()

    @rule(worker=st.integers(1, 3), rank=st.integers(0, 1), blocks=st.integers(0, 100))
    def tell(self, worker: int, rank: int, blocks: int) -> None:
        self.watched.monitor.apply(told(ActiveLoad(worker, rank, active_decode_blocks=blocks)), 0)

    @rule(worker=st.integers(1, 3))
    def come_or_go(self, worker: int) -> None:
        pool = self.watched.pool
        if worker in pool.instances and len(pool.instances) > 1:
            pool.remove(worker)
        elif worker not in pool.instances:
            pool.add(Instance(instance_id=worker), next(iter(pool.cards.values())))

    @invariant()
    def the_marks_are_right(self) -> None:
        watched = self.watched
        assert watched.thresholds is not None
        busy = {
            worker
            for worker in watched.pool.instances
            if watched.thresholds.busy([watched.monitor.load(worker, rank) for rank in (0, 1)])
        }
        assert set(watched.pool.busy) == busy
        assert set(watched.free) == set(watched.pool.instances) - busy


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(stateful_step_count=40, deadline=None)
