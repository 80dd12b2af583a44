"""What the way of a request tells of it: refusals, attempts, moves and both hops. Real workers, in one process."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    Principal,
    RequestAdmitted,
    RequestAttempted,
    RequestMoved,
    RequestRefused,
    RequestRouted,
    StopConditions,
    Subscription,
)
from dynamo_core.errors import ServiceOverloaded
from dynamo_runtime.worker.worker import WorkerLimits
from dynamo_telemetry.logs import RequestScope
from dynamo_telemetry.metrics import Counter

from tests.integration.parts import Counting, Plain
from tests.integration.test_prefill_hop import Decoder, Prefiller

FULL = WorkerLimits(engine_requests=1, queued_requests=0, grace_period=0, drain_timeout=1)


class Mortal(Plain):
    """Fails once after a token, whichever worker is asked; goes on where another one has begun."""

    facts: ClassVar[dict[str, Any]] = {"context_length": 100}
    failing: ClassVar[list[Exception]] = []

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        yield LLMEngineOutput(token_ids=[7])
        if self.failing:
            raise self.failing.pop()
        yield LLMEngineOutput.stop()


class Holding(Plain):
    """Goes on until it is stopped."""

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        yield LLMEngineOutput(token_ids=[7])
        await ctx.stopped()
        yield LLMEngineOutput.cancelled()


def watch(house: Any) -> Subscription:
    subscription: Subscription = house.events.subscribe(100, 0, Counter())
    return subscription


async def test_a_refused_request_has_an_event_with_the_reason(make_house: Any) -> None:
    house = make_house(admission=Counting(limit=0))
    await house.run(Plain)
    subscription = watch(house)

    with pytest.raises(ServiceOverloaded):
        await house.generate([1, 2, 3], ctx=EngineContext("call", root_id="mine"))

    (refused,) = await subscription.batch()
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.model, refused.stage) == ("mine", "m", "admit")
    assert (refused.error, refused.retry_after, refused.plugin) == ("ServiceOverloaded", 7, "counting")


async def test_a_precheck_refusal_is_an_event_of_its_request(make_house: Any) -> None:
    class Closed(Counting):
        def precheck(self, *_: object) -> None:
            raise ServiceOverloaded(retry_after=3)

    house = make_house(admission=Closed())
    await house.run(Plain)
    subscription = watch(house)
    with RequestScopes("mine"), pytest.raises(ServiceOverloaded):
        house.model().precheck(Principal())

    (refused,) = await subscription.batch()
    assert isinstance(refused, RequestRefused)
    assert (refused.request_id, refused.model, refused.stage, refused.retry_after) == ("mine", "m", "precheck", 3)


class RequestScopes(RequestScope):
    """A request that is being handled."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id, None)


async def test_attempts_at_refusing_and_next_workers_are_events(make_house: Any, tokens_of: Any) -> None:
    house = make_house()
    full = await house.run(Holding, limits=FULL)
    holding = await house.begun([1])
    other = await house.run(Plain)
    subscription = watch(house)
    # Round robin: one of two requests meets the worker that is full first.
    for _ in range(2):
        await tokens_of(await house.generate([1]))
    await holding.aclose()

    events = await subscription.batch()
    attempted = [event for event in events if isinstance(event, RequestAttempted)]
    (refused,) = [event for event in attempted if event.error]
    (again,) = [event for event in events if isinstance(event, RequestRouted) and event.after]
    assert (refused.error, refused.instance_id) == ("WorkerOverloaded", full.instance.instance_id)
    assert (again.after, again.instance_id) == ("WorkerOverloaded", other.instance.instance_id)
    assert again.attempt_id != refused.attempt_id
    assert again.request_id == refused.request_id


async def test_a_migration_event_has_the_abandoned_worker(make_house: Any, tokens_of: Any) -> None:
    house = make_house()
    for _ in range(2):
        await house.run(Mortal, migration_limit=3)
    Mortal.failing = [BackendError.EngineShutdown("the engine is gone")]
    subscription = watch(house)

    request = PreprocessedRequest(model="m", token_ids=[1, 2], stop_conditions=StopConditions(max_tokens=50))
    assert await tokens_of(await house.ask(request, ctx=EngineContext("r"))) == [7, 7]

    admitted, routed, _, moved, again, accepted = await subscription.batch()
    assert isinstance(admitted, RequestAdmitted)
    assert isinstance(routed, RequestRouted)
    assert isinstance(moved, RequestMoved)
    assert isinstance(again, RequestRouted)
    assert isinstance(accepted, RequestAttempted)
    assert (moved.request_id, moved.tokens, moved.instance_id) == ("r", 1, routed.instance_id)
    assert moved.error == again.after == "Backend(EngineShutdown)"
    assert again.instance_id == accepted.instance_id != routed.instance_id
    assert accepted.error == ""


async def test_a_request_of_two_hops_is_routed_in_both_roles(house: Any, tokens_of: Any) -> None:
    await house.run(Prefiller, disaggregation_mode=DisaggregationMode.PREFILL)
    await house.run(Decoder, disaggregation_mode=DisaggregationMode.DECODE)
    subscription = watch(house)

    await tokens_of(await house.generate([1, 2, 3, 4], max_tokens=3))

    routed = [event for event in await subscription.batch() if isinstance(event, RequestRouted)]
    assert [event.role for event in routed] == ["prefill", "decode"]
    assert len({event.attempt_id for event in routed}) == 2


async def test_a_request_admitted_as_a_whole_has_one_event(house: Any, tokens_of: Any) -> None:
    await house.run(Plain)
    subscription = watch(house)
    request = PreprocessedRequest(model="m", token_ids=[1])
    with RequestScopes("mine"):
        permit = await house.model().admit(request, Principal())
    stream = await house.model().generate(request, EngineContext("mine-c0", root_id="mine"), Principal(), permit)
    await tokens_of(stream)

    admitted, routed, attempted = await subscription.batch()
    assert isinstance(admitted, RequestAdmitted)
    assert admitted.request_id == admitted.call_id == "mine"
    assert isinstance(routed, RequestRouted)
    assert (routed.request_id, routed.call_id) == ("mine", "mine-c0")
    assert attempted.request_id == "mine"
