"""The index stays in step with a worker whatever becomes of its messages: lost, doubled, late; and through restarts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest
from dynamo_core import (
    KvBlock,
    KvCleared,
    KvEvent,
    KvHistoryPart,
    KvHistoryRequest,
    KvRemoved,
    KvSeen,
    KvStored,
    RouterEvent,
)
from dynamo_core.errors import NotSupported
from dynamo_core.kv import sequence_hashes
from dynamo_plugin_router_kv import follower as follower_module
from dynamo_plugin_router_kv.follower import EventFollower
from dynamo_plugin_router_kv.index import KvIndex, Status
from dynamo_runtime.worker import kv_history
from dynamo_runtime.worker.kv_history import KvHistory
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

WORKER = 5


def parts_of(history: KvHistory, request: KvHistoryRequest) -> list[KvHistoryPart]:
    async def ask() -> list[KvHistoryPart]:
        return [part async for part in await history.serve(request, cast(Any, None))]

    return asyncio.run(ask())


class Engine:
    """One rank that keeps the blocks of prompts, and tells of every change."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.held: dict[int, tuple[int, ...]] = {}
        self.number = 0

    def restart(self) -> None:
        self.held, self.number = {}, 0

    def prompt(self, prompt: list[int]) -> KvEvent | None:
        new: list[KvBlock] = []
        parent: int | None = None
        for depth in range(1, len(prompt) + 1):
            prefix = tuple(prompt[:depth])
            name = hash(prefix) % 2**64
            if name in self.held and not new:
                parent = name
                continue
            self.held[name] = prefix
            new.append(KvBlock(name, 1000 + prompt[depth - 1]))
        return self._event(KvStored(blocks=new, parent_hash=parent)) if new else None

    def evict(self, draw: random.Random) -> KvEvent | None:
        """Evict one of the blocks that nothing follows, as caches do that never evict from the middle."""
        leaves = [
            name for name, prefix in self.held.items() if not any(other[:-1] == prefix for other in self.held.values())
        ]
        if not leaves:
            return None
        gone = draw.choice(sorted(leaves))
        del self.held[gone]
        return self._event(KvRemoved(block_hashes=[gone]))

    def clear(self) -> KvEvent:
        self.held = {}
        return self._event(KvCleared())

    def _event(self, data: KvStored | KvRemoved | KvCleared) -> KvEvent:
        event = KvEvent(self.number, data, self.dp_rank)
        self.number += 1
        return event


