"""The policy keeps what every admission promises, and goes by the thresholds of each model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core import Admission, AdmissionServices, PluginConfig, PreprocessedRequest, Principal, RankLoad, Thresholds
from dynamo_core.errors import ServiceOverloaded
from dynamo_core.protocol import Instance, ModelCard
from dynamo_plugin_admission_token_capacity.admission import TokenCapacityAdmission
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_telemetry import Metrics
from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit


class TestKit(AdmissionKit):
    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return lambda services: TokenCapacityAdmission(PluginConfig(), services)

    def held(self, admission: Admission) -> int:
        """Return 0 if all is well: core counts what runs, so nothing could be left behind."""
        return len(set(vars(admission)) - {"config", "services"})


class Values(dict[str, Thresholds]):
    """Thresholds by model."""

    def of(self, model: str) -> Thresholds:
        return self.get(model, Thresholds())


def admission(values: Values) -> TokenCapacityAdmission:
    services = AdmissionServices(Metrics(), thresholds=values, retry_after=lambda model: float(len(model)))
    return TokenCapacityAdmission(PluginConfig(), services)


def test_each_model_has_thresholds_of_its_own() -> None:
    policy = admission(Values(strict=Thresholds(active_prefill_tokens_threshold=10)))
    load = [RankLoad(active_prefill_tokens=11)]

    assert policy.is_busy("strict", load)
    assert not policy.is_busy("open", load)


def test_thresholds_that_change_count_from_then_on() -> None:
    values = Values()
    policy = admission(values)
    load = [RankLoad(active_decode_blocks=87, kv_total_blocks=100)]
    before = policy.is_busy("m", load)

    values["m"] = Thresholds(active_decode_blocks_threshold=0.85)

    assert (before, policy.is_busy("m", load)) == (False, True)


@pytest.mark.parametrize("ask", ["before tokenization", "after it"])
async def test_the_retry_after_of_a_refusal_follows_the_models_drain_rate(ask: str) -> None:
    policy = admission(Values())
    pool = Pool("seven77", "aggregated")
    pool.add(Instance(instance_id=1), ModelCard(name="seven77", instance_id=1))
    pool.set_busy(1, True)

    async def asked() -> None:
        if ask == "before tokenization":
            policy.precheck("seven77", Principal(), [pool])
        else:
            await policy.admit(PreprocessedRequest(model="seven77", token_ids=[1]), Principal(), [pool])

    with pytest.raises(ServiceOverloaded, match="All workers are busy, please retry later") as refused:
        await asked()

    assert refused.value.retry_after == 7


async def test_a_worker_that_is_down_does_not_make_room(make_pool: Callable[..., Any]) -> None:
    policy, pool = admission(Values()), make_pool(2)
    pool.set_busy(1, True)
    pool.report_down(2)

    with pytest.raises(ServiceOverloaded):
        policy.precheck("m", Principal(), [pool])


@pytest.fixture
def make_pool() -> Callable[..., Any]:
    def make(workers: int) -> Pool:
        pool = Pool("m", "aggregated")
        for number in range(1, workers + 1):
            pool.add(Instance(instance_id=number), ModelCard(name="m", instance_id=number))
        return pool

    return make


async def test_requests_pass_to_the_router_without_workers_in_service(make_pool: Callable[..., Any]) -> None:
    policy, pool = admission(Values()), make_pool(2)
    for number in (1, 2):
        pool.add(Instance(instance_id=number, state="cordoned"), pool.cards[number])
    policy.precheck("m", Principal(), [pool])

    pool.add(Instance(instance_id=1), pool.cards[1])
    pool.set_busy(1, True)

    with pytest.raises(ServiceOverloaded):
        policy.precheck("m", Principal(), [pool])
