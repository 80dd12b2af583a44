"""Admission control: decides once per client request, before the first route, whether it may run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.metrics import MetricsScope
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import PoolView
from dynamo_core.contracts.thresholds import NO_THRESHOLDS, RankLoad, ThresholdView
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import AsyncResource

#: What the settings call the admission that lets every request in. It is built in: no plugin is loaded.
NO_ADMISSION = "none"


class Permit:
    """The permission to run one request. It is released exactly once, when the request has ended in any way."""

    __slots__ = ()

    def release(self, output_tokens: int) -> None:
        """Release the permit and report the number of output tokens. Never waits, so no cancellation loses it."""


class SharedPermit(Permit):
    """One permit for a request of several calls. Each call releases it; the last release counts."""

    __slots__ = ("_left", "_permit", "_tokens")

    def __init__(self, permit: Permit, calls: int) -> None:
        self._permit: Permit | None = permit
        self._left = calls
        self._tokens = 0

    def release(self, output_tokens: int) -> None:
        """Record that a call has ended."""
        self._tokens += output_tokens
        self._left -= 1
        if not self._left:
            self.end()

    def end(self) -> None:
        """End the permit: no further call will release it, even if not all calls were made. Safe twice."""
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.release(self._tokens)


def _one_second(model: str) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class AdmissionServices:
    """The services that an admission plugin is constructed with."""

    metrics: MetricsScope
    #: When the workers of a model are busy.
    thresholds: ThresholdView = NO_THRESHOLDS
    #: Seconds after which a refused client of a model may retry, estimated from the rate at which requests end. Each
    #: call gives another number, so that clients do not return at once.
    retry_after: Callable[[str], float] = _one_second


class Admission(Plugin, AsyncResource):
    """Admits requests, makes them wait, or rejects them."""

    #: Whether core calls `is_busy`, so that the thresholds take effect.
    ARMS_THRESHOLDS: ClassVar[bool] = False
    #: Whether a request is refused, at once or after a wait, while every worker of a pool that it needs is busy. False
    #: for a plugin that only keeps clients within limits of their own, and raises `RateLimited` or `QuotaExceeded`.
    REFUSES_BY_LOAD: ClassVar[bool] = True

    def __init__(self, config: PluginConfig, services: AdmissionServices) -> None:
        self.config = config
        self.services = services

    async def start(self) -> None:
        """Start background work. Called once."""

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Check the request quickly before any work is done for it, tokenization included.

        Raises:
            ServiceOverloaded, RateLimited, QuotaExceeded: `admit` would reject the request anyway.
        """

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        """Return whether routers skip a worker with these loads. Only called if the class sets `ARMS_THRESHOLDS`.

        Called once per worker and change of its load, never per request.
        """
        return False

    @abstractmethod
    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Admit the request; may wait. `pools` are all the pools that the request will need.

        Raises:
            ServiceOverloaded: the workers are busy; with `retry_after` in seconds.
            RateLimited: the client is over a limit of its own; it is told the message.
            QuotaExceeded: the client has used up what it may have, so that a retry will not help.
        """

    async def aclose(self) -> None:
        """Stop background work. Safe twice, and without `start`."""
