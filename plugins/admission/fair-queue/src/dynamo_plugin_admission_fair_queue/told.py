"""What a frontend tells the others about its tenants, as bytes that do not say more than they may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from dynamo_core.protocol.reading import read

#: The version of what is told. Fields are only ever added at the end.
PROTO = 1
#: The most bytes that one frontend tells: some thousands of tenants that have something at the same time.
LARGEST = 256 * 1024
#: The most tokens that are counted with: all whole numbers up to here are exact.
_MOST = 2.0**53


class TenantUse(msgspec.Struct, array_like=True, frozen=True):
    """What a tenant has in one frontend.

    `spent` are tokens since the frontend began to count for this tenant, and `number` is another each time that it
    does; `left` are those that the tenant may still spend, below 0 for a debt.
    """

    number: int
    running: Annotated[int, msgspec.Meta(ge=0)]
    spent: float
    left: float


class Told(msgspec.Struct, array_like=True, frozen=True):
    """All that a frontend tells. One that is `leaving` counts no more, once this has been heard."""

    proto: int
    tenants: dict[str, TenantUse]
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the others showed. All times are microseconds of the server's clock.

    `stamps` says of each frontend when it last told something; `told` has what, of those where that was not known.
    """

    now: int
    stamps: Mapping[str, int]
    told: Mapping[str, bytes]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Told)


def encode(tenants: dict[str, TenantUse], *, leaving: bool = False) -> bytes:
    """What these tenants have, as it travels.

    Raises:
        ValueError: it is more than others would listen to.
    """
    data = _ENCODER.encode(Told(PROTO, tenants, leaving))
    if len(data) > LARGEST:
        raise ValueError(f"what {len(tenants)} tenants have is {len(data)} bytes; at most {LARGEST} can be told")
    return data


def decode(data: bytes) -> Told:
    """What another frontend told.

    Raises:
        ValueError: it is not understood.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it is more than {LARGEST} bytes")
    told = read(_DECODER, data)
    if told.proto != PROTO:
        raise ValueError(f"it is of version {told.proto}; known is {PROTO}")
    if not all(abs(use.spent) <= _MOST and abs(use.left) <= _MOST for use in told.tenants.values()):
        raise ValueError("it has tokens that are no number that can be counted with")
    return told
