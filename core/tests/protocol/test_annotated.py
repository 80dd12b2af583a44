from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dynamo_core.errors import BackendError, InvalidArgument, Unknown
from dynamo_core.protocol.annotated import Annotated
from hypothesis import given
from hypothesis import strategies as st

#: Anything JSON can spell.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def over_the_wire(item: Annotated[int]) -> Annotated[int]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=Annotated[int])


def test_the_completing_flag_is_an_event_without_data() -> None:
    item: Annotated[int] = Annotated.from_complete_final()

    assert msgspec.json.encode(item) == b'{"event":"complete_final"}'
    assert item.is_complete_final()
    assert item.is_event()
    assert not item.is_error()
    assert item.ok() is item


def test_data_is_no_event() -> None:
    item = over_the_wire(Annotated.from_data(5))

    assert item.data == 5
    assert not item.is_event()
    assert not item.is_complete_final()
    assert item.ok() is item
    assert msgspec.json.encode(item) == b'{"data":5}'


@given(json_values)
def test_the_value_of_an_annotation_comes_back(value: object) -> None:
    item: Annotated[int] = over_the_wire(Annotated.from_annotation("timing", value))

    assert item.event == "timing"
    assert item.is_event()
    assert item.comment is not None
    assert [msgspec.json.decode(text) for text in item.comment] == [value]


def test_a_typed_error_is_raised_with_its_type_and_cause() -> None:
    error = BackendError.InvalidArgument("too long", cause=KeyError("x"))

    item = over_the_wire(Annotated.from_error(error))

    assert item.is_error()
    assert item.comment == ["too long"]
    with pytest.raises(InvalidArgument, match="too long") as caught:
        item.ok()
    assert type(caught.value) is BackendError.InvalidArgument
    assert type(caught.value.__cause__) is Unknown


def test_an_error_that_is_only_text_becomes_unknown() -> None:
    item: Annotated[int] = over_the_wire(Annotated.from_error("it broke"))

    assert type(item.to_error()) is Unknown
    assert str(item.to_error()) == "it broke"


def test_an_error_without_any_text_has_still_a_message() -> None:
    item: Annotated[int] = Annotated(event="error")

    assert str(item.to_error()) == "unknown error"


def test_unknown_fields_are_ignored() -> None:
    later = msgspec.msgpack.encode({"event": "complete_final", "invented": {"later": 1}})

    item = msgspec.msgpack.decode(later, type=Annotated[int])

    assert item == Annotated.from_complete_final()


class Vector(msgspec.Struct):
    """A payload of a plugin's endpoint."""

    values: list[float]


@pytest.mark.parametrize(
    ("payload", "kind"),
    [(5, int), ("text", str), (b"bytes", bytes), ({"a": [1, None]}, Any), (Vector([0.5]), Vector), ([[1], []], list)],
)
def test_any_type_can_be_the_payload(payload: Any, kind: Any) -> None:
    item = Annotated(payload, id="7", event="note", comment=["said"])

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=Annotated[kind]) == item
    assert item.into_result() == payload
    assert item.map_data(lambda data: [data]) == Annotated([payload], id="7", event="note", comment=["said"])


def test_the_result_of_an_item_is_its_data_or_its_error() -> None:
    assert Annotated.from_data(0).into_result() == 0
    flag: Annotated[int] = Annotated.from_complete_final()
    assert flag.into_result() is None
    broken: Annotated[int] = Annotated(event="error", comment=["first", "then"])
    with pytest.raises(Unknown, match=r"^first, then$"):
        broken.into_result()


def test_data_that_cannot_be_changed_becomes_an_error_item() -> None:
    def refuse(data: int) -> str:
        raise InvalidArgument(f"{data} is too large", field="n")

    item = Annotated(5, id="7", event="note").map_data(refuse)

    assert (item.data, item.id, item.event) == (None, None, "error")
    with pytest.raises(InvalidArgument, match="5 is too large"):
        item.ok()


def test_an_item_without_data_has_nothing_to_change() -> None:
    item: Annotated[int] = Annotated.from_error(BackendError.Unknown("it broke"))

    assert item.map_data(lambda data: data + 1) == item


def test_transfer_keeps_id_event_and_comment() -> None:
    item = Annotated(5, id="7", event="note", comment=["said"])

    assert item.transfer("five") == Annotated("five", id="7", event="note", comment=["said"])
