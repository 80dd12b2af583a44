"""A prefill and a decode engine: the KV cache goes over NIXL from one to the other."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from dynamo_core import (
    BackendError,
    DisaggregationMode,
    EngineConfig,
    FinishReason,
    LLMEngineOutput,
    PrefillResult,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
)
from dynamo_plugin_engine_vllm import handoff
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_testing import PrefillPeer, mock_context, run_conformance

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]

PREFILL, DECODE = DisaggregationMode.PREFILL, DisaggregationMode.DECODE
PROMPT = [10 + position % 900 for position in range(150)]


class Lent:
    """A running engine for the kit, which neither starts nor ends it."""

    def __init__(self, engine: VllmEngine, config: EngineConfig) -> None:
        self._engine = engine
        self._config = config
        self._given_back = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self, worker_id: int) -> EngineConfig:
        return self._config

    async def drain(self) -> None:
        """Do nothing: the engine is needed again."""

    async def cleanup(self) -> None:
        """Do nothing: the engine is needed again."""


@dataclass
class Pair:
    prefill: VllmEngine
    decode: VllmEngine
    configs: dict[DisaggregationMode, EngineConfig]
    ask: Callable[..., Any]

    async def computed(self, prompt: Sequence[int]) -> PrefillResult:
        """Return what the prefill worker hands over."""
        items = await self.ask(self.prefill, request(prompt, 1))
        assert len(tokens(items)) == 1
        assert items[-1].finish_reason is FinishReason.LENGTH
        return PrefillResult(disaggregated_params=items[-1].disaggregated_params)

    async def decoded(self, prompt: Sequence[int], result: PrefillResult | None) -> list[int]:
        return tokens(await self.ask(self.decode, request(prompt, 8, prefill_result=result)))

    async def alone(self, prompt: Sequence[int]) -> list[int]:
        """Return what the decode engine says without any help."""
        return await self.decoded(prompt, PrefillResult(disaggregated_params=handoff.outgoing(None)))

    def lent(self, mode: DisaggregationMode) -> Any:
        return Lent(self.prefill if mode is PREFILL else self.decode, self.configs[mode])


def request(prompt: Sequence[int], limit: int, **fields: Any) -> PreprocessedRequest:
    return PreprocessedRequest(
        token_ids=list(prompt),
        stop_conditions=StopConditions(max_tokens=limit, ignore_eos=True),
        sampling_options=SamplingOptions(temperature=0.0),
        **fields,
    )


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(make_engine: Callable[..., VllmEngine], ask: Callable[..., Any]) -> AsyncIterator[Pair]:
    engines = {mode: make_engine(mode) for mode in (PREFILL, DECODE)}
    try:
        configs = await asyncio.gather(*(engine.start(number) for number, engine in enumerate(engines.values())))
        yield Pair(engines[PREFILL], engines[DECODE], dict(zip(engines, configs, strict=True)), ask)
    finally:
        await asyncio.gather(*(engine.cleanup() for engine in engines.values()))


async def test_the_decode_worker_goes_on_with_the_cache_of_the_prefill_worker(pair: Pair) -> None:
    result = await pair.computed(PROMPT)
    assert result.disaggregated_params[handoff.KEY]["do_remote_prefill"] is True
    answer = await pair.decoded(PROMPT, result)

    # The same prompt computed in one place, and another prompt of the same length with the same last token.
    other = [7] * 149 + PROMPT[-1:]
    alone, other_alone = await pair.alone(PROMPT), await pair.alone(other)
    assert answer == alone
    assert other_alone != alone

    # The control: other ids with the cache of the first prompt give the first prompt's answer, so the cache came over.
    unseen = [9] * 149 + PROMPT[-1:]
    assert await pair.decoded(unseen, await pair.computed(PROMPT)) == alone


async def test_only_the_prefill_worker_publishes_kv_events(pair: Pair) -> None:
    assert len(await pair.prefill.kv_event_sources()) == 1
    assert await pair.decode.kv_event_sources() == []
    assert len(await pair.decode.load_sources()) == 1


@pytest.mark.parametrize("result", [None, PrefillResult(disaggregated_params={"other": 1})])
async def test_the_decode_worker_refuses_a_foreign_prefill_result(pair: Pair, result: PrefillResult | None) -> None:
    with pytest.raises(BackendError.InvalidArgument, match="prefill_result"):
        await pair.decoded(PROMPT, result)


async def test_a_request_stopped_during_the_transfer_is_freed(pair: Pair) -> None:
    prompt = [3 + position % 800 for position in range(1500)]
    result = await pair.computed(prompt)
    ctx = mock_context()
    stream: Any = pair.decode.generate(request(prompt, 300, prefill_result=result), ctx)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    ctx.stop_generating()
    assert (await reader).finish_reason is FinishReason.CANCELLED
    await stream.aclose()

    vllm: Any = pair.decode._engine
    async with asyncio.timeout(20):
        while vllm.get_num_unfinished_requests():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)
    assert await pair.decoded(PROMPT, await pair.computed(PROMPT)) == await pair.alone(PROMPT)


async def test_both_halves_keep_their_contracts(pair: Pair, make_engine: Callable[..., VllmEngine]) -> None:
    report = await run_conformance(lambda: pair.lent(PREFILL), token_ids=PROMPT)
    assert report.passed, report.as_text()

    async with PrefillPeer(lambda: pair.lent(PREFILL)) as peer:
        report = await run_conformance(lambda: pair.lent(DECODE), token_ids=PROMPT, prefill_result=peer)
    assert report.passed, report.as_text()

    probe = await pair.decode.health_check_payload()
    assert probe is not None
    assert len(await pair.decoded([1], PrefillResult(**probe["prefill_result"]))) == 8
