"""Runs the engine through its contract, as the framework would."""

import asyncio
from collections.abc import AsyncIterator

import dynamo_plugin_engine_echo
import pytest
from dynamo_core import (
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    StopConditions,
    WorkerConfig,
)
from dynamo_plugin_engine_echo.engine import EchoConfig, EchoEngine


@pytest.fixture
async def engine() -> AsyncIterator[EchoEngine]:
    engine = EchoEngine(EchoConfig(), WorkerConfig(model_name="a-model"))
    await engine.start(worker_id=1)
    yield engine
    await engine.cleanup()


def context(request_id: str = "r1") -> GenerateContext:
    return GenerateContext(EngineContext(request_id))


async def collect(
    engine: EchoEngine, prompt: list[int], ctx: GenerateContext, max_tokens: int | None = None
) -> list[LLMEngineOutput]:
    request = PreprocessedRequest(token_ids=prompt, stop_conditions=StopConditions(max_tokens=max_tokens))
    return [item async for item in engine.generate(request, ctx)]


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


def test_the_package_offers_the_engine() -> None:
    assert dynamo_plugin_engine_echo.dynamo_register_engines() == [EchoEngine]


async def test_the_last_item_and_no_other_has_a_finish_reason(engine: EchoEngine) -> None:
    items = await collect(engine, [1, 2, 3], context())

    assert [item.finish_reason for item in items[:-1]] == [None, None, None]
    assert items[-1].finish_reason is FinishReason.STOP


async def test_no_more_than_max_tokens_come_out_and_usage_counts_them(engine: EchoEngine) -> None:
    items = await collect(engine, [1, 2, 3], context(), max_tokens=2)

    used = items[-1].completion_usage
    assert len(tokens(items)) == 2
    assert items[-1].finish_reason is FinishReason.LENGTH
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens) == (3, 2)


async def test_a_request_stopped_before_its_first_token_ends_cancelled(engine: EchoEngine) -> None:
    ctx = context()
    ctx.stop_generating()

    [only] = await collect(engine, [1, 2, 3], ctx)

    assert only.finish_reason is FinishReason.CANCELLED


async def test_a_request_stopped_midway_ends_cancelled(engine: EchoEngine) -> None:
    ctx = context()
    items = []

    async for item in engine.generate(PreprocessedRequest(token_ids=[1, 2, 3]), ctx):
        items.append(item)
        ctx.stop_generating()

    assert len(items) == 2
    assert items[-1].finish_reason is FinishReason.CANCELLED


async def test_requests_that_run_side_by_side_do_not_mix(engine: EchoEngine) -> None:
    prompts = [[number, number + 1, number + 2] for number in range(8)]

    answers = await asyncio.gather(
        *(collect(engine, prompt, context(f"r{number}")) for number, prompt in enumerate(prompts))
    )

    assert [tokens(answer) for answer in answers] == prompts


async def test_cleanup_is_safe_without_start_and_twice() -> None:
    engine = EchoEngine(EchoConfig(), WorkerConfig())

    await engine.cleanup()
    await engine.cleanup()
