"""What is told of a body that cannot be read, and where in it the fault is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from dynamo_plugin_router_slot_tracker.decoding import BodyOf
from dynamo_plugin_router_slot_tracker.errors import Malformed, Refusal, WrongSchema
from dynamo_plugin_router_slot_tracker.json_positions import end_of, position
from dynamo_plugin_router_slot_tracker.schemas import Addition, Peer, Registration, RequestKey
from hypothesis import given
from hypothesis import strategies as st

SYNTAX = "Failed to parse the request body as JSON: "
SCHEMA = "Failed to deserialize the JSON body into the target type: "


def read_as(type: type[Any], body: bytes) -> Any:
    http = make_mocked_request("POST", "/", headers={"Content-Type": "application/json"})
    http._read_bytes = body
    return asyncio.run(BodyOf(type).read(http))


def refusal_of(type: type[Any], body: bytes) -> Refusal:
    with pytest.raises(Refusal) as raised:
        read_as(type, body)
    return raised.value


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "unexpected end of the text at line 1 column 0"),
        (b"{", "unexpected end of the text at line 1 column 1"),
        (b'{"a": 1,\n  x}', "object keys must be strings at line 2 column 3"),
        (b'{"url": "tcp://x"} x', "trailing characters at line 1 column 20"),
        (b"\xff", "invalid character at line 1 column 1"),
        (b'{"model_name":"\xff"}', "the text is not UTF-8"),
        (b'{"x":' + b"[" * 100_000, "recursion limit exceeded"),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit exceeded"),
    ],
)
def test_a_json_syntax_error_has_its_position(body: bytes, text: str) -> None:
    # The fields of an object that ends are looked at before what follows it.
    refused = refusal_of(Peer if text.startswith("trailing") else Registration, body)

    assert isinstance(refused, Malformed)
    assert refused.message == SYNTAX + text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"worker_id": "x"}', "worker_id: expected `str` matching regex '^[0-9a-fA-F]{16}$' at line 1 column 17"),
        ('{\n "worker_id": 1.5\n}', "worker_id: expected `int | str`, got `float` at line 2 column 17"),
        ('{"worker_id": true}', "worker_id: expected `int | str`, got `bool` at line 1 column 18"),
        ('{"sequence_hashes": [1,\n2, null]}', "sequence_hashes[2]: expected `int`, got `null` at line 2 column 7"),
        ('{"sequence_hashes": 5}', "sequence_hashes: expected `array`, got `int` at line 1 column 21"),
        ("{}", "missing field `model_name` at line 1 column 2"),
        ("[]", "expected `object`, got `array` at line 1 column 2"),
        ('"é"', "expected `object`, got `str` at line 1 column 4"),
    ],
)
def test_a_schema_error_has_field_and_position(body: str, text: str) -> None:
    refused = refusal_of(Addition, body.encode())

    assert isinstance(refused, WrongSchema)
    assert refused.message == SCHEMA + text


def test_a_number_above_64_bits_is_named() -> None:
    body = '{"model_name":"m","request_id":"r","worker_id":18446744073709551616,"dp_rank":0,"sequence_hashes":[]}'

    assert refusal_of(Addition, body.encode()).message == (
        f"{SCHEMA}worker_id: expected `int` <= 18446744073709551615 at line 1 column 67"
    )


def addition(*fields: str) -> str:
    """Return the text of an `/add` that is complete, with these fields after its own."""
    own = ['"model_name":"m"', '"request_id":"r"', '"worker_id":7', '"dp_rank":0', '"sequence_hashes":[1]']
    return "{" + ",".join([*own, *fields]) + "}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (addition('"worker_id":8'), "worker_id"),
        (addition('"worker_id":7'), "worker_id"),
        (addition('"sequence_hashes" : []'), "sequence_hashes"),
        (addition('"new_isl_tokens":1', '"new_isl_tokens":2'), "new_isl_tokens"),
        # The same name, spelt with an escape.
        (addition(r'"worker\u005fid":8'), "worker_id"),
        (addition('"x":{"worker_id":1}', '"model_name":"n"'), "model_name"),
    ],
)
def test_a_field_that_is_there_twice_is_refused(body: str, field: str) -> None:
    refused = refusal_of(Addition, body.encode())

    assert isinstance(refused, WrongSchema)
    assert refused.message.startswith(f"{SCHEMA}duplicate field `{field}` at line 1 column ")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (addition().replace(":7", ":-0"), "worker_id: expected `int`, got `float` at line 1 column 49"),
        (addition().replace("[1]", "[1,\n -0 ]"), "sequence_hashes[1]: expected `int`, got `float` at line 2 column 3"),
        (addition('"new_isl_tokens":-0'), "new_isl_tokens: expected `int`, got `float` at line 1 column 102"),
    ],
)
def test_minus_zero_is_no_integer(body: str, text: str) -> None:
    refused = refusal_of(Addition, body.encode())

    assert isinstance(refused, WrongSchema)
    assert refused.message == SCHEMA + text


@pytest.mark.parametrize(
    "fields",
    [
        # Fields that the service does not know may hold anything.
        ['"x":1', '"x":2'],
        ['"x":-0', '"y":[-0]', '"z":{"worker_id":1}'],
        ['"x":"-0,"', '"y":"worker_id"', r'"z":"\u005f"'],
    ],
)
def test_text_that_resembles_a_duplicate_field_or_minus_zero_is_accepted(fields: list[str]) -> None:
    body = addition(*fields).replace('"r"', '"-0,"')

    read = read_as(Addition, body.encode())

    assert (read.worker_id, read.request_id, read.sequence_hashes) == (7, "-0,", [1])


texts = st.sampled_from(["m", "-0", "-0]", '"worker_id":', "é", "\\", "request_id", "\n"])


@given(texts, texts, st.dictionaries(texts, texts | st.integers() | st.lists(st.integers())), st.booleans())
def test_a_body_without_duplicates_is_accepted_with_any_texts(
    model: str, request: str, more: dict[str, Any], ascii: bool
) -> None:
    body = more | {"model_name": model, "request_id": request}

    read = read_as(RequestKey, json.dumps(body, ensure_ascii=ascii).encode())

    assert (read.model_name, read.request_id) == (model, request)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=4), values, min_size=1, max_size=5),
    st.data(),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_the_end_of_any_value_is_found(
    value: dict[str, Any], data: st.DataObject, indent: int | None, ascii: bool
) -> None:
    path: list[str | int] = []
    inner: Any = value
    while isinstance(inner, dict | list) and inner and (not path or data.draw(st.booleans())):
        step = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        path.append(step)
        inner = inner[step]
    # Surrogates cannot be sent.
    text = json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8", "replace")

    end = end_of(text, path)

    if ascii:
        # What ends there is the value: it and nothing before it can be read back.
        assert any(_reads(text[at:end], inner) for at in range(end))
    assert 0 < end <= len(text)


def _reads(text: bytes, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


@pytest.mark.parametrize("body", [b"", b"{", b'{"a"', b'{"a":', b"nonsense", b"[1,", b"[" * 100_000, b"\xff"])
def test_an_unlocatable_error_is_placed_at_the_end(body: bytes) -> None:
    assert end_of(body, ["a", 0]) == len(body)


def test_positions_count_from_one() -> None:
    assert position(b"ab\ncd", 1) == "line 1 column 1"
    assert position(b"ab\ncd", 4) == "line 2 column 1"
    assert position(b"ab\ncd", 5) == "line 2 column 2"
