"""The state of a worker in its record: written only where it is set, and checked where it is read."""

from __future__ import annotations

import msgspec
import pytest
from dynamo_core.protocol.cards import read_instance
from dynamo_core.protocol.decoding import Unreadable
from dynamo_core.protocol.records import CORDONED, DRAINING, SERVING, Instance


@pytest.mark.parametrize(("state", "name"), [(SERVING, "serving"), (CORDONED, "cordoned"), (DRAINING, "draining")])
def test_every_state_is_read_as_it_was_written(state: str, name: str) -> None:
    read = read_instance(msgspec.json.encode(Instance(instance_id=7, replica=3, state=state)))

    assert (read.state, read.state_name, read.replica) == (state, name, 3)


def test_a_worker_in_service_writes_the_record_that_it_always_wrote() -> None:
    assert msgspec.json.decode(msgspec.json.encode(Instance(instance_id=7, worker="w"))) == {
        "instance_id": 7,
        "worker": "w",
    }


def test_a_reader_that_knows_no_states_reads_the_rest_of_the_record() -> None:
    class Older(msgspec.Struct, omit_defaults=True, kw_only=True, frozen=True):
        instance_id: int
        worker: str = ""

    written = msgspec.json.encode(Instance(instance_id=7, worker="w", replica=1, state=CORDONED))

    assert msgspec.json.decode(written, type=Older) == Older(instance_id=7, worker="w")


@pytest.mark.parametrize("state", ["Cordoned", "serving", "gone", "\x1b[2J" + "x" * 1000])
def test_a_record_with_an_unknown_state_is_refused(state: str) -> None:
    with pytest.raises(Unreadable, match=r"its state is '.+ can be$") as refused:
        read_instance(msgspec.json.encode(Instance(instance_id=7, state=state)))

    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 120


def test_a_non_text_state_is_refused() -> None:
    with pytest.raises(Unreadable, match="state"):
        read_instance(b'{"instance_id": 7, "state": 1}')