class FollowerMachine(RuleBasedStateMachine):
    """One worker with two ranks, its messages under way, and a router that follows it.

    At any time, once nothing is under way and what is missing has been asked for, router and engine agree.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.warnings: Counter[str] = Counter()
        self.follower = EventFollower(self.index, lambda kind, status: None, lambda kind: self.warnings.update([kind]))
        self.engines = [Engine(0), Engine(1)]
        self.draw = random.Random(1)
        self.epoch = 1
        self.history = KvHistory(self.epoch)
        self.under_way: list[RouterEvent] = []
        #: An answer that has been given, but has not been taken in yet.
        self.answer: list[KvHistoryPart] | None = None
        self.follower.add(WORKER, has_history=True)

    def tell(self, event: KvEvent | None) -> None:
        if event is not None:
            self.history.note(event)
            self.under_way.append(RouterEvent(WORKER, event, self.epoch))

    @rule(engine=st.integers(0, 1), prompt=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def prompt(self, engine: int, prompt: list[int]) -> None:
        self.tell(self.engines[engine].prompt(prompt))

    @rule(engine=st.integers(0, 1))
    def evict(self, engine: int) -> None:
        self.tell(self.engines[engine].evict(self.draw))

    @rule(engine=st.integers(0, 1))
    def clear(self, engine: int) -> None:
        self.tell(self.engines[engine].clear())

    @rule()
    def restart(self) -> None:
        # A restarted process has another id in the field; the same id, with another epoch, is the harder case.
        self.epoch += 1
        self.history = KvHistory(self.epoch)
        for engine in self.engines:
            engine.restart()
            self.history.begin(engine.dp_rank)

    @precondition(lambda self: self.under_way)
    @rule()
    def arrives(self) -> None:
        self.follower.on_event(self.under_way.pop(0))

    @precondition(lambda self: self.under_way)
    @rule()
    def is_lost(self) -> None:
        del self.under_way[0]

    @precondition(lambda self: self.under_way)
    @rule()
    def is_doubled(self) -> None:
        self.under_way.insert(1, self.under_way[0])

    @precondition(lambda self: len(self.under_way) > 1)
    @rule()
    def is_overtaken(self) -> None:
        self.under_way[0], self.under_way[1] = self.under_way[1], self.under_way[0]

    @precondition(lambda self: self.answer is None and WORKER in self.follower.missing)
    @rule()
    def is_asked(self) -> None:
        self.answer = parts_of(self.history, KvHistoryRequest(self.follower.positions(WORKER)))

    @precondition(lambda self: self.answer is not None)
    @rule()
    def has_answered(self) -> None:
        assert self.answer is not None
        for part in self.answer:
            self.follower.on_history_part(WORKER, part)
        self.follower.on_history_complete(WORKER)
        self.answer = None

    @rule()
    def everything_arrives(self) -> None:
        """Send one more event on each rank, which shows whether the last ones were lost."""
        for engine in self.engines:
            self.tell(engine.prompt([9, engine.number]))
        if self.answer is not None:
            self.has_answered()
        while self.under_way:
            self.arrives()
        for _ in range(10):
            if WORKER not in self.follower.missing:
                break
            self.is_asked()
            self.has_answered()
        assert WORKER not in self.follower.missing
        self.agree()

    def agree(self) -> None:
        for engine in self.engines:
            rank = (WORKER, engine.dp_rank)
            assert self.index.held(rank) == len(engine.held)
            for prefix in engine.held.values():
                chain = sequence_hashes([1000 + block for block in prefix])
                found = self.index.overlaps(chain)
                assert (len(prefix), self.index.bit(rank)) in [
                    (depth, members & self.index.bit(rank)) for depth, members in found
                ]

    def teardown(self) -> None:
        self.follower.remove(WORKER)
        while self.index.sweep(1000):
            pass
        assert self.index.blocks == 0


TestFollowerAgainstAnEngine = FollowerMachine.TestCase
TestFollowerAgainstAnEngine.settings = settings(stateful_step_count=50, deadline=None)


@pytest.mark.full
def test_a_follower_stays_in_step_for_long() -> None:
    run_state_machine_as_test(
        FollowerMachine, settings=settings(max_examples=400, stateful_step_count=100, deadline=None)
    )


class Told:
    """A follower, and what it said."""

    def __init__(self, *, has_history: bool = True) -> None:
        self.index = KvIndex()
        self.applied: Counter[tuple[str, str]] = Counter()
        self.warnings: Counter[str] = Counter()
        self.follower = EventFollower(
            self.index,
            lambda kind, status: self.applied.update([(kind, status.value)]),
            lambda kind: self.warnings.update([kind]),
        )
        self.follower.add(WORKER, has_history=has_history)
        if has_history:
            self.follower.on_history_part(WORKER, KvHistoryPart(0, 1, True, [], -1))
            self.follower.on_history_complete(WORKER)

    def on_event(self, number: int, data: KvStored | KvRemoved | KvCleared, epoch: int = 1) -> None:
        self.follower.on_event(RouterEvent(WORKER, KvEvent(number, data), epoch))

    @property
    def held(self) -> int:
        return self.index.held((WORKER, 0))


def stored(*names: int, parent: int | None = None) -> KvStored:
    return KvStored(blocks=[KvBlock(name, name) for name in names], parent_hash=parent)


def test_each_applied_event_is_reported() -> None:
    told = Told()

    told.on_event(0, stored(1, 2))
    told.on_event(1, stored(3, parent=99))
    told.on_event(2, KvRemoved(block_hashes=[2, 98]))
    told.on_event(3, stored(1, 2, parent=1))
    told.on_event(4, KvCleared())

    assert told.applied == {
        ("stored", Status.OK): 1,
        ("stored", Status.PARENT_NOT_FOUND): 1,
        ("removed", Status.BLOCK_NOT_FOUND): 1,
        ("stored", Status.INVALID): 1,
        ("cleared", Status.OK): 1,
    }
    assert not told.warnings


def test_a_gap_is_fetched_while_later_events_wait() -> None:
    told = Told()
    history = KvHistory(1)
    events = [KvEvent(number, stored(number + 1)) for number in range(5)]
    for event in events:
        history.note(event)
    told.on_event(0, stored(1))

    told.on_event(3, stored(4))
    told.on_event(4, stored(5))

    assert WORKER in told.follower.missing
    assert told.held == 1
    (part,) = parts_of(history, KvHistoryRequest(told.follower.positions(WORKER)))
    assert [event.event_id for event in part.events] == [1, 2, 3, 4]
    told.follower.on_history_part(WORKER, part)
    told.follower.on_history_complete(WORKER)
    assert WORKER not in told.follower.missing
    assert told.held == 5
    told.on_event(5, stored(6))
    assert told.held == 6


def test_an_event_number_reset_to_zero_clears_the_workers_blocks() -> None:
    told = Told(has_history=False)
    for number in range(3):
        told.on_event(number, stored(number + 1), epoch=0)

    told.on_event(0, stored(7), epoch=0)

    assert told.held == 1
    assert told.warnings == {"restart": 1}


def test_a_new_epoch_clears_the_workers_blocks_and_ignores_old_events() -> None:
    told = Told()
    told.on_event(0, stored(1, 2))

    told.on_event(0, stored(7), epoch=2)
    told.on_event(1, stored(3, parent=2), epoch=1)

    assert told.held == 1
    assert told.warnings == {"restart": 1, "duplicate": 1}


def test_a_gap_without_history_is_only_warned_about() -> None:
    told = Told(has_history=False)
    told.on_event(41, stored(1))
    told.on_event(43, stored(2, parent=1))

    assert told.held == 2
    assert WORKER not in told.follower.missing
    assert told.warnings == {"gap": 1}


def test_a_failed_history_request_resumes_with_live_events() -> None:
    told = Told()
    told.on_event(0, stored(1))
    told.on_event(5, stored(2))
    told.on_event(6, stored(3))

    told.follower.on_history_failed(WORKER)

    assert told.held == 3
    assert WORKER not in told.follower.missing
    told.on_event(7, stored(4))
    assert told.held == 4


def test_if_too_much_waits_for_an_answer_the_worker_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MAX_PENDING", 3)
    told = Told()
    for number in range(1, 9):
        told.on_event(number, stored(number))
    assert told.warnings["overflow"]

    told.follower.on_history_part(WORKER, KvHistoryPart(0, 1, True, [KvEvent(0, stored(50))], 0))
    told.follower.on_history_complete(WORKER)

    assert WORKER in told.follower.missing


def test_events_of_unknown_workers_are_ignored_and_removed_workers_hold_nothing() -> None:
    told = Told()
    told.on_event(0, stored(1))
    told.follower.on_event(RouterEvent(6, KvEvent(0, stored(1)), 1))
    assert told.index.held((6, 0)) == 0

    told.follower.remove(WORKER)
    told.on_event(1, stored(2))

    assert told.held == 0
    assert told.index.overlaps([1]) == []


# The worker's side.


@pytest.mark.parametrize("seed", range(2))
def test_history_parts_list_blocks_after_their_parents(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_history, "PART", 5)
    draw = random.Random(seed)
    engine, history = Engine(0), KvHistory(3)
    for _ in range(60):
        event = engine.evict(draw) if draw.random() < 0.3 else engine.prompt(draw.choices([1, 2, 3], k=12))
        if event is not None:
            history.note(event)

    parts = parts_of(history, KvHistoryRequest())

    told = Told()
    for part in parts:
        told.follower.on_history_part(WORKER, part)
    assert told.held == len(engine.held) > 50
    assert all(status == "ok" for _, status in told.applied)
    assert [part.fresh for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.event_id for part in parts] == [None] * (len(parts) - 1) + [engine.number - 1]


def test_a_re_stored_parent_comes_before_its_children_in_the_history() -> None:
    history = KvHistory(3)
    told_before: list[KvStored | KvRemoved] = [stored(1, 2, 3), KvRemoved(block_hashes=[2]), stored(2, parent=1)]
    for number, data in enumerate(told_before):
        history.note(KvEvent(number, data))
    told = Told()

    for part in parts_of(history, KvHistoryRequest()):
        told.follower.on_history_part(WORKER, part)

    assert told.index.overlaps(sequence_hashes([1, 2, 3])) == [(3, 1)]


def test_a_router_beyond_the_kept_events_gets_the_held_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_history, "RECENT", 4)
    history = KvHistory(1)
    for number in range(10):
        history.note(KvEvent(number, stored(number + 1)))

    def first(event_id: int, epoch: int = 1) -> KvHistoryPart:
        positions = KvSeen(0, epoch, event_id)
        return parts_of(history, KvHistoryRequest([positions]))[0]

    assert first(9) == KvHistoryPart(0, 1, False, [], 9)
    assert [event.event_id for event in first(5).events] == [6, 7, 8, 9]
    assert first(4).fresh
    assert first(7, epoch=2).fresh
    # One that says it is ahead has followed something else.
    assert first(10).fresh


def test_an_unused_rank_is_in_the_history() -> None:
    history = KvHistory(1)
    history.begin(3)

    assert parts_of(history, KvHistoryRequest()) == [KvHistoryPart(3, 1, True, [], -1)]


def test_a_worker_without_history_raises_not_supported() -> None:
    history = KvHistory(1, kept=False)
    history.note(KvEvent(0, stored(1)))

    with pytest.raises(NotSupported, match="enable_local_indexer"):
        parts_of(history, KvHistoryRequest())
