"""The mocker as an engine: life cycle, refusals, embeddings, metrics, tokenizers, settings."""

from __future__ import annotations

import inspect
import json
import re
from math import fsum
from pathlib import Path
from typing import Any

import dynamo_plugin_engine_mocker
import pytest
from dynamo_core import (
    EMBED,
    PROGRESS,
    RERANK,
    SCORE,
    BackendError,
    EmbedRequest,
    EngineContext,
    PreprocessedRequest,
    ScoreRequest,
    StopConditions,
    WorkerConfig,
    load_folder,
)
from dynamo_plugin_engine_mocker.clock import VirtualClock
from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.engine import MockerEngine
from dynamo_plugin_engine_mocker.tokens.embeddings import embedding
from dynamo_telemetry import Metrics
from dynamo_text import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plugins.engines.mocker.tests.conftest import context, running


def make(worker: WorkerConfig | None = None, **keys: object) -> MockerEngine:
    return MockerEngine(MockerConfig(**keys), worker or WorkerConfig(), clock=VirtualClock())  # type: ignore[arg-type]


async def generate(engine: MockerEngine, token_ids: list[int], max_tokens: int = 3) -> list[int]:
    asked = PreprocessedRequest(token_ids=token_ids, stop_conditions=StopConditions(max_tokens=max_tokens))
    return [token async for item in engine.generate(asked, context()) for token in item.token_ids]


async def test_start_returns_the_capacities() -> None:
    engine = make(
        WorkerConfig(model_name="m", served_model_name="public"), num_gpu_blocks=10, block_size=8, data_parallel_size=2
    )

    config = await engine.start(7)
    await engine.cleanup()

    assert (config.model, config.served_model_name) == ("m", "public")
    assert (config.total_kv_blocks, config.kv_cache_block_size, config.data_parallel_size) == (10, 8, 2)
    assert (config.context_length, config.max_num_seqs, config.max_num_batched_tokens) == (8192, 256, 8192)
    assert config.capabilities == {EMBED, PROGRESS, RERANK, SCORE}


async def test_a_model_name_is_there_even_if_the_worker_has_none() -> None:
    engine = make()

    config = await engine.start(1)
    await engine.cleanup()

    assert config.model


async def test_requests_before_start_and_after_cleanup_are_refused() -> None:
    engine = make()
    with pytest.raises(BackendError.EngineShutdown, match="generate called before start"):
        await generate(engine, [1])
    with pytest.raises(BackendError.EngineShutdown, match="embed called before start"):
        await engine.embed(EmbedRequest(token_ids=[[1]]), context())
    with pytest.raises(BackendError.EngineShutdown, match="score called before start"):
        await engine.score(ScoreRequest(queries=["a"], documents=["b"]), context())

    await engine.start(1)
    await engine.cleanup()

    with pytest.raises(BackendError.EngineShutdown, match="stopped"):
        await generate(engine, [1])


async def test_a_failed_start_names_the_fault_of_the_folder(tmp_path: Path) -> None:
    engine = make(WorkerConfig(model_path=str(tmp_path)))

    with pytest.raises(Exception, match=r"tokenizer\.json"):
        await engine.start(1)

    await engine.cleanup()


@pytest.mark.parametrize(("length", "words"), [(0, "empty"), (16, "context length"), (17, "context length")])
async def test_a_prompt_that_is_empty_or_fills_the_context_is_refused(length: int, words: str) -> None:
    async with running(context_length=16) as engine:
        with pytest.raises(BackendError.InvalidArgument, match=words):
            await generate(engine, [65] * length)

        assert engine.running_requests == 0


async def test_the_longest_prompt_gets_one_token() -> None:
    async with running(context_length=16) as engine:
        assert len(await generate(engine, [65] * 15, max_tokens=10)) == 1


