"""The tests that take a way to a broker apart know which requests went over it, however the bytes fall."""

from __future__ import annotations

import msgspec
from dynamo_testing.faults import Direction, Passing
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.wire import BrokerRequests


def message(seed: int | None) -> bytes:
    return b"MSG x 1\r\n" + msgspec.msgpack.encode({"sampling_options": {"seed": seed, "n": 1}}) + b"\r\n"


@given(st.data())
def test_seeds_are_read_however_the_messages_are_cut(data: st.DataObject) -> None:
    seeds = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=6))
    sent = b"".join(message(seed) for seed in [*seeds, None])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sent)))))
    requests = BrokerRequests()

    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(sent)], strict=True)):
        requests(Passing(0, Direction.DOWN, number, sent[start:end]))

    assert requests.seeds == set(seeds)


def test_directions_and_connections_are_kept_apart() -> None:
    requests, (first, rest) = BrokerRequests(), (message(300)[:-8], message(300)[-8:])

    requests(Passing(0, Direction.UP, 0, message(7)))
    requests(Passing(0, Direction.DOWN, 0, first))
    requests(Passing(1, Direction.DOWN, 0, rest))
    requests(Passing(0, Direction.DOWN, 1, rest))

    assert requests.seeds == {300}
