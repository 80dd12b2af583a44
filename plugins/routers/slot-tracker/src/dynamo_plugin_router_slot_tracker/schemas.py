"""The bodies of the HTTP API. Unknown fields are ignored; `null` is no value of any field.

Hashes are signed 64-bit numbers. They stand for unsigned ones bit for bit, so that equal is equal either way, and stay
as they are in this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from dynamo_core.protocol import parse_instance_id

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
DEFAULT_TENANT = "default"

U32 = Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)]
#: Bounds above 63 bits are not the library's to check: `_fits` does.
U64 = Annotated[int, msgspec.Meta(ge=0)]
I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
#: The id of a worker: a number, as all answers have it, or the 16 hexadecimal digits that everything else shows.
if TYPE_CHECKING:
    WorkerId = int
else:
    WorkerId = U64 | Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{16}$")]


def _to_number(body: Registration | Unregistration | Addition) -> None:
    told: int | str = body.worker_id
    if isinstance(told, str):
        msgspec.structs.force_setattr(body, "worker_id", parse_instance_id(told))
    else:
        _fits("worker_id", told)


def _fits(field: str, value: int) -> None:
    if value > U64_MAX:
        raise ValueError(f"{field}: expected `int` <= {U64_MAX}")


class Registration(msgspec.Struct, kw_only=True, frozen=True):
    """A worker and its contiguous data-parallel range: ``POST /register``, and the entries of ``GET /workers``."""

    worker_id: WorkerId
    model_name: str
    tenant_id: str = DEFAULT_TENANT
    #: Tokens.
    block_size: U32
    dp_start: U32
    dp_size: U32

    def __post_init__(self) -> None:
        _to_number(self)


class Unregistration(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /unregister``."""

    worker_id: WorkerId
    model_name: str
    tenant_id: str = DEFAULT_TENANT

    def __post_init__(self) -> None:
        _to_number(self)


class Addition(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /add``."""

    model_name: str
    tenant_id: str = DEFAULT_TENANT
    request_id: str
    worker_id: WorkerId
    dp_rank: U32
    #: One per full block of the prompt, each standing for all blocks up to its own.
    sequence_hashes: list[I64]
    #: Tokens to be prefilled; 0 counts none.
    new_isl_tokens: U64 = 0

    def __post_init__(self) -> None:
        _to_number(self)
        _fits("new_isl_tokens", self.new_isl_tokens)


class RequestKey(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /prefill_complete`` and ``POST /free``."""

    model_name: str
    tenant_id: str = DEFAULT_TENANT
    request_id: str


class Projection(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /potential_loads``."""

    model_name: str
    tenant_id: str = DEFAULT_TENANT
    sequence_hashes: list[I64]
    new_isl_tokens: U64 = 0

    def __post_init__(self) -> None:
        _fits("new_isl_tokens", self.new_isl_tokens)


class Peer(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /register_peer`` and ``POST /deregister_peer``."""

    url: str


class Load(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """An entry of ``GET /loads``: the load of a rank."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int


class PotentialLoad(msgspec.Struct, frozen=True, gc=False):
    """An entry of the answer to ``POST /potential_loads``: a rank's load with the request, and its requests now."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class Held(msgspec.Struct, kw_only=True, frozen=True):
    """A request in a snapshot. `age` is in seconds; `new_isl_tokens` are left to prefill."""

    model_name: str
    tenant_id: str
    request_id: str
    worker_id: U64
    dp_rank: U32
    sequence_hashes: list[I64]
    new_isl_tokens: U64
    age: Annotated[float, msgspec.Meta(ge=0)]


class SnapshotPart(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One line of ``GET /snapshot``. Workers come before the requests on them; `complete` is in the last line."""

    workers: list[Registration] = []
    requests: list[Held] = []
    complete: bool = False
