"""The codec of usage reports between frontends, as bytes within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from dynamo_core.protocol import read

#: The version of the format. Fields are only ever added at the end.
PROTO = 1
#: The largest report in bytes: some thousands of tenants with requests or tokens at the same time.
LARGEST = 256 * 1024
#: The most tokens that count: all whole numbers up to here are exact.
_MOST = 2.0**53


class TenantUse(msgspec.Struct, array_like=True, frozen=True):
    """The usage of a tenant in one frontend.

    `spent` are tokens since the frontend began to count for this tenant, and `number` is another each time that it
    does; `left` are those that the tenant may still spend, below 0 for a debt.
    """

    number: int
    running: Annotated[int, msgspec.Meta(ge=0)]
    spent: float
    left: float


class UsageReport(msgspec.Struct, array_like=True, frozen=True):
    """All that a frontend reports. A frontend that is `leaving` counts no more."""

    proto: int
    tenants: dict[str, TenantUse]
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class PeerSnapshot:
    """The peers at one moment. All times are microseconds of the server's clock.

    `stamps` has the time of each peer's last report; `reports` has the reports that were not known yet.
    """

    now: int
    stamps: Mapping[str, int]
    reports: Mapping[str, bytes]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(UsageReport)


def encode(tenants: dict[str, TenantUse], *, leaving: bool = False) -> bytes:
    """Return a report as bytes.

    Raises:
        ValueError: it is larger than peers accept.
    """
    data = _ENCODER.encode(UsageReport(PROTO, tenants, leaving))
    if len(data) > LARGEST:
        raise ValueError(f"what {len(tenants)} tenants have is {len(data)} bytes; at most {LARGEST} can be told")
    return data


def decode(data: bytes) -> UsageReport:
    """Return the report of a peer.

    Raises:
        ValueError: it is not understood.
    """
    if len(data) > LARGEST:
        raise ValueError(f"it is more than {LARGEST} bytes")
    report = read(_DECODER, data)
    if report.proto != PROTO:
        raise ValueError(f"it is of version {report.proto}; known is {PROTO}")
    if not all(abs(use.spent) <= _MOST and abs(use.left) <= _MOST for use in report.tenants.values()):
        raise ValueError("it has tokens that are no number that can be counted with")
    return report
