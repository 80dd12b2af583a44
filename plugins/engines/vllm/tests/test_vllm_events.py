"""vLLM's cache events become ours, in order and without a lie."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dynamo_core import KvBlock, KvCleared, KvEvent, KvRemoved, KvStored
from dynamo_core.kv import block_hashes
from dynamo_plugin_engine_vllm.events import Change, EventTranslator
from dynamo_plugin_engine_vllm.subscription import EventSequencer
from hypothesis import given
from hypothesis import strategies as st

SIZE = 2


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": SIZE}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(*hashes: Any, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


def changes(*events: Any) -> list[Change]:
    return EventTranslator(SIZE).changes(events)


def test_a_stored_block_has_the_engines_name_and_the_hash_of_its_tokens() -> None:
    own = block_hashes([1, 2, 3, 4], SIZE)

    assert changes(stored([70, 71], [1, 2, 3, 4])) == [KvStored([KvBlock(70, own[0]), KvBlock(71, own[1])])]


def test_later_blocks_name_the_one_before_them() -> None:
    _, second = changes(stored([70], [1, 2]), stored([71], [3, 4], parent=70))

    assert second == KvStored([KvBlock(71, block_hashes([3, 4], SIZE)[0])], parent_hash=70)


def test_removals_and_clears_are_reported() -> None:
    told = changes(stored([70, 71], [1, 2, 3, 4]), removed(71), CLEARED)

    assert told[1:] == [KvRemoved([71]), KvCleared()]


def test_events_that_are_arrays_mean_the_same() -> None:
    as_arrays = changes(
        ["BlockStored", [70], None, [1, 2], SIZE, None, "GPU"], ["BlockRemoved", [70]], ["AllBlocksCleared"]
    )

    assert as_arrays == changes(stored([70], [1, 2]), removed(70), CLEARED)


@pytest.mark.parametrize(("given", "number"), [(-1, 2**64 - 1), (b"\x01" * 24 + (5).to_bytes(8, "big"), 5)])
def test_hashes_of_every_form_are_64_bits(given: Any, number: int) -> None:
    [told] = changes(stored([given], [1, 2]))

    assert isinstance(told, KvStored)
    assert told.blocks[0].block_hash == number


def test_kinds_and_fields_that_are_not_known_are_passed_over() -> None:
    assert len(changes({"type": "Surprise"}, stored([70], [1, 2], new_field=[1]))) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
        {"block_size": 4},
        {"extra_keys": [["adapter"]], "lora_name": "adapter"},
        {"extra_keys": [[["picture", 0]]]},
        {"extra_keys": [["salt", "more"]]},
    ],
)
def test_blocks_with_extra_keys_are_left_out_with_their_children(more: dict[str, Any]) -> None:
    assert changes(stored([70], [1, 2], **more), stored([71], [3, 4], parent=70), removed(70, 71)) == []


def test_blocks_under_a_salt_are_hashed_under_it_and_so_are_those_that_follow() -> None:
    told = changes(stored([70], [1, 2], extra_keys=[["tenant"]]), stored([71], [3, 4], parent=70, extra_keys=[None]))

    own = block_hashes([1, 2, 3, 4], SIZE, cache_salt="tenant")
    assert told == [KvStored([KvBlock(70, own[0])]), KvStored([KvBlock(71, own[1])], parent_hash=70)]


def test_a_block_with_copies_is_removed_with_the_last_of_them() -> None:
    translator = EventTranslator(SIZE)
    translator.changes([stored([70], [1, 2]), stored([70], [1, 2])])

    assert translator.changes([removed(70)]) == []
    assert translator.changes([removed(70)]) == [KvRemoved([70])]
    assert translator.changes([removed(70)]) == []


def test_removals_from_other_media_are_ignored() -> None:
    assert len(changes(stored([70], [1, 2]), removed(70, medium="CPU"))) == 1


# A tale is told by batches, which may be lost, doubled, and come late.

BATCHES = [
    [stored([70], [1, 2])],
    [stored([71], [3, 4], parent=70)],
    [removed(71)],
    [stored([72], [5, 6])],
    [CLEARED],
]


def payload(events: list[Any], rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, events, rank])


def told(*numbers: int, rank: int = 0) -> list[KvEvent]:
    events: list[KvEvent] = []
    sequencer = EventSequencer(rank, EventTranslator(SIZE), events.append)
    for number in numbers:
        sequencer.batch(number, payload(BATCHES[number]))
    return events


def test_events_count_up_from_zero_and_name_their_rank() -> None:
    events = told(*range(5), rank=3)

    assert [event.event_id for event in events] == list(range(5))
    assert {event.dp_rank for event in events} == {3}


def test_a_batch_that_comes_twice_counts_once() -> None:
    assert told(0, 1, 0, 1, 2) == told(0, 1, 2)


def test_a_lost_batch_clears_the_cache_and_drops_orphaned_blocks() -> None:
    events = told(0, 2, 3)

    assert [type(event.data) for event in events] == [KvStored, KvCleared, KvStored]


def test_the_end_of_the_engine_clears_its_blocks() -> None:
    events: list[KvEvent] = []
    sequencer = EventSequencer(0, EventTranslator(SIZE), events.append)
    sequencer.end()
    assert events == []

    sequencer.batch(0, payload(BATCHES[0]))
    sequencer.end()
    assert [type(event.data) for event in events] == [KvStored, KvCleared]


@given(st.lists(st.integers(0, len(BATCHES) - 1), max_size=20))
def test_followers_never_know_more_blocks_than_the_engine_holds(numbers: list[int]) -> None:
    events = told(*numbers)
    assert [event.event_id for event in events] == list(range(len(events)))

    known: set[int] = set()
    for event in events:
        if isinstance(event.data, KvStored):
            assert event.data.parent_hash is None or event.data.parent_hash in known
            known |= {block.block_hash for block in event.data.blocks}
        elif isinstance(event.data, KvRemoved):
            assert known.issuperset(event.data.block_hashes)
            known -= set(event.data.block_hashes)
        else:
            known.clear()
    held: set[int] = set()
    for batch in BATCHES[: max(numbers, default=-1) + 1]:
        for change in batch:
            held = {
                "BlockStored": held | set(change.get("block_hashes", ())),
                "BlockRemoved": held - set(change.get("block_hashes", ())),
                "AllBlocksCleared": set(),
            }[change["type"]]
    assert known <= held
