"""The room in which two engines meet tells the rank."""

from __future__ import annotations

from dynamo_runtime.dispatch.execution.prefill import ROOMS, bootstrap_room
from hypothesis import given
from hypothesis import strategies as st


@given(size=st.integers(1, 4096), data=st.data())
def test_a_room_is_a_number_of_63_bits_that_names_the_rank(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))

    number = bootstrap_room(size, rank)

    assert 0 <= number < ROOMS
    assert number % size == rank


def test_rooms_are_not_used_again() -> None:
    assert len({bootstrap_room(4, 1) for _ in range(1000)}) == 1000
