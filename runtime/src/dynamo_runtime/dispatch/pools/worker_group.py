"""Workers of one role, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from dynamo_core.contracts.router import Router
from dynamo_core.protocol.records import ModelCard

from dynamo_runtime.dispatch.pools.pool import Pool


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one model in one role, and the router made for them."""

    pool: Pool
    router: Router


#: The groups that a request needs, in order: one that does it all, or one for the prompt and one for the answer.
RoutePlan: TypeAlias = tuple[WorkerGroup] | tuple[WorkerGroup, WorkerGroup]


class RoutePlanner(Protocol):
    """Plans where the requests of one model go; the workers may change between two calls."""

    @property
    def card(self) -> ModelCard:
        """The card of the model."""

    def plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        """Return the groups for a request that is to be placed now, if possible with workers that are not excluded.

        Raises:
            Unavailable: a role is missing.
        """
