"""Admission by several plugins: a request runs once all of them have admitted it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from dynamo_core.contracts.admission import Admission, AdmissionServices, Permit
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.router import PoolView
from dynamo_core.contracts.thresholds import RankLoad
from dynamo_core.errors import DynamoError, ServiceOverloaded
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_core.resources import ClosingStack

log = logging.getLogger(__name__)

_PERMIT = Permit()


class NoAdmission(Admission):
    """Lets every request in at once."""

    NAME = "none"
    REFUSES_BY_LOAD = False

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        return _PERMIT


class ChainPermit(Permit):
    """The permits of all plugins of a chain. They are released in the reverse order, each once."""

    __slots__ = ("_permits",)

    def __init__(self, permits: dict[str, Permit]) -> None:
        self._permits = permits

    def release(self, output_tokens: int) -> None:
        """Release every permit, whatever the others raise."""
        permits, self._permits = self._permits, {}
        for name in reversed(permits):
            try:
                permits[name].release(output_tokens)
            except Exception:
                log.exception("the admission %r could not take back a permit", name)


class AdmissionChain(Admission):
    """Asks plugins in order, with one deadline for all of them. `parts` are the plugins by the names of their entries.

    A request waits for `patience` seconds at most, and not past the deadline of its client.
    """

    NAME = "chain"

    def __init__(self, parts: Mapping[str, Admission], services: AdmissionServices, *, patience: float) -> None:
        super().__init__(PluginConfig(), services)
        self._parts = parts
        self._patience = patience
        self._armed = [part for part in parts.values() if part.ARMS_THRESHOLDS]
        self._stack = ClosingStack("admission")
        for part in parts.values():
            self._stack.enter(part)

    @classmethod
    def of(cls, parts: Mapping[str, Admission], services: AdmissionServices, *, patience: float) -> Admission:
        """Return the admission by these plugins: a single one is asked without a chain around it."""
        if len(parts) > 1:
            return cls(parts, services, patience=patience)
        return next(iter(parts.values()), None) or NoAdmission(PluginConfig(), services)

    async def start(self) -> None:
        """Start the plugins in order."""
        for part in self._parts.values():
            await part.start()

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Ask for the quick check of each plugin in order."""
        for name, part in self._parts.items():
            try:
                part.precheck(model, principal, pools)
            except DynamoError as error:
                error.plugin = name
                raise

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        """Return whether one of the plugins that go by thresholds says so.

        Each is asked: some follow changes of the load.
        """
        busy = [part.is_busy(model, ranks) for part in self._armed]
        return any(busy)

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Admit the request once every plugin has; what the plugins before a refusal gave is released."""
        until = asyncio.get_running_loop().time() + self._patience
        if principal.deadline is not None:
            until = min(until, principal.deadline)
        permits: dict[str, Permit] = {}
        try:
            async with asyncio.timeout_at(until) as deadline:
                for name, part in self._parts.items():
                    permits[name] = await part.admit(request, principal, pools)
                    if deadline.expired():
                        # The plugin has kept the cancellation to itself; the next one would wait without an end.
                        raise TimeoutError
        except BaseException as error:
            if isinstance(error, DynamoError):
                error.plugin = name
            ChainPermit(permits).release(0)
            if isinstance(error, TimeoutError) and deadline.expired():
                raise ServiceOverloaded(retry_after=self.services.retry_after(request.model)) from error
            raise
        return ChainPermit(permits)

    async def aclose(self) -> None:
        """Close the plugins in the reverse order. Safe twice, and without `start`."""
        await self._stack.aclose()
