from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from dynamo_core.errors import (
    _BY_KIND,
    MAX_CAUSES,
    BackendError,
    BackendUnknown,
    ConfigError,
    DynamoError,
    InvalidArgument,
    RateLimited,
    ServiceOverloaded,
    StreamIncomplete,
    Unknown,
    WireError,
    as_backend_error,
    chain,
    chain_has,
    from_wire,
    to_wire,
)
from hypothesis import given
from hypothesis import strategies as st

KINDS = sorted(_BY_KIND)
WIRE = msgspec.msgpack.Decoder(WireError)


def over_the_wire(error: BaseException) -> DynamoError:
    return from_wire(WIRE.decode(msgspec.msgpack.encode(to_wire(error))))


def linked(errors: list[BaseException]) -> BaseException:
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_type_and_message(kind: str) -> None:
    error = _BY_KIND[kind]("what happened")

    arrived = over_the_wire(error)

    assert type(arrived) is type(error)
    assert (arrived.kind, arrived.message, str(arrived)) == (kind, "what happened", "what happened")


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.text()), min_size=1, max_size=MAX_CAUSES + 1))
def test_a_chain_of_causes_arrives_in_order(links: list[tuple[str, str]]) -> None:
    error = linked([_BY_KIND[kind](message) for kind, message in links])

    arrived = list(chain(over_the_wire(error)))

    assert [(type(link).kind, str(link)) for link in arrived if isinstance(link, DynamoError)] == links


def test_a_chain_is_cut_where_it_gets_too_deep() -> None:
    error = linked([Unknown(str(depth)) for depth in range(20)])

    arrived = list(chain(over_the_wire(error)))

    assert [str(link) for link in arrived] == [str(depth) for depth in range(MAX_CAUSES + 1)]


def test_more_causes_than_allowed_are_not_read() -> None:
    wire = WireError("Unknown", "head", [WireError("Unknown", str(depth)) for depth in range(100)])

    link: BaseException | None = from_wire(wire)
    depth = -1
    while link is not None:
        link = link.__cause__
        depth += 1
    assert depth == MAX_CAUSES


def test_a_circle_of_causes_ends() -> None:
    error = Unknown("round")
    error.__cause__ = error

    assert len(to_wire(error).causes) == MAX_CAUSES


def test_retry_after_survives_the_wire() -> None:
    arrived = over_the_wire(ServiceOverloaded("busy", retry_after=7.5))

    assert isinstance(arrived, ServiceOverloaded)
    assert arrived.retry_after == 7.5


@given(
    st.floats(min_value=0.001, max_value=1e6),
    st.dictionaries(st.text(max_size=20), st.text(max_size=20), max_size=6),
)
def test_client_limits_survive_the_wire(seconds: float, limits: dict[str, str]) -> None:
    arrived = over_the_wire(RateLimited("slow down", retry_after=seconds, limits=limits))

    assert isinstance(arrived, RateLimited)
    assert (arrived.message, arrived.retry_after, arrived.limits) == ("slow down", seconds, limits)


def test_a_rate_limited_error_without_the_limits_field_is_decoded() -> None:
    old = msgspec.msgpack.encode({"kind": "RateLimited", "message": "slow down"})

    arrived = from_wire(WIRE.decode(old))

    assert isinstance(arrived, RateLimited)
    assert (arrived.retry_after, arrived.limits) == (1.0, {})


def test_a_foreign_exception_becomes_unknown_and_its_text_stays() -> None:
    arrived = over_the_wire(ValueError("odd"))

    assert type(arrived) is Unknown
    assert str(arrived) == "odd"


def test_an_unknown_kind_becomes_unknown() -> None:
    assert type(from_wire(WireError("FromTheFuture", "new"))) is Unknown


def test_an_engine_error_is_both_its_kind_and_a_backend_error() -> None:
    arrived = over_the_wire(BackendError.InvalidArgument("no"))

    assert isinstance(arrived, InvalidArgument)
    assert isinstance(arrived, BackendError)
    assert type(arrived).public


def test_a_cause_is_found_anywhere_in_the_chain() -> None:
    error = linked([Unknown("a"), ConfigError("b"), KeyError("c")])

    assert chain_has(error, ConfigError)
    assert chain_has(error, LookupError)
    assert not chain_has(error, StreamIncomplete)


def test_untyped_engine_exceptions_become_backend_errors() -> None:
    typed = ConfigError("x")
    foreign = ZeroDivisionError()

    assert as_backend_error(typed) is typed
    wrapped = as_backend_error(foreign)
    assert type(wrapped) is BackendUnknown
    assert str(wrapped) == "ZeroDivisionError"
    assert wrapped.__cause__ is foreign
