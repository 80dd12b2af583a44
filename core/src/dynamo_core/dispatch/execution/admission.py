"""Admission that lets everything in: what ``admission: {use: none}`` means."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core.contracts.admission import Admission, Permit, Principal
from dynamo_core.contracts.router import PoolView
from dynamo_core.protocol.request import PreprocessedRequest

_PERMIT = Permit()


class NoAdmission(Admission):
    """Lets every request in at once."""

    NAME = "none"

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        return _PERMIT