async def test_aborts_are_counted() -> None:
    async with running() as engine:
        await engine.abort(EngineContext("a"))
        metrics = Metrics()
        await engine.setup_metrics(metrics)
        await engine.abort(EngineContext("b"))

        assert engine.aborts == 2
        assert metrics.registry.get_sample_value("dynamo_mocker_aborted_requests") == 1


async def test_the_gauges_follow_running_and_waiting_requests() -> None:
    metrics = Metrics()
    async with running(max_num_seqs=2) as engine:
        await engine.setup_metrics(metrics)
        streams = [
            engine.generate(
                PreprocessedRequest(token_ids=[65], stop_conditions=StopConditions(max_tokens=4000)), context()
            )
            for _ in range(2)
        ]
        for stream in streams:
            await anext(stream)

        assert metrics.registry.get_sample_value("dynamo_mocker_running_requests", {"dp_rank": "0"}) == 2
        assert metrics.registry.get_sample_value("dynamo_mocker_waiting_requests", {"dp_rank": "0"}) == 0
        for stream in streams:
            assert inspect.isasyncgen(stream)
            await stream.aclose()
        assert metrics.registry.get_sample_value("dynamo_mocker_running_requests", {"dp_rank": "0"}) == 0


@given(token_ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50), dimensions=st.integers(1, 300))
def test_embeddings_are_deterministic_unit_vectors(token_ids: list[int], dimensions: int) -> None:
    vector = embedding(token_ids, dimensions)

    assert len(vector) == dimensions
    assert fsum(x * x for x in vector) == pytest.approx(1)
    assert embedding(token_ids, dimensions) == vector
    assert dimensions == 1 or embedding([*token_ids, 1], dimensions) != vector


async def test_embeddings_come_one_per_input_with_the_dimensions_asked_for() -> None:
    async with running(embedding_dimensions=8) as engine:
        both = await engine.embed(EmbedRequest(token_ids=[[1, 2], [3]]), context())
        short = await engine.embed(EmbedRequest(token_ids=[[3]], dimensions=5), context())

    assert [len(vector) for vector in both.embeddings] == [8, 8]
    assert both.prompt_tokens == 3
    assert [len(vector) for vector in short.embeddings] == [5]
    ratios = [a / b for a, b in zip(short.embeddings[0], both.embeddings[1], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * 5)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (EmbedRequest(token_ids=[[1], []]), "empty"),
        (EmbedRequest(token_ids=[[1] * 17]), "context length"),
        (EmbedRequest(token_ids=[[1]], dimensions=65), "dimensions"),
        (EmbedRequest(token_ids=[[1]], dimensions=0), "dimensions"),
    ],
)
async def test_inputs_that_cannot_be_embedded_are_refused(request_: EmbedRequest, words: str) -> None:
    async with running(context_length=16) as engine:
        with pytest.raises(BackendError.InvalidArgument, match=words):
            await engine.embed(request_, context())


async def test_stopped_request_is_neither_embedded_nor_scored() -> None:
    async with running() as engine:
        ctx = context()
        ctx.stop_generating()

        with pytest.raises(BackendError.Cancelled):
            await engine.embed(EmbedRequest(token_ids=[[1]]), ctx)
        with pytest.raises(BackendError.Cancelled):
            await engine.score(ScoreRequest(queries=["a"], documents=["b"]), ctx)


async def test_a_score_is_the_share_of_the_querys_words_that_a_document_has() -> None:
    documents = ["Rain falls from clouds", "Hens lay eggs", "", "RAIN"]
    async with running() as engine:
        one = await engine.score(ScoreRequest(queries=["rain, from where"], documents=documents), context())
        pairs = await engine.score(ScoreRequest(queries=["hens", "!"], documents=["a hen", "a !"]), context())

    assert one.scores == pytest.approx([2 / 3, 0, 0, 1 / 3])
    # The byte tokenizer has a token per byte; the query is read with each document.
    assert one.prompt_tokens == 4 * len("rain, from where") + sum(map(len, documents))
    assert pairs.scores == [0, 0]


