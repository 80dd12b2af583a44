"""Token buckets of a key, tenant, user or model. Callers pass the time; no event loop is involved.

Requests and tokens are *token buckets*: a level that rises at the rate of the limit up to what may be saved up, and
falls by what is spent. In any span of t seconds at most the burst and the rate times t are let in. Unlike windows
that slide, a bucket needs two numbers however high the limit is, has no moment at which everything is allowed again
at once, can be in debt, and tells exactly when the next request fits; one script can keep it in a server.

Tokens of a prompt are spent when a request begins, those of the answer when it ends: only then are they known. That
may leave a debt, which the rate pays off before the next request. A prompt that is larger than the burst needs a full
bucket and leaves a debt too; otherwise it could never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo_plugin_admission_rate_limit.rules import CONCURRENCY, REQUESTS, TOKENS, Rate, Rule

#: The most buckets of a rule. Requests with further names share one.
MOST = 100_000
#: What rounding may take from a level.
EPSILON = 1e-6
#: The values of the bucket that all share for which there is no room; no rule tells so many apart.
OVERFLOW = ("",) * 5
#: How many other buckets are looked at for each new one.
_LOOKS = 2


class Bucket:
    """The levels of one bucket as of a time, and the requests under way here.

    `owed_requests` and `owed_tokens` is what a server has not been told yet, for one that is `shared`. One that is
    `pinned` is being asked for.
    """

    __slots__ = (
        "at",
        "owed_requests",
        "owed_tokens",
        "pinned",
        "requests",
        "rule",
        "running",
        "shared",
        "tokens",
        "values",
    )

    def __init__(self, rule: Rule, values: tuple[str, ...], now: float, *, shared: bool) -> None:
        self.rule = rule
        self.values = values
        self.requests = _capacity(rule.requests)
        self.tokens = _capacity(rule.tokens)
        self.at = now
        self.running = self.pinned = 0
        self.shared = shared
        self.owed_requests = self.owed_tokens = 0

    def refill(self, now: float) -> None:
        """Let the levels rise to what they are now."""
        passed, self.at = max(0.0, now - self.at), now
        self.requests = _risen(self.requests, self.rule.requests, passed)
        self.tokens = _risen(self.tokens, self.rule.tokens, passed)

    def lacks(self, prompt: int) -> str | None:
        """Return the limit that keeps a request with such a prompt out, as of the last refill; None if it fits."""
        rule = self.rule
        if rule.concurrency is not None and self.running >= rule.concurrency:
            return CONCURRENCY
        if rule.requests is not None and self.requests < 1 - EPSILON:
            return REQUESTS
        if rule.tokens is not None and self.tokens < _needed(rule.tokens, prompt) - EPSILON:
            return TOKENS
        return None

    def wait(self, prompt: int) -> float:
        """Return seconds until the levels suffice for such a request if nothing is spent until then."""
        rule, seconds = self.rule, 0.0
        if rule.requests is not None:
            seconds = (1 - self.requests) / rule.requests.per_second
        if rule.tokens is not None:
            seconds = max(seconds, (_needed(rule.tokens, prompt) - self.tokens) / rule.tokens.per_second)
        return max(0.0, seconds)

    def spend(self, requests: int, tokens: int, now: float) -> None:
        """Take so much away, even if there is less; put it back if it is below 0."""
        self.refill(now)
        if self.shared:
            self.owed_requests += requests if self.rule.requests is not None else 0
            self.owed_tokens += tokens if self.rule.tokens is not None else 0
        self.set_levels(self.requests - requests, self.tokens - tokens)

    def set_levels(self, requests: float, tokens: float) -> None:
        """Set the levels, as of the last refill."""
        self.requests = min(requests, _capacity(self.rule.requests))
        self.tokens = min(tokens, _capacity(self.rule.tokens))

    def follow(self, rule: Rule, now: float) -> None:
        """Go by the numbers of another rule. What was spent stays spent; a new limit begins with its burst."""
        self.refill(now)
        former, self.rule = self.rule, rule
        self.set_levels(
            _capacity(rule.requests) if former.requests is None else self.requests,
            _capacity(rule.tokens) if former.tokens is None else self.tokens,
        )

    @property
    def owes(self) -> bool:
        """Whether the server has not been told all."""
        return bool(self.owed_requests or self.owed_tokens)

    def idle(self, now: float) -> bool:
        """Return whether a new bucket would be the same."""
        if self.running or self.pinned or self.owes:
            return False
        self.refill(now)
        return self.requests >= _capacity(self.rule.requests) and self.tokens >= _capacity(self.rule.tokens)


class BucketTable:
    """The buckets of one rule, in a bounded number.

    Each new bucket looks at two others, in turn, and drops those that are idle. So there are about twice as many as are
    in use at the most, and no sweep holds the event loop up.
    """

    def __init__(self, rule: Rule, *, shared: bool = False, most: int = MOST) -> None:
        self.rule = rule
        self._shared = shared
        self._most = most
        self._buckets: dict[tuple[str, ...], Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def find(self, values: tuple[str, ...], now: float) -> Bucket | None:
        """Return the bucket as of now; None if nothing of it is in use."""
        bucket = self._buckets.get(values)
        if bucket is None and len(self._buckets) >= self._most:
            bucket = self._buckets.get(OVERFLOW)
        if bucket is not None:
            bucket.refill(now)
        return bucket

    def get(self, values: tuple[str, ...], now: float) -> Bucket:
        """Return the bucket as of now, a new one if need be."""
        bucket = self._buckets.get(values)
        if bucket is None:
            self._drop_idle(now)
            if len(self._buckets) >= self._most:
                values = OVERFLOW
            bucket = self._buckets.get(values)
        if bucket is None:
            bucket = self._buckets[values] = Bucket(self.rule, values, now, shared=self._shared)
        bucket.refill(now)
        return bucket

    def follow(self, rule: Rule, now: float) -> None:
        """Go by the numbers of another rule that tells the same apart."""
        self.rule = rule
        for bucket in self._buckets.values():
            bucket.follow(rule, now)

    def _drop_idle(self, now: float) -> None:
        for _ in range(min(_LOOKS, len(self._buckets))):
            values = next(iter(self._buckets))
            bucket = self._buckets.pop(values)
            if not bucket.idle(now):
                self._buckets[values] = bucket


def told_limits(buckets: Sequence[Bucket]) -> dict[str, str]:
    """Return what headers tell of these buckets, as of the last refill: of each unit the one with the least left."""
    told: dict[str, str] = {}
    level: Callable[[Bucket], float]
    rate: Callable[[Bucket], Rate | None]
    for unit, level, rate in (
        (REQUESTS, lambda bucket: bucket.requests, lambda bucket: bucket.rule.requests),
        (TOKENS, lambda bucket: bucket.tokens, lambda bucket: bucket.rule.tokens),
    ):
        tightest = min((bucket for bucket in buckets if rate(bucket) is not None), key=level, default=None)
        found = None if tightest is None else rate(tightest)
        if tightest is not None and found is not None:
            left = level(tightest)
            told[f"limit-{unit}"] = f"{found.per_minute:.0f}"
            told[f"remaining-{unit}"] = f"{max(0, int(left + EPSILON))}"
            told[f"reset-{unit}"] = _span((found.capacity - left) / found.per_second)
    return told


def _capacity(rate: Rate | None) -> float:
    return 0.0 if rate is None else rate.capacity


def _risen(level: float, rate: Rate | None, seconds: float) -> float:
    return 0.0 if rate is None else min(rate.capacity, level + seconds * rate.per_second)


def _needed(rate: Rate, prompt: int) -> float:
    return min(max(1, prompt), rate.capacity)


def _span(seconds: float) -> str:
    """Return a time as headers have it: ``1.5s``, ``6m0s``."""
    minutes, rest = divmod(round(max(0.0, seconds), 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
