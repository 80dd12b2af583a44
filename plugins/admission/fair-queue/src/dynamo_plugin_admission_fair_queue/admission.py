"""The admission policy: requests wait in a bounded, fair queue, and are refused when waiting is pointless."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast

from dynamo_core import (
    Admission,
    AdmissionServices,
    Permit,
    PluginConfig,
    PoolView,
    PreprocessedRequest,
    Principal,
    RankLoad,
)
from dynamo_core.errors import ConfigError, ServiceOverloaded

from dynamo_plugin_admission_fair_queue.config import FairQueueConfig
from dynamo_plugin_admission_fair_queue.meters import Meters, SharingMeters
from dynamo_plugin_admission_fair_queue.queue import RequestQueue, Waiter
from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig
from dynamo_plugin_admission_fair_queue.sharing import Sharing
from dynamo_plugin_admission_fair_queue.tenant_quotas import TenantLimits

#: Reasons of refusals, as the metric has them.
FULL, WAITED, DEADLINE, PUSHED_OUT, RATE, CLOSED = "full", "waited", "deadline", "pushed_out", "rate", "closed"
#: The most attempts that give seniority: a client can claim any number.
_ATTEMPTS = 5
#: What an answer is expected to have before the first is known, in tokens, and how much each known one counts.
_FIRST_GUESS, _LEARNING = 256.0, 0.05
_LONGEST = 60.0
#: The part of a client's deadline that may pass in the queue: the refusal must arrive before the client gives up.
_PATIENCE = 0.9
_TENANT_LIMIT = "This tenant has used up its tokens, please retry later"


@dataclass(slots=True, eq=False)
class _Pending:
    """A waiting request: its needs, and the future of its permit."""

    pools: Sequence[PoolView]
    prompt: int
    let_in: asyncio.Future[_Granted]


_PendingWaiter: TypeAlias = Waiter[_Pending]


@dataclass(slots=True, eq=False)
class _Model:
    """The requests for one model. `placing` were admitted since the loads of its workers were last read."""

    name: str
    queue: RequestQueue[_Pending]
    placing: int = 0
    output: float = _FIRST_GUESS

    def cost(self, request: PreprocessedRequest) -> float:
        """Return tokens that a request is expected to cost."""
        hints = request.routing
        expected = hints.expected_output_tokens if hints is not None else None
        output = self.output if expected is None else float(max(0, expected))
        most = request.stop_conditions.max_tokens
        return len(request.token_ids) + (output if most is None else min(output, most))


class _Granted(Permit):
    """A permit, and its price."""

    __slots__ = ("_admission", "_cost", "_held", "_model", "_prompt", "_tenant")

    def __init__(self, admission: FairQueueAdmission, model: _Model, tenant: str, prompt: int, cost: float) -> None:
        self._admission = admission
        self._model = model
        self._tenant = tenant
        self._prompt = prompt
        self._cost = cost
        self._held = True

    def release(self, output_tokens: int) -> None:
        self._give_back(self._prompt + output_tokens)
        if output_tokens:
            self._model.output += _LEARNING * (output_tokens - self._model.output)

    def take_back(self) -> None:
        """Return a permit that was never used."""
        self._give_back(0)

    def _give_back(self, cost: int) -> None:
        if self._held:
            self._held = False
            self._admission.ended(self._model, self._tenant, cost - self._cost)


class FairQueueAdmission(Admission):
    """Fair-queue admission: counts of admitted requests by model and tenant, and a queue for each model.

    The queues move when a permit comes back, here or in a frontend that shares the limits, when a load has changed, or
    when a tenant may spend tokens again; nothing polls. The load of a worker shows a new request after a moment: until
    the loads are read again, no more waiting requests are admitted than there are free workers.
    """

    NAME = "fair-queue"
    ARMS_THRESHOLDS: ClassVar[bool] = True
    Config = FairQueueConfig
    config: FairQueueConfig

    def __init__(self, config: FairQueueConfig, services: AdmissionServices) -> None:
        super().__init__(config, services)
        self._models: dict[str, _Model] = {}
        self._limits = TenantLimits(config.tenant, shared=config.shared is not None)
        self._meters = Meters(services.metrics, config.tenants)
        self._timer: asyncio.TimerHandle | None = None
        self._moving: asyncio.Handle | None = None
        self._closed = False
        self._sharing = None if config.shared is None else self._share(config.shared)

    async def start(self) -> None:
        """Begin to share the limits of tenants, if that is wanted."""
        if self._sharing is not None:
            await self._sharing.start()

    async def reconfigure(self, config: PluginConfig) -> None:
        """Apply new weights and limits, to what waits too; what runs goes on, and what was spent stays spent."""
        self.config = cast(FairQueueConfig, config)
        self._limits.change(self.config.tenant, asyncio.get_running_loop().time())
        for model in self._models.values():
            model.queue.resize(self.config.max_queue, self.config.aging)
        self._wake()

    @property
    def held(self) -> int:
        """Permits that are out, and places that are taken."""
        return sum(len(model.queue) + model.queue.running for model in self._models.values())

    def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
        """Return whether every rank is over a threshold of the model.

        The caller marks the worker before the queues move.
        """
        known = self._models.get(model)
        if known is not None:
            known.placing = 0
            self._wake()
        return self.services.thresholds.of(model).busy(ranks)

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Refuse a request that could not even wait, before its prompt is tokenized."""
        known = self._model(pools[0].model if pools else model)
        now = asyncio.get_running_loop().time()
        until = self._until(principal, now)
        if not self._may_pass(known, principal.tenant, pools, now):
            self._check(known, principal, now, until)

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Admit the request, at once or after a wait."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        # The name by which the thresholds know it, which a request for an adapter may not have.
        model = self._model(pools[0].model if pools else request.model)
        tenant, prompt, cost = principal.tenant, len(request.token_ids), model.cost(request)
        until = self._until(principal, now)
        if self._may_pass(model, tenant, pools, now):
            model.queue.pass_by(tenant, cost)
            self._meters.waited(model.name, 0.0)
            return self._grant(model, tenant, prompt, cost, now)
        self._check(model, principal, now, until)
        seniority = self.config.seniority * min(principal.retries, _ATTEMPTS)
        waiter: _PendingWaiter = Waiter(
            tenant, principal.priority, cost, now, until, _Pending(pools, prompt, loop.create_future()), seniority
        )
        victim = model.queue.add(waiter)
        self._meters.waiting(model.name, tenant, waiter.priority, 1)
        if victim is not None:
            self._left(model, victim)
            self._refuse(model, victim, PUSHED_OUT)
        self._wake()
        reason = DEADLINE if until < now + self.config.max_wait else WAITED
        timer = loop.call_at(until, self._expire, model, waiter, reason)
        try:
            return await waiter.item.let_in
        except asyncio.CancelledError:
            self._give_up(model, waiter)
            raise
        finally:
            timer.cancel()

    async def aclose(self) -> None:
        """Refuse the requests that still wait."""
        self._closed = True
        for handle in (self._timer, self._moving):
            if handle is not None:
                handle.cancel()
        self._timer = self._moving = None
        for model in self._models.values():
            for waiter in list(model.queue):
                self._expire(model, waiter, CLOSED)
        if self._sharing is not None:
            await self._sharing.aclose()

    def ended(self, model: _Model, tenant: str, correction: float) -> None:
        """Take a permit back, whose request has cost so many tokens more than was paid."""
        model.queue.end(tenant, correction)
        model.placing = 0
        self._limits.end(tenant, correction, asyncio.get_running_loop().time())
        self._meters.running(model.name, tenant, -1)
        self._wake()

    def _share(self, config: SharedConfig) -> Sharing:
        try:
            # Only shared limits need the library.
            from dynamo_plugin_admission_fair_queue.store import RedisStore
        except ImportError as error:
            raise ConfigError(
                "admission.shared: needs the library redis, which is not installed or cannot be used; "
                "pip install 'dynamo-plugin-admission-fair-queue[redis]'",
                cause=error,
            ) from error
        return Sharing(config, self._limits, RedisStore(config), SharingMeters(self.services.metrics), self._wake)

    # What may run.

    def _model(self, name: str) -> _Model:
        known = self._models.get(name)
        if known is None:
            queue: RequestQueue[_Pending] = RequestQueue(
                lambda tenant: self.config.tenant(tenant).weight, size=self.config.max_queue, aging=self.config.aging
            )
            known = self._models[name] = _Model(name, queue)
        return known

    def _until(self, principal: Principal, now: float) -> float:
        until = now + self.config.max_wait
        if principal.deadline is None:
            return until
        return min(until, now + _PATIENCE * (principal.deadline - now))

    def _may_pass(self, model: _Model, tenant: str, pools: Sequence[PoolView], now: float) -> bool:
        """Return whether a new request need not wait: it may run, and none before it may."""
        if not (self._within_limits(tenant, now) and self._has_room(model, tenant, pools)):
            return False
        return not len(model.queue) or model.queue.next(now, lambda waiter: self._may(model, waiter, now)) is None

    def _may(self, model: _Model, waiter: _PendingWaiter, now: float) -> bool:
        """Return whether a waiting request may run. One that was just cancelled is still in the queue for a moment."""
        ask, tenant = waiter.item, waiter.tenant
        if ask.let_in.done():
            return False
        return self._within_limits(tenant, now) and self._has_room(model, tenant, ask.pools)

    def _within_limits(self, tenant: str, now: float) -> bool:
        return not self._limits.full(tenant) and self._limits.ready_at(tenant, now) <= now

    def _has_room(self, model: _Model, tenant: str, pools: Sequence[PoolView]) -> bool:
        """Return whether every pool has a worker for one more.

        That a pool has none in service is for the router to tell.
        """
        limit, queue = self.config.requests_per_worker, model.queue
        for pool in pools:
            workers = len(pool.in_service)
            if not workers:
                continue
            if not pool.eligible():
                return False
            if limit is None:
                continue
            places = limit * workers
            kept = math.ceil(places * self.config.headroom)
            if queue.running >= places - kept and (
                queue.running >= places or queue.shares.has_its_part(tenant, places)
            ):
                return False
        return True

    def _check(self, model: _Model, principal: Principal, now: float, until: float) -> None:
        """Raise if a request could not wait, or not long enough."""
        queue, tenant = model.queue, principal.tenant
        if self._closed:
            reason = CLOSED
        elif until <= now:
            reason = DEADLINE
        elif self._limits.ready_at(tenant, now) > until:
            reason = RATE
        elif not queue.has_room(tenant, principal.priority):
            reason = FULL
        elif now + queue.wait_of(tenant, principal.priority, now) > until:
            reason = DEADLINE
        else:
            return
        raise self._refusal(model, tenant, reason)

    def _refusal(self, model: _Model, tenant: str, reason: str) -> ServiceOverloaded:
        self._meters.refused(model.name, tenant, reason)
        after = self.services.retry_after(model.name)
        if reason != RATE:
            return ServiceOverloaded(retry_after=after)
        now = asyncio.get_running_loop().time()
        after = min(max(after, self._limits.ready_at(tenant, now) - now), _LONGEST)
        return ServiceOverloaded(_TENANT_LIMIT, retry_after=after)

    # What waits.

    def _grant(self, model: _Model, tenant: str, prompt: int, cost: float, now: float) -> _Granted:
        """Return a permit for a request that the queue already counts as running."""
        self._limits.begin(tenant, cost, now)
        self._meters.running(model.name, tenant, 1)
        return _Granted(self, model, tenant, prompt, cost)

    def _wake(self) -> None:
        """Move the queues after the caller that reports a change has finished."""
        if self._moving is not None or self._closed:
            return
        # Without a waiting request there may still be a timer to cancel.
        if self._timer is not None or any(len(model.queue) for model in self._models.values()):
            self._moving = asyncio.get_running_loop().call_soon(self._move)

    def _move(self) -> None:
        """Admit all requests that may run, and plan the next look at those that only wait for tokens."""
        self._moving = None
        now = asyncio.get_running_loop().time()
        for model in self._models.values():
            if len(model.queue):
                self._move_queue(model, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tenants = {tenant for model in self._models.values() for tenant in model.queue.tenants()}
        later = [at for at in (self._limits.ready_at(tenant, now) for tenant in tenants) if at > now]
        if later:
            self._timer = asyncio.get_running_loop().call_at(min(later), self._move)

    def _move_queue(self, model: _Model, now: float) -> None:
        bounded = bool(self.services.thresholds.of(model.name))
        while (waiter := model.queue.next(now, lambda one: self._may(model, one, now))) is not None:
            ask = waiter.item
            if bounded and model.placing >= min(
                (len(pool.eligible()) for pool in ask.pools if pool.in_service), default=1
            ):
                return
            model.placing += bounded
            model.queue.let_in(waiter, now)
            self._left(model, waiter)
            self._meters.waited(model.name, now - waiter.arrived)
            ask.let_in.set_result(self._grant(model, waiter.tenant, ask.prompt, waiter.cost, now))

    def _left(self, model: _Model, waiter: _PendingWaiter) -> None:
        self._meters.waiting(model.name, waiter.tenant, waiter.priority, -1)

    def _refuse(self, model: _Model, waiter: _PendingWaiter, reason: str) -> None:
        """Refuse a request that the queue no longer holds."""
        if not waiter.item.let_in.done():
            waiter.item.let_in.set_exception(self._refusal(model, waiter.tenant, reason))

    def _remove(self, model: _Model, waiter: _PendingWaiter) -> None:
        if waiter.waits:
            model.queue.remove(waiter)
            self._left(model, waiter)
            # Another of its tenant is the first now.
            self._wake()

    def _expire(self, model: _Model, waiter: _PendingWaiter, reason: str) -> None:
        if waiter.waits:
            self._remove(model, waiter)
            self._refuse(model, waiter, reason)

    def _give_up(self, model: _Model, waiter: _PendingWaiter) -> None:
        """Give up a cancelled waiting request, perhaps at the moment of its admission or refusal."""
        self._remove(model, waiter)
        answer = waiter.item.let_in
        if not answer.cancelled() and answer.exception() is None:
            answer.result().take_back()