async def test_texts_are_cut_before_they_are_scored() -> None:
    def request(**limits: Any) -> ScoreRequest:
        return ScoreRequest(queries=["aa bb"], documents=["cc bb"], **limits)

    async with running(context_length=12) as engine:
        whole = await engine.score(request(), context())
        short_query = await engine.score(request(max_tokens_per_query=2), context())
        short_document = await engine.score(request(max_tokens_per_doc=2), context())
        short_pair = await engine.score(request(truncate_prompt_tokens=7), context())
        fitting = await engine.score(
            ScoreRequest(queries=["a" * 8], documents=["b" * 8], truncate_prompt_tokens=-1), context()
        )

    assert (whole.scores, whole.prompt_tokens) == ([0.5], 10)
    assert (short_query.scores, short_query.prompt_tokens) == ([0], 7)
    assert (short_document.scores, short_document.prompt_tokens) == ([0], 7)
    assert (short_pair.scores, short_pair.prompt_tokens) == ([0], 7)
    assert fitting.prompt_tokens == 12


async def test_a_pair_that_does_not_fit_is_refused_by_its_number() -> None:
    async with running(context_length=8) as engine:
        with pytest.raises(BackendError.InvalidArgument, match="document 1 and its query have 9 tokens"):
            await engine.score(ScoreRequest(queries=["aaaa"], documents=["b", "bbbbb"]), context())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model folder: a byte-level BPE without merges, two whole words, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "Ġhello", "Ġworld"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return tmp_path


async def test_with_a_model_folder_random_tokens_are_printable_by_themselves(folder: Path) -> None:
    tokenizer = load_tokenizer("hf", load_folder(folder))
    async with running(model_path=str(folder), speedup_ratio=0) as engine:
        drawn = {*await generate(engine, [1, 2], max_tokens=3000)}

    texts = {tokenizer.decode([token]) for token in drawn}
    assert {" hello", " world"} <= texts
    assert texts == {chr(code) for code in range(32, 127)} | {" hello", " world"}


async def test_with_a_model_folder_scripts_are_encoded_by_its_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer("hf", load_folder(folder))
    script = [{"match": "<|im_start|>say", "text": "Grüße!"}]
    async with running(model_path=str(folder), output="script", script=script) as engine:
        tokens = await generate(engine, tokenizer.encode("<|im_start|>say"), max_tokens=100)

    assert tokenizer.decode(tokens) == "Grüße!"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"speedup": 1}, "speedup"),
        ({"speedup_ratio": -1}, "speedup_ratio"),
        ({"fixed_itl_ms": 0}, "fixed_itl_ms"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"decode_speedup_ratio": 0}, "decode_speedup_ratio"),
        ({"preemption_mode": "random"}, "preemption_mode"),
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"output": "script"}, "script"),
        ({"script": [{"text": "x"}]}, "script"),
        ({"output": "script", "script": [{"text": "x", "when": "y"}]}, "when"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MockerConfig(**keys)


def test_the_readme_lists_every_setting_and_its_default() -> None:
    readme = (Path(inspect.getfile(dynamo_plugin_engine_mocker)).parents[2] / "README.md").read_text()

    for name, value in json.loads(MockerConfig().model_dump_json()).items():
        told = value if isinstance(value, str) else json.dumps(value)
        assert re.search(rf"^\| `{name}` \| `{re.escape(told)}` \|", readme, re.M), name


async def test_the_readme_lists_every_metric() -> None:
    readme = (Path(inspect.getfile(dynamo_plugin_engine_mocker)).parents[2] / "README.md").read_text()
    metrics = Metrics()
    async with running() as engine:
        await engine.setup_metrics(metrics)
        await generate(engine, [65])

    names = {family.name for family in metrics.registry.collect()}
    assert {name for name in names if name.startswith("dynamo_mocker_")} == {
        *re.findall(r"^\| `(dynamo_mocker_\w+)`", readme, re.M)
    }
