"""Items of sizes by seed, and scripts that count."""

from __future__ import annotations

from itertools import accumulate

import pytest
from dynamo_core import (
    EngineContext,
    GenerateContext,
    LLMEngineOutput,
    PreprocessedRequest,
    StopConditions,
    WorkerConfig,
)
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.config import ChunkSizes, MockerConfig, ScriptEntry
from dynamo_plugin_engine_mocker.engine import MockerEngine
from hypothesis import given
from hypothesis import strategies as st


async def items(max_tokens: int, **keys: object) -> list[LLMEngineOutput]:
    engine = MockerEngine(MockerConfig(**keys), WorkerConfig(), clock=VirtualClock())  # type: ignore[arg-type]
    await engine.start(1)
    asked = PreprocessedRequest(token_ids=[1, 2, 3], stop_conditions=StopConditions(max_tokens=max_tokens))
    try:
        return [item async for item in engine.generate(asked, GenerateContext(EngineContext("r")))]
    finally:
        await engine.cleanup()


@given(most=st.integers(1, 20), seed=st.integers(0, 2**64 - 1), max_tokens=st.integers(1, 200))
async def test_an_answer_in_chunks_is_the_same_answer(most: int, seed: int, max_tokens: int) -> None:
    [*others, last] = await items(max_tokens, chunks=ChunkSizes(most=most, seed=seed))
    whole = await items(max_tokens)

    tokens = [item.token_ids for item in (*others, last)]
    assert [token for each in tokens for token in each] == [token for item in whole for token in item.token_ids]
    assert all(1 <= len(each) <= most for each in tokens)
    assert {item.finish_reason for item in others} <= {None}
    assert (last.finish_reason, last.completion_usage) == (whole[-1].finish_reason, whole[-1].completion_usage)


async def test_the_sizes_are_those_of_the_seed() -> None:
    def ends(found: list[LLMEngineOutput]) -> list[int]:
        return list(accumulate(len(item.token_ids) for item in found))

    first, again, other = [ends(await items(100, chunks=ChunkSizes(most=9, seed=seed))) for seed in (1, 1, 2)]

    assert first == again
    assert first != other
    assert len(set(first)) > 9


async def test_an_answer_of_no_tokens_is_one_item_with_chunks_too() -> None:
    [only] = await items(5, chunks=ChunkSizes(most=4), output="script", script=(ScriptEntry(text=""),))

    assert only.token_ids == []
    assert only.finish_reason is not None


@pytest.mark.parametrize(("prompt", "said"), [("x", False), ("x then y", False), ("x x", True), ("xyxyx", True)])
def test_a_script_entry_matches_its_count_of_occurrences(prompt: str, said: bool) -> None:
    assert ScriptEntry(match="x", times=2, text="twice").fits(prompt) is said
