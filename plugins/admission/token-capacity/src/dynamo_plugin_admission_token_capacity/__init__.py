"""Admission by worker load: requests are refused while all workers are busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import Admission

DYNAMO_API = 1


@hookimpl
def dynamo_register_admission() -> list[type[Admission]]:
    from dynamo_plugin_admission_token_capacity.admission import TokenCapacityAdmission

    return [TokenCapacityAdmission]
