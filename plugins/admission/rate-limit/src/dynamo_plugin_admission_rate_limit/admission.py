"""The admission policy: a request is admitted within every limit that applies, else refused. Nothing waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, cast

from dynamo_core import Admission, AdmissionServices, Permit, PluginConfig, PoolView, PreprocessedRequest, Principal
from dynamo_core.errors import ConfigError, RateLimited, ServiceOverloaded

from dynamo_plugin_admission_rate_limit.buckets import Bucket, BucketTable, told_limits
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig
from dynamo_plugin_admission_rate_limit.meters import OUTAGE, Meters
from dynamo_plugin_admission_rate_limit.rules import CONCURRENCY, Rule
from dynamo_plugin_admission_rate_limit.shared_config import SharedConfig
from dynamo_plugin_admission_rate_limit.sharing import Outcome, Sharing, Shortage

#: The permit of a request without a limit.
_UNLIMITED = Permit()
#: The shortest time after which a client is told to retry.
_SOON = 0.1


class _Granted(Permit):
    """A permit, and the buckets that it counts in. Without `charged` its tokens cost nothing."""

    __slots__ = ("_admission", "_buckets", "_charged", "_held")

    def __init__(self, admission: RateLimitAdmission, buckets: Sequence[Bucket], *, charged: bool) -> None:
        self._admission = admission
        self._buckets = buckets
        self._charged = charged
        self._held = True

    def release(self, output_tokens: int) -> None:
        if self._held:
            self._held = False
            self._admission.ended(self._buckets, output_tokens if self._charged else 0)


class RateLimitAdmission(Admission):
    """Keeps a table of buckets for each rule.

    A request is checked against all of its buckets before it is counted in any, so that a refused one costs nothing.
    """

    NAME = "rate-limit"
    REFUSES_BY_LOAD: ClassVar[bool] = False
    Config = RateLimitConfig
    config: RateLimitConfig

    def __init__(self, config: RateLimitConfig, services: AdmissionServices) -> None:
        super().__init__(config, services)
        shared = config.shared is not None
        self._tables = [BucketTable(Rule.of(rule), shared=shared) for rule in config.rules()]
        self._meters = Meters(services.metrics)
        self._sharing = None if config.shared is None else self._share(config.shared)
        #: Permits that are out.
        self.held = 0

    async def start(self) -> None:
        """Begin to share the limits, if that is wanted."""
        if self._sharing is not None:
            await self._sharing.start()

    async def reconfigure(self, config: PluginConfig) -> None:
        """Apply new limits at once. What a rule of the same name and the same `by` has counted stays counted."""
        self.config = cast(RateLimitConfig, config)
        now = asyncio.get_running_loop().time()
        former = {(table.rule.name, table.rule.by): table for table in self._tables}
        self._tables = []
        for rule in map(Rule.of, self.config.rules()):
            table = former.get((rule.name, rule.by))
            if table is None:
                table = BucketTable(rule, shared=self._sharing is not None)
            table.follow(rule, now)
            self._tables.append(table)

    async def aclose(self) -> None:
        """End sharing."""
        if self._sharing is not None:
            await self._sharing.aclose()

    def precheck(self, model: str, principal: Principal, pools: Sequence[PoolView]) -> None:
        """Refuse a request that has no place whatever its prompt.

        What this process knows of a shared bucket is at least what the server knows, so nothing is refused too early.
        """
        name = pools[0].model if pools else model
        now = asyncio.get_running_loop().time()
        found: list[Bucket] = []
        limited = False
        for table in self._tables:
            values = table.rule.values(principal, name)
            if values is not None:
                limited = True
                if (bucket := table.find(values, now)) is not None:
                    found.append(bucket)
        if limited and not self._let_through():
            self._check(found, 0, name)

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[PoolView]) -> Permit:
        """Admit the request or refuse it; wait only for the answer of the server that counts."""
        model, prompt = pools[0].model if pools else request.model, len(request.token_ids)
        now = asyncio.get_running_loop().time()
        buckets = [
            table.get(values, now)
            for table in self._tables
            if (values := table.rule.values(principal, model)) is not None
        ]
        if not buckets:
            return _UNLIMITED
        if self._sharing is not None and self._sharing.reached:
            outcome = await self._sharing.ask(buckets, prompt)
            if isinstance(outcome, Shortage):
                raise self._refusal(outcome, buckets, prompt, model)
            if outcome is Outcome.GRANTED:
                return self._grant(buckets, charged=True)
        return self._admit_alone(buckets, prompt, model)

    def ended(self, buckets: Sequence[Bucket], tokens: int) -> None:
        """Take a permit back, with so many tokens to be paid for."""
        self.held -= 1
        now = asyncio.get_running_loop().time()
        for bucket in buckets:
            bucket.spend(0, tokens, now)
            if self._sharing is None:
                bucket.running -= 1
            else:
                self._sharing.ended(bucket)

    def _share(self, config: SharedConfig) -> Sharing:
        try:
            # Only shared limits need the library.
            from dynamo_plugin_admission_rate_limit.store import RedisStore
        except ImportError as error:
            raise ConfigError(
                "admission.shared: needs the library redis, which is not installed or cannot be used; "
                "pip install 'dynamo-plugin-admission-rate-limit[redis]'",
                cause=error,
            ) from error
        return Sharing(config, RedisStore(config), self._meters)

    def _admit_alone(self, buckets: Sequence[Bucket], prompt: int, model: str) -> Permit:
        """Decide in this process, after the settings if the limits are shared."""
        charged = not self._let_through()
        if charged:
            self._check(buckets, prompt, model)
        now = asyncio.get_running_loop().time()
        for bucket in buckets:
            if charged:
                bucket.spend(1, prompt, now)
            if self._sharing is None:
                bucket.running += 1
            else:
                self._sharing.began(bucket)
        return self._grant(buckets, charged=charged)

    def _grant(self, buckets: Sequence[Bucket], *, charged: bool) -> Permit:
        self.held += 1
        return _Granted(self, buckets, charged=charged)

    def _let_through(self) -> bool:
        """Return whether nothing is limited, as the server that counts is away. Raise if everything is refused then."""
        if self._sharing is None or self._sharing.reached or self.config.shared is None:
            return False
        if self.config.shared.on_outage == "refuse":
            self._meters.refused("", OUTAGE)
            raise ServiceOverloaded("Rate limits cannot be checked now, please retry later", retry_after=1.0)
        return self.config.shared.on_outage == "allow"

    def _check(self, buckets: Sequence[Bucket], prompt: int, model: str) -> None:
        """Raise if a bucket, as of its last refill, has no room for such a request."""
        for bucket in buckets:
            limit = bucket.lacks(prompt)
            if limit is not None:
                raise self._refusal(Shortage(bucket, limit), buckets, prompt, model)

    def _refusal(self, shortage: Shortage, buckets: Sequence[Bucket], prompt: int, model: str) -> RateLimited:
        rule = shortage.bucket.rule
        self._meters.refused(rule.name, shortage.limit)
        after = max([_SOON, *(bucket.wait(prompt) for bucket in buckets)])
        if shortage.limit == CONCURRENCY:
            after = max(after, self.services.retry_after(model))
        return RateLimited(rule.message(shortage.limit), retry_after=after, limits=told_limits(buckets))
