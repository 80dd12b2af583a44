"""Admission: whether a client request is let in. Decided once per request, before the first route."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.router import PoolView
from dynamo_core.contracts.thresholds import NO_THRESHOLDS, RankLoad, ThresholdView
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import AsyncResource


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `deadline` is in seconds of the event loop's clock, None for no wish; higher `priority` goes first.

    `key_id` names the API key, and is empty where none are asked for; `models` are those that it is for, None for all.
    `retries` is how often the client says that it has asked for the same before.
    """

    key_id: str = ""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    models: frozenset[str] | None = None
    retries: int = 0

    def allows(self, model: str) -> bool:
        """Whether it may know of this model. One that it may not is as good as not there."""
        return self.models is None or model in self.models


class Permit:
    """The leave to run one request. Released exactly once, when the request has ended, however it ended."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        """Gives the permit back and tells how many tokens came out. Does not wait: no cancelling can lose it."""


class SharedPermit(Permit):
    """One permit for a request that is made of several calls: each releases it, and the last one counts."""

    __slots__ = ("_left", "_permit", "_tokens")

    def __init__(self, permit: Permit, calls: int) -> None:
        self._permit: Permit | None = permit
        self._left = calls
        self._tokens = 0

    def release(self, output_tokens: int) -> None:
        """A call has ended."""
        self._tokens += output_tokens
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        """No call will release it any more, whether all have been made or not. Safe twice."""
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.release(self._tokens)


def _one_second(model: str) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class AdmissionServices:
    """What an admission is made with."""

    metrics: MetricsScope
    #: When the workers of a model are busy.
    thresholds: ThresholdView = NO_THRESHOLDS
    #: Seconds after which somebody who asked for a model and was refused may ask again, from how fast requests end;
    #: another number for each who asks.
    retry_after: Callable[[str], float] = _one_second


class Admission(Plugin, AsyncResource):
    """Lets requests in, makes them wait, or refuses them."""

    #: Whether `is_busy` is asked, so that the thresholds count.
    ARMS_THRESHOLDS: ClassVar[bool] = False

    def __init__(self, config: PluginConfig, services: AdmissionServices) -> None:
        self.config = config
        self.services = services

    async def start(self) -> None:
        """Begins background work. Called once."""

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """A quick look before any work is done for the request, tokenization included.

        Raises:
            ServiceOverloaded: the request would be refused anyway.
        """

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        """Whether a worker with these loads is passed over by routers, if the class says `ARMS_THRESHOLDS`.

        Asked once per worker and change of its load, never per request.
        """
        return False

    @abstractmethod
    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Lets the request in; may wait. `pools` are all the pools it will need.

        Raises:
            ServiceOverloaded: with `retry_after` in seconds.
        """

    async def aclose(self) -> None:
        """Ends background work. Safe twice, and without `start`."""
