"""Admission: whether a client request is let in. Decided once per request, before the first route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.router import PoolView
from dynamo_core.protocol.request import PreprocessedRequest


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `deadline` is in seconds of the event loop's clock, None for no wish; higher `priority` goes first.

    `key_id` names the API key, and is empty where none are asked for; `models` are those that it is for, None for all.
    """

    key_id: str = ""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    models: frozenset[str] | None = None

    def allows(self, model: str) -> bool:
        """Whether it may know of this model. One that it may not is as good as not there."""
        return self.models is None or model in self.models


class Permit:
    """The leave to run one request. Released exactly once, when the request has ended, however it ended."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        """Gives the permit back and tells how many tokens came out. Does not wait: no cancelling can lose it."""


class Admission(Plugin, ABC):
    """Lets requests in, makes them wait, or refuses them."""

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        self.config = config
        self.metrics = metrics

    async def start(self) -> None:
        """Begins background work. Called once."""

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """A quick look before any work is done for the request, tokenization included.

        Raises:
            ServiceOverloaded: the request would be refused anyway.
        """

    @abstractmethod
    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Lets the request in; may wait. `pools` are all the pools it will need.

        Raises:
            ServiceOverloaded: with `retry_after` in seconds.
        """

    async def aclose(self) -> None:
        """Ends background work. Safe twice, and without `start`."""
