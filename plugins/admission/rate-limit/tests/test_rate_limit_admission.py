"""The limits as core uses them, in one process, on an event loop whose time the tests move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from dynamo_core.protocol import Instance, ModelCard
from dynamo_plugin_admission_rate_limit.buckets import BucketTable
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig, RuleSettings
from dynamo_plugin_admission_rate_limit.rules import Rule
from pydantic import ValidationError

Run: TypeAlias = Callable[..., None]


def test_a_minutes_requests_are_admitted_at_once_and_then_at_the_rate(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        for _ in range(6):
            await frontend.answer()
        assert (await frontend.refused()).retry_after == pytest.approx(10)

        clock.now += 9.9
        assert (await frontend.refused()).retry_after == pytest.approx(0.1)
        clock.now += 0.1
        await frontend.answer()
        await frontend.refused()

    run(check, requests_per_minute=6)


def test_a_rate_below_one_a_minute_admits_a_whole_request(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        await frontend.answer()
        assert (await frontend.refused()).retry_after == pytest.approx(120)

    run(check, requests_per_minute=0.5)


def test_tokens_of_the_prompt_count_at_once_and_those_of_the_answer_at_its_end(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        permit = await frontend.ask(prompt=40)
        assert (await frontend.refused(prompt=30)).retry_after == pytest.approx(10)
        second = await frontend.ask(prompt=20)

        permit.release(60)
        second.release(0)

        # 60 are owed: 61 s until there is one.
        assert (await frontend.refused()).retry_after == pytest.approx(61)
        clock.now += 61
        await frontend.answer()

    run(check, tokens_per_minute=60)


def test_a_prompt_larger_than_the_burst_needs_a_full_bucket_and_leaves_a_debt(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        await frontend.answer(prompt=10)
        assert (await frontend.refused(prompt=1000)).retry_after == pytest.approx(10)
        clock.now += 10
        await frontend.answer(prompt=1000)

        assert (await frontend.refused()).retry_after == pytest.approx(941)

    run(check, tokens_per_minute=60)


def test_a_debt_is_refused_before_tokenization(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        frontend.precheck()
        (await frontend.ask(prompt=1)).release(1000)

        assert (await frontend.refused()).limits["remaining-tokens"] == "0"
        frontend.precheck("b")

    run(check, tokens_per_minute=60)


def test_concurrent_requests_are_bounded_and_a_release_counts_once(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        permits = [await frontend.ask() for _ in range(2)]
        refused = await frontend.refused()
        assert refused.retry_after == 7, "as fast as requests end"
        assert str(refused) == "Rate limit reached: 2 concurrent requests for each key, please retry later"
        permits[0].release(1)
        permits[0].release(1)

        permits[0] = await frontend.ask()
        await frontend.refused()
        for permit in permits:
            permit.release(0)

    run(check, concurrent_requests=2)


@pytest.mark.parametrize(
    ("by", "same", "other"),
    [
        ("key", {"key": "a", "tenant": "y"}, {"key": "b"}),
        ("tenant", {"key": "b"}, {"tenant": "y"}),
        ("model", {"key": "b"}, {"model": "n"}),
        ("user", {"key": "b"}, {"user": "eve"}),
        (["key", "model"], {"tenant": "y"}, {"model": "n"}),
        (["key", "user"], {"model": "n"}, {"user": "eve"}),
    ],
)
def test_clients_are_counted_by_the_rules_key(run: Run, by: Any, same: dict[str, str], other: dict[str, str]) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        await frontend.answer("a")
        await frontend.refused(**{"key": "a", **same})
        await frontend.answer(**{"key": "a", **other})

    run(check, by=by, requests_per_minute=1)


def test_a_rule_by_nothing_counts_all_together(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        await frontend.answer("a")
        assert "for all clients together" in str(await frontend.refused("b", model="n", tenant="y"))

    run(check, by=[], requests_per_minute=1)


def test_a_rule_applies_only_to_its_keys_tenants_and_models(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        for who in ({"key": "b"}, {"tenant": "y"}, {"model": "n"}):
            for _ in range(3):
                await frontend.answer(**({"key": "a", "tenant": "x", "model": "m"} | who))
        await frontend.answer("a", tenant="x")
        await frontend.refused("a", tenant="x")

    covered = {"keys": ["a"], "tenants": ["x"], "models": ["m"]}
    run(check, limits=[{"requests_per_minute": 1, **covered}])


def test_a_client_sees_its_tightest_limits_and_no_names(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        (await frontend.ask("secret-key", prompt=100, tenant="secret-tenant", user="secret-user")).release(0)
        refused = await frontend.refused("secret-key", tenant="secret-tenant", user="secret-user")

        assert str(refused) == "Rate limit reached: 1 requests per minute for each key and user, please retry later"
        assert refused.limits == {
            "limit-requests": "1",
            "remaining-requests": "0",
            "reset-requests": "1m0s",
            "limit-tokens": "1000",
            "remaining-tokens": "900",
            "reset-tokens": "6s",
        }

    rules = [{"by": ["key", "user"], "requests_per_minute": 1}, {"by": "tenant", "tokens_per_minute": 1000}]
    run(check, by=[], requests_per_minute=50, limits=rules)


def test_refusals_are_counted_by_rule_and_limit(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        await frontend.answer("a", tenant="t")
        await frontend.refused("a", tenant="t")
        await frontend.refused("b", tenant="t", prompt=9999)
        held = await frontend.ask("b", tenant="t")
        await frontend.refused("c", tenant="t")
        held.release(0)
        assert frontend.sample("rate_limited_total", rule="key", limit="requests") == 1
        assert frontend.sample("rate_limited_total", rule="tenant", limit="tokens") == 1
        assert frontend.sample("rate_limited_total", rule="seats", limit="concurrency") == 1

    rules = [
        {"by": "tenant", "tokens_per_minute": 100},
        {"name": "seats", "by": "tenant", "concurrent_requests": 1},
    ]
    run(check, requests_per_minute=1, limits=rules)


def test_a_model_is_known_by_the_name_of_its_workers(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        frontend.pool("m").add(Instance(instance_id=2), ModelCard(name="m", instance_id=2))
        frontend._pools["adapter"] = frontend.pool("m")
        await frontend.answer(model="m")
        await frontend.refused(model="adapter")

    run(check, by="model", requests_per_minute=1)


def test_buckets_that_are_full_again_are_dropped() -> None:
    table = BucketTable(Rule.of(RuleSettings(by="user", requests_per_minute=60)))  # type: ignore[arg-type]
    for number in range(1000):
        # One request every second, and each is made good for after a second.
        table.get((f"u{number}",), float(number)).spend(1, 0, float(number))
        assert len(table) <= 4


def test_further_names_share_one_bucket_when_all_are_in_use() -> None:
    table = BucketTable(Rule.of(RuleSettings(requests_per_minute=60, burst_requests=1)), most=3)
    for number in range(10):
        table.get((f"u{number}",), 0.0).spend(1, 0, 0.0)

    assert len(table) == 4
    assert table.get(("new",), 0.0) is table.get(("other",), 0.0)
    assert table.find(("new",), 0.0) is table.get(("new",), 0.0)
    assert table.get(("u0",), 0.0) is not table.get(("new",), 0.0)
    table.get(("new",), 60.0)
    assert len(table) <= 3


def test_new_limits_apply_at_once_and_spent_amounts_stay(run: Run) -> None:
    async def check(frontend: Any, clock: Any) -> None:
        held = await frontend.ask(prompt=60)
        await frontend.refused()

        async def change(**settings: Any) -> None:
            await frontend.admission.reconfigure(RateLimitConfig.model_validate(settings))

        await change(tokens_per_minute=60, burst_tokens=600, concurrent_requests=1)
        assert "1 concurrent requests" in str(await frontend.refused())
        held.release(60)
        assert (await frontend.refused()).retry_after == pytest.approx(61)
        await change(tokens_per_minute=600, burst_tokens=600)
        assert (await frontend.refused()).retry_after == pytest.approx(6.1)
        await change(by="tenant", requests_per_minute=2)
        await frontend.answer()
        await change(by="tenant", requests_per_minute=1)
        await frontend.answer()
        await frontend.refused()
        await change()
        await frontend.answer()

    run(check, tokens_per_minute=60)


def test_reload_applies_every_rate_limit_setting_but_shared() -> None:
    assert set(RateLimitConfig.model_fields) - RateLimitConfig.LIVE == {"shared"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"burst_requests": 1}, "`burst_requests` needs `requests_per_minute`"),
        ({"burst_tokens": 1, "requests_per_minute": 1}, "`burst_tokens` needs `tokens_per_minute`"),
        ({"limits": [{"by": "key"}]}, "limits nothing: set `requests_per_minute`"),
        ({"limits": [{"by": "ip", "requests_per_minute": 1}]}, "limits.0.by"),
        ({"by": ["key", "key"], "requests_per_minute": 1}, "names something twice"),
        ({"requests_per_minute": 1, "limits": [{"requests_per_minute": 2}]}, "two rules are called key: set `name`"),
        ({"limits": [{"requests_per_minute": 1, "keys": []}]}, "limits.0.keys"),
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"limits": [{"name": "a b", "requests_per_minute": 1}]}, "limits.0.name"),
        ({"shared": {"url": "h", "ttl": 1, "timeout": 0.6}}, "timeout .* at most half of ttl"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        RateLimitConfig.model_validate(config)


def test_a_section_without_a_limit_is_remarked_upon() -> None:
    assert RateLimitConfig().remarks()
    assert not RateLimitConfig(requests_per_minute=1).remarks()
