"""The engine over the real library and a tiny model. `make test-transformers` runs these."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from dynamo_core import (
    BackendError,
    EngineContext,
    FinishReason,
    GenerateContext,
    LLMEngineOutput,
    OutputOptions,
    PreprocessedRequest,
    SamplingOptions,
    StopConditions,
    WorkerConfig,
)
from dynamo_core.errors import ConfigError
from dynamo_plugin_engine_transformers.config import TransformersConfig
from dynamo_plugin_engine_transformers.engine import TransformersEngine
from dynamo_plugin_engine_transformers.model_runner import load_libraries
from dynamo_testing import EngineConformance, EngineFactory, run_conformance

pytestmark = pytest.mark.full

PROMPT = [10 + 7 * place % 500 for place in range(40)]


def make(folder: Path, **settings: Any) -> TransformersEngine:
    # The device is chosen by the engine: a GPU if there is one.
    sizes = {"kv_cache_tokens": 4096, "threads": 1, "dtype": "float32"}
    config = TransformersConfig.model_validate(sizes | settings)
    return TransformersEngine(config, WorkerConfig(model_name="tiny", model_path=str(folder)))


class TestContract(EngineConformance):
    @pytest.fixture
    def engine_factory(self, model_folder: Path) -> EngineFactory:
        return lambda: make(model_folder, context_length=256)


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 1}, {"enable_prefix_caching": False}, {"attention": "eager"}, {"kv_cache_tokens": 512}],
    ids=str,
)
async def test_the_engine_passes_the_kit_with_other_settings(model_folder: Path, settings: dict[str, Any]) -> None:
    assert (await run_conformance(lambda: make(model_folder, context_length=128, **settings))).passed


@pytest_asyncio.fixture
async def engine(model_folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = make(model_folder)
    await engine.start(1)
    yield engine
    await engine.cleanup()


_ids = iter(range(10**9))


async def said(engine: TransformersEngine, prompt: list[int], ctx: Any = None, **fields: Any) -> list[LLMEngineOutput]:
    request = PreprocessedRequest(token_ids=prompt, **fields)
    stream = engine.generate(request, GenerateContext(ctx or EngineContext(f"r{next(_ids)}")))
    return [item async for item in stream]


def tokens(items: list[LLMEngineOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


def greedy(count: int, **stop: Any) -> dict[str, Any]:
    limits = StopConditions(**{"max_tokens": count, "ignore_eos": True} | stop)
    return {"stop_conditions": limits, "sampling_options": SamplingOptions(temperature=0.0)}


def alone(library_model: Any, prompt: list[int], count: int) -> list[int]:
    """Return what the library says without us: the most likely tokens."""
    torch: Any = import_module("torch")

    with torch.no_grad():
        made = library_model.generate(
            torch.tensor([prompt], device=library_model.device),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=-1,
            pad_token_id=0,
        )
    whole: list[int] = made[0].tolist()
    return whole[len(prompt) :]


async def test_many_requests_at_once_have_the_tokens_of_the_library_alone(
    engine: TransformersEngine, library_model: Any
) -> None:
    prompts = [PROMPT[at:] + PROMPT[:at] for at in range(0, 40, 4)]

    answers = await asyncio.gather(*(said(engine, prompt, **greedy(24)) for prompt in prompts))

    assert [tokens(items) for items in answers] == [alone(library_model, prompt, 24) for prompt in prompts]
    assert len({tuple(tokens(items)) for items in answers}) == len(prompts)


async def test_start_returns_the_size_of_the_model(model_folder: Path) -> None:
    engine = make(model_folder, max_num_seqs=7)
    config = await engine.start(1)
    await engine.cleanup()

    assert (config.model, config.model_input, config.context_length) == ("tiny", "tokens", 512)
    assert (config.kv_cache_block_size, config.total_kv_blocks, config.max_num_seqs) == (32, 128, 7)


async def test_the_context_is_bounded_by_the_cache(model_folder: Path) -> None:
    engine = make(model_folder, kv_cache_tokens=128)
    config = await engine.start(1)

    items = await said(engine, PROMPT, stop_conditions=StopConditions(ignore_eos=True))
    await engine.cleanup()

    assert config.context_length == 96
    assert len(tokens(items)) == 96 - len(PROMPT)
    assert items[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_token_ends_the_answer_and_a_hidden_one_is_not_shown(
    engine: TransformersEngine, library_model: Any
) -> None:
    whole = alone(library_model, PROMPT, 12)
    stop = next(token for at, token in enumerate(whole) if at >= 3 and token not in whole[:at])
    at = whole.index(stop)

    shown = await said(engine, PROMPT, **greedy(12, ignore_eos=False, stop_token_ids=[stop]))
    hidden = await said(engine, PROMPT, **greedy(12, ignore_eos=False, stop_token_ids_hidden=[stop]))

    assert tokens(shown) == whole[: at + 1]
    assert (shown[-1].finish_reason, shown[-1].stop_reason) == (FinishReason.STOP, stop)
    assert tokens(hidden) == whole[:at]
    assert hidden[-1].finish_reason is FinishReason.EOS
    assert hidden[-1].completion_usage is not None
    assert hidden[-1].completion_usage.completion_tokens == at


async def test_no_stop_token_comes_before_the_least_number(engine: TransformersEngine, library_model: Any) -> None:
    first = alone(library_model, PROMPT, 1)

    items = await said(engine, PROMPT, **greedy(12, ignore_eos=False, stop_token_ids=first, min_tokens=5))

    assert len(tokens(items)) >= 5
    assert first[0] not in tokens(items)[:5]


async def test_each_request_has_options_of_its_own(engine: TransformersEngine, library_model: Any) -> None:
    def seeded(seed: int) -> dict[str, Any]:
        limits = StopConditions(max_tokens=16, ignore_eos=True)
        return {"stop_conditions": limits, "sampling_options": SamplingOptions(temperature=1.5, seed=seed)}

    answers = await asyncio.gather(
        said(engine, PROMPT, **greedy(16)),
        said(engine, PROMPT, **seeded(1)),
        said(engine, PROMPT, **seeded(2)),
        said(engine, PROMPT, **seeded(1)),
    )

    same, one, two, again = map(tokens, answers)
    assert same == alone(library_model, PROMPT, 16)
    assert one == again
    assert one != two


async def test_log_probabilities_come_with_their_tokens(engine: TransformersEngine) -> None:
    items = await said(engine, PROMPT, **greedy(8), output_options=OutputOptions(logprobs=3))

    log_probs_by_row = [
        (token, tops) for item in items for token, tops in zip(item.token_ids, item.top_logprobs or (), strict=True)
    ]
    scores = [score for item in items for score in item.log_probs or ()]
    assert len(log_probs_by_row) == len(scores) == 8
    assert all(tops[0].token_id == token and len(tops) == 3 for token, tops in log_probs_by_row)
    assert all(tops[0].logprob == score <= 0 for (_, tops), score in zip(log_probs_by_row, scores, strict=True))


@pytest.mark.parametrize(("caching", "told"), [(True, (0, 32)), (False, (None, None))])
async def test_cached_tokens_are_reported_with_the_first_item(
    model_folder: Path, caching: bool, told: tuple[int | None, int | None]
) -> None:
    engine = make(model_folder, block_size=16, enable_prefix_caching=caching)
    await engine.start(1)

    counts = []
    for _ in range(2):
        items = await said(engine, PROMPT, **greedy(3))
        usages = [item.completion_usage for item in items if item.completion_usage is not None]
        assert usages[0] is items[0].completion_usage
        assert {each.cached_tokens for each in usages} == {usages[0].cached_tokens}
        counts.append(usages[0].cached_tokens)
    await engine.cleanup()

    assert tuple(counts) == told


async def test_requests_that_leave_give_their_places_back(engine: TransformersEngine) -> None:
    contexts = [EngineContext(f"leaving{at}") for at in range(8)]
    runner = engine._runner
    assert runner is not None
    manager = runner._manager
    processor = manager.batch_processor
    running = [asyncio.ensure_future(said(engine, PROMPT, ctx, **greedy(400))) for ctx in contexts]
    async with asyncio.timeout(10):
        while manager.current_batch < 5:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
    for ctx in contexts:
        ctx.stop_generating()

    ended = await asyncio.gather(*running)

    assert {items[-1].finish_reason for items in ended} == {FinishReason.CANCELLED}
    async with asyncio.timeout(30):
        while processor.has_pending_requests():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    # Had they gone on to their ends, there would have been a step for each of their tokens.
    assert manager.current_batch < 300
    assert (runner._samplings, runner._router.receivers) == ({}, {})


async def test_when_the_librarys_thread_dies_requests_end_and_new_ones_are_refused(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine._runner
    assert runner is not None

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    asking = asyncio.ensure_future(said(engine, PROMPT, **greedy(400)))
    await asyncio.sleep(0.05)
    monkeypatch.setattr(runner._manager.batch_processor, "prepare_next_batch", broken)

    with pytest.raises(BackendError, match="out of memory"):
        await asking
    async with asyncio.timeout(10):
        while runner.running:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
    with pytest.raises(BackendError.EngineShutdown, match="thread does not run"):
        await said(engine, PROMPT)


async def test_cleanup_ends_running_requests(model_folder: Path) -> None:
    engine = make(model_folder)
    await engine.start(1)
    asking = asyncio.ensure_future(said(engine, PROMPT, **greedy(400)))
    await asyncio.sleep(0.05)

    await engine.cleanup()

    with pytest.raises(BackendError):
        await asyncio.wait_for(asking, 10)


async def test_a_prompt_that_leaves_no_room_is_refused(engine: TransformersEngine) -> None:
    with pytest.raises(BackendError.InvalidArgument, match="leaves no room"):
        await said(engine, [5] * 512)
    with pytest.raises(BackendError.InvalidArgument, match="is empty"):
        await said(engine, [])


async def test_a_folder_without_a_model_is_named(tmp_path: Path, model_folder: Path) -> None:
    engine = make(tmp_path)
    with pytest.raises(ConfigError, match=f"cannot load {tmp_path}"):
        await engine.start(1)
    await engine.cleanup()


@pytest.mark.parametrize(("said", "kept"), [(None, "1"), ("0", "0")])
def test_cudnn_attention_is_deprioritized_unless_set_in_the_environment(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, kept: str
) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", said or "")
    if said is None:
        monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED")

    load_libraries()

    assert os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == kept


async def test_a_device_that_there_is_not_is_named(model_folder: Path) -> None:
    torch: Any = import_module("torch")

    if torch.cuda.is_available():
        pytest.skip("there is such a device")
    with pytest.raises(ConfigError, match=r"engine\.device: cuda is asked for"):
        await make(model_folder, device="cuda").start(1)
