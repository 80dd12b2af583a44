from __future__ import annotations

from typing import Any

import msgspec
import pytest
from dynamo_core.protocol.cards import read_frontend
from dynamo_core.protocol.decoding import Unreadable
from dynamo_core.protocol.output import FinishReason, LLMEngineOutput
from dynamo_core.protocol.records import FRONTENDS, FrontendRecord, PeerReplyPart, PeerRequest
from dynamo_core.protocol.request import PreprocessedRequest, RoutingHints, StopConditions
from hypothesis import given
from hypothesis import strategies as st

#: What the `Any` fields carry: plain values msgpack can spell.
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
integers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)


def struct_strategy(struct: type[Any]) -> st.SearchStrategy[Any]:
    """Return values of a struct, each field drawn for its type."""
    fields = {
        field.name: type_strategy(msgspec.inspect.type_info(field.type)) for field in msgspec.structs.fields(struct)
    }
    return st.builds(struct, **fields)


def type_strategy(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    kinds = msgspec.inspect
    match info:
        case kinds.UnionType(types=types):
            return st.one_of([type_strategy(one) for one in types])
        case kinds.ListType(item_type=item):
            return st.lists(type_strategy(item), max_size=3)
        case kinds.DictType(value_type=value):
            return st.dictionaries(st.text(max_size=5), type_strategy(value), max_size=2)
        case kinds.StructType(cls=cls):
            return struct_strategy(cls)
        case kinds.EnumType(cls=enum):
            return st.sampled_from(enum)
    simple: dict[type, st.SearchStrategy[Any]] = {
        kinds.AnyType: plain,
        kinds.NoneType: st.none(),
        kinds.BoolType: st.booleans(),
        kinds.IntType: integers,
        kinds.FloatType: floats,
        kinds.StrType: st.text(max_size=8),
    }
    return simple[type(info)]


@pytest.mark.parametrize("struct", [PreprocessedRequest, LLMEngineOutput])
@given(data=st.data())
def test_any_value_comes_back_and_fields_of_a_later_version_are_ignored(struct: type[Any], data: st.DataObject) -> None:
    value = data.draw(struct_strategy(struct))

    encoded = msgspec.msgpack.encode(value)
    later = msgspec.msgpack.encode({**msgspec.msgpack.decode(encoded), "invented_later": [{"x": 1}]})

    assert msgspec.msgpack.decode(encoded, type=struct) == value
    assert msgspec.msgpack.decode(later, type=struct) == value


def test_a_request_of_an_older_version_has_the_defaults() -> None:
    request = msgspec.msgpack.decode(msgspec.msgpack.encode({"token_ids": [1, 2]}), type=PreprocessedRequest)

    assert request == PreprocessedRequest(token_ids=[1, 2])
    assert request.stop_conditions == StopConditions()


def test_defaults_are_left_out_on_the_wire() -> None:
    groups: dict[str, object] = {"stop_conditions": {}, "sampling_options": {}, "output_options": {}}

    request = msgspec.msgpack.decode(msgspec.msgpack.encode(PreprocessedRequest(token_ids=[7])))

    assert request == {"token_ids": [7], **groups}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(LLMEngineOutput())) == {}


def test_the_mark_of_a_health_probe_has_its_own_name_on_the_wire() -> None:
    encoded = msgspec.msgpack.encode(PreprocessedRequest(token_ids=[], is_probe=True))

    assert msgspec.msgpack.decode(encoded)["_HEALTH_CHECK"] is True


def test_ignoring_the_end_of_sequence_clears_every_stop_but_the_limit() -> None:
    stops = StopConditions(
        max_tokens=9, stop=["a"], stop_token_ids=[1], stop_token_ids_hidden=[2], min_tokens=3, ignore_eos=True
    )

    stops.apply_ignore_eos()

    assert stops == StopConditions(max_tokens=9, min_tokens=3, ignore_eos=True)


def test_stops_stay_where_the_end_of_sequence_counts() -> None:
    stops = StopConditions(stop=["a"], stop_token_ids=[1], stop_token_ids_hidden=[2])

    stops.apply_ignore_eos()

    assert (stops.stop, stops.stop_token_ids, stops.stop_token_ids_hidden) == (["a"], [1], [2])


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CANCELLED, "stop"),
        (FinishReason.CONTENT_FILTER, "content_filter"),
    ],
)
def test_finish_reasons_have_the_names_of_the_openai_api(reason: FinishReason, name: str) -> None:
    assert reason.to_openai() == name


def test_every_finish_reason_has_an_openai_name() -> None:
    assert all(reason.to_openai() for reason in FinishReason)


def test_routing_hints_without_identity_have_the_old_encoding() -> None:
    hints = RoutingHints(priority=2, cache_salt="s")

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(hints)) == {"priority": 2, "cache_salt": "s"}


def test_routing_hints_without_identity_are_decoded() -> None:
    old = msgspec.msgpack.encode({"token_ids": [1], "routing": {"priority": 2}})

    hints = msgspec.msgpack.decode(old, type=PreprocessedRequest).routing

    assert hints == RoutingHints(priority=2)
    assert (hints.tenant, hints.user, hints.session_id, hints.headers) == (None, None, None, None)


def test_the_record_of_a_frontend_is_this_json() -> None:
    record = FrontendRecord(frontend_id=255, address={"tcp": "h:1/0"}, pid=7, host="h", version="1.2", replica=0)
    text = (
        b'{"frontend_id":255,"address":{"tcp":"h:1/0"},"pid":7,"host":"h","version":"1.2","replica":0,"lease_ttl":3.0}'
    )

    assert FRONTENDS + record.path == "v1/frontends/dynamo/ff"
    assert msgspec.json.encode(msgspec.structs.replace(record, lease_ttl=3.0)) == text
    assert read_frontend(text[:-1] + b',"invented_later":[1]}') == msgspec.structs.replace(record, lease_ttl=3.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"frontend_id":-1}', "its frontend_id is -1"),
        (b'{"frontend_id":9223372036854775808}', "its frontend_id is 9223372036854775808"),
        (b'{"frontend_id":1,"proto":7}', "it speaks protocol 7"),
        (b"{}", "missing required field `frontend_id`"),
    ],
)
def test_the_record_of_a_frontend_that_cannot_be_called_is_refused(text: bytes, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_frontend(text)


def test_a_call_between_frontends_is_these_bytes() -> None:
    request, part = PeerRequest("feed/state", b"\xc0"), PeerReplyPart(b"\x01")

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request)) == {"name": "feed/state", "payload": b"\xc0"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(part)) == {"data": b"\x01"}
