"""Holds the engine to its contract, as the framework would, and then to what it promises itself.

What stands below `TestContract` is what an echo promises: replace it with what your engine does.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from dynamo_core import FinishReason, LLMEngineOutput, PreprocessedRequest, StopConditions, WorkerConfig
from dynamo_plugin_engine_echo.engine import EchoConfig, EchoEngine
from dynamo_testing import EngineConformance, EngineFactory, mock_context

#: Token ids of the byte tokenizer are bytes.
ABC = list(b"abc")


def make() -> EchoEngine:
    return EchoEngine(EchoConfig(), WorkerConfig(model_name="a-model"))


class TestContract(EngineConformance):
    """Every promise of an engine, one test each."""

    @pytest.fixture
    def engine_factory(self) -> EngineFactory:
        return make


@pytest.fixture
async def engine() -> AsyncIterator[EchoEngine]:
    engine = make()
    await engine.start(worker_id=1)
    yield engine
    await engine.cleanup()


async def answer(engine: EchoEngine, prompt: list[int], max_tokens: int | None = None) -> list[LLMEngineOutput]:
    request = PreprocessedRequest(token_ids=prompt, stop_conditions=StopConditions(max_tokens=max_tokens))
    return [item async for item in engine.generate(request, mock_context())]


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


async def test_the_engine_echoes_the_prompt(engine: EchoEngine) -> None:
    items = await answer(engine, ABC)

    assert tokens(items) == ABC
    assert items[-1].finish_reason is FinishReason.STOP


async def test_max_tokens_cuts_the_echo_and_usage_counts_it(engine: EchoEngine) -> None:
    items = await answer(engine, ABC, max_tokens=2)

    used = items[-1].completion_usage
    assert tokens(items) == ABC[:2]
    assert items[-1].finish_reason is FinishReason.LENGTH
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens) == (3, 2)


async def test_requests_that_run_side_by_side_do_not_mix(engine: EchoEngine) -> None:
    prompts = [[letter, letter + 1, letter + 2] for letter in b"abcdefgh"]

    answers = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))

    assert [tokens(items) for items in answers] == prompts
