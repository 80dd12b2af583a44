"""Whatever clients do, the limits let in exactly what a simple model lets in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any, TypeAlias

from dynamo_core import Permit
from dynamo_core.errors import RateLimited
from dynamo_plugin_admission_rate_limit.buckets import Bucket
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig
from dynamo_plugin_admission_rate_limit.rules import Rule
from hypothesis import given
from hypothesis import strategies as st

Run: TypeAlias = Callable[..., None]

REQUESTS, BURST, TOKENS, RUNNING = 30, 4, 60, 3


@dataclass
class Account:
    """What a client did, as (time, requests, tokens): all else follows from that."""

    events: list[tuple[float, int, int]] = field(default_factory=list)
    running: int = 0

    def levels(self, now: float) -> tuple[Fraction, Fraction]:
        """Replay the history in exact numbers."""
        requests, tokens, at = Fraction(BURST), Fraction(TOKENS), Fraction(0)
        for time, spent_requests, spent_tokens in [*self.events, (now, 0, 0)]:
            passed, at = Fraction(time) - at, Fraction(time)
            requests = min(Fraction(BURST), requests + passed * Fraction(REQUESTS, 60)) - spent_requests
            tokens = min(Fraction(TOKENS), tokens + passed * Fraction(TOKENS, 60)) - spent_tokens
        return requests, tokens

    def admits(self, prompt: int, now: float) -> bool:
        requests, tokens = self.levels(now)
        return self.running < RUNNING and requests >= 1 and tokens >= min(max(1, prompt), TOKENS)


def total(accounts: list[Account]) -> Account:
    """Return all clients as one."""
    return Account(sorted(event for one in accounts for event in one.events), sum(one.running for one in accounts))


_STEPS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(0, 90)),
    st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(0, 3)),
    st.tuples(st.just("release"), st.integers(0, 20), st.integers(0, 200)),
    st.tuples(st.just("again"), st.integers(0, 20), st.integers(0, 200)),
    st.tuples(st.just("wait"), st.integers(0, 400).map(lambda eighths: eighths / 8), st.none()),
)


@given(st.lists(_STEPS, max_size=60))
def test_admissions_equal_those_of_the_reference_model(run: Run, steps: list[tuple[str, Any, Any]]) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        began = clock.now
        accounts = {key: Account() for key in "abc"}
        out: list[tuple[Account, Permit]] = []
        over: list[Permit] = []
        for step, what, number in steps:
            now = clock.now - began
            if step == "ask":
                account = accounts[what]
                admits = account.admits(number, now)
                try:
                    permit = await frontend.ask(what, prompt=number)
                except RateLimited:
                    assert not admits
                else:
                    assert admits
                    account.events.append((now, 1, number))
                    account.running += 1
                    out.append((account, permit))
            elif step == "release" and out:
                account, permit = out.pop(what % len(out))
                permit.release(number)
                account.events.append((now, 0, number))
                account.running -= 1
                over.append(permit)
            elif step == "again" and over:
                over[what % len(over)].release(number)
            elif step == "wait":
                clock.now += what
            assert frontend.admission.held == len(out)
        for _, permit in out:
            permit.release(0)
        for account in accounts.values():
            within_the_rate(account)
        clock.now += 1e6
        for number in range(4):
            await frontend.answer(f"new-{number}")
            clock.now += 1e6
        assert all(len(table) <= 2 for table in frontend.admission._tables), "idle buckets are dropped"

    limits = {"requests_per_minute": REQUESTS, "burst_requests": BURST, "tokens_per_minute": TOKENS}
    run(check, concurrent_requests=RUNNING, **limits)


def within_the_rate(account: Account) -> None:
    """Assert that in any span at most the burst and what the rate gives begin."""
    begun = [time for time, requests, _ in account.events if requests]
    for first, last in combinations(range(len(begun)), 2):
        assert last - first + 1 <= BURST + (begun[last] - begun[first]) * REQUESTS / 60


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.integers(0, 5)), max_size=40))
def test_with_several_rules_a_request_must_be_within_all_of_them(run: Run, asks: list[tuple[str, int, int]]) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        began = clock.now
        accounts = {key: Account() for key in "abc"}
        for key, prompt, pause in asks:
            clock.now += pause
            now = clock.now - began
            requests = accounts[key].levels(now)[0]
            tokens = total(list(accounts.values())).levels(now)[1]
            admits = requests >= 1 and tokens >= prompt
            task = asyncio.ensure_future(frontend.answer(key, prompt=prompt))
            await asyncio.wait([task])
            assert (task.exception() is None) == admits
            if admits:
                accounts[key].events.append((now, 1, prompt))

    rule = {"by": [], "tokens_per_minute": TOKENS}
    run(check, requests_per_minute=REQUESTS, burst_requests=BURST, limits=[rule])


def a_rule(requests: float, burst: int) -> Rule:
    return Rule.of(next(iter(RateLimitConfig(requests_per_minute=requests, burst_requests=burst).rules())))


def test_a_time_that_was_read_earlier_takes_nothing_away() -> None:
    bucket = Bucket(a_rule(60, 5), ("k",), 10.0, shared=False)
    bucket.spend(3, 0, 10.0)

    bucket.refill(8.0)

    assert bucket.requests == 2


def test_a_smaller_burst_holds_at_once() -> None:
    bucket = Bucket(a_rule(60, 5), ("k",), 0.0, shared=False)

    bucket.follow(a_rule(60, 2), 0.0)

    assert bucket.requests == 2


def test_a_bucket_that_is_being_asked_for_is_not_idle() -> None:
    bucket = Bucket(a_rule(60, 5), ("k",), 0.0, shared=True)
    assert bucket.idle(0.0)

    bucket.pinned = 1

    assert not bucket.idle(0.0)
