"""What an engine hands over that is of a wrong type is named as its fault: where, what came, what is expected."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from dynamo_core import (
    BackendError,
    EngineConfig,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    ServedContext,
    StopConditions,
    WorkerConfig,
    chunk,
    usage,
)
from dynamo_core.contracts.duck_typed_engine import as_engine
from dynamo_core.contracts.engine import EMBED, KvEventSource
from dynamo_core.errors import DynamoError
from dynamo_core.protocol.request import EmbedRequest, ScoreRequest
from dynamo_runtime.worker.card import public_name
from dynamo_runtime.worker.stream_validator import vocabulary_of

from runtime.tests.worker.engines import Plain, Told, adapter_over


class Mine(Plain):
    """An engine without a fault."""

    NAME = "mine"


def line_of(method: Any) -> str:
    """Return where a method begins, as it is told."""
    return f"(test_engine_boundary.py, line {inspect.getsourcelines(method)[1]})"


class StartReturnsNothing(Mine):
    async def start(self, worker_id: int) -> Any:
        self.ready = True


class StartReturnsAMap(Mine):
    async def start(self, worker_id: int) -> Any:
        return {"model": "m"}


class StartIsNotAsync(Mine):
    def start(self, worker_id: int) -> Any:
        return EngineConfig(model="m")


class LengthIsText(Mine):
    async def start(self, worker_id: int) -> Any:
        return EngineConfig(model="m", context_length="4096")  # type: ignore[arg-type]


class SourcesAreNone(Mine):
    async def kv_event_sources(self) -> Any:
        return None


class LoadsAreOfAnotherKind(Mine):
    async def load_sources(self) -> Any:
        return [KvEventSource(0, lambda hear: None)]


class MetricsAreNotAsync(Mine):
    def setup_metrics(self, metrics: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("engine", "method", "said"),
    [
        (StartReturnsNothing, "start", "returned None, expected an EngineConfig"),
        (StartReturnsAMap, "start", "returned a dict, expected an EngineConfig"),
        (StartIsNotAsync, "start", "returned an EngineConfig, and must be async: write `async def start`"),
        (LengthIsText, "start", "Expected `int | null`, got `str` - at `EngineConfig.context_length`"),
        (SourcesAreNone, "kv_event_sources", "returned None, expected a list of KvEventSource"),
        (LoadsAreOfAnotherKind, "load_sources", "returned a KvEventSource, expected a list of LoadSource"),
        (MetricsAreNotAsync, "setup_metrics", "returned None, and must be async: write `async def setup_metrics`"),
    ],
)
async def test_a_wrong_type_from_start_is_an_engine_error(
    ground: Any, engine: type[Mine], method: str, said: str
) -> None:
    worker = ground.worker(engine)

    with pytest.raises(BackendError.Unknown) as caught:
        await worker.start()

    assert str(caught.value).startswith(f"{engine.__name__}.{method} ")
    assert said in str(caught.value)
    assert str(caught.value).endswith(line_of(getattr(engine, method)))


async def test_an_object_of_no_class_of_the_framework_is_named_by_its_own(ground: Any) -> None:
    class Foreign:
        def start(self, worker_id: int) -> None:
            """Forget what to return, and to be async."""

        generate, cleanup = Mine.generate, Mine.cleanup

    worker = ground.worker(lambda config, told: as_engine(Foreign(), told))  # type: ignore[arg-type]

    with pytest.raises(BackendError.Unknown, match=r"Foreign\.start returned None, and must be async"):
        await worker.start()


async def test_a_non_async_cleanup_is_logged(ground: Any, caplog: pytest.LogCaptureFixture) -> None:
    class CleanupIsNotAsync(Mine):
        def cleanup(self) -> Any:
            return None

    worker = ground.worker(CleanupIsNotAsync)
    await worker.start()
    await worker.stop()

    assert "CleanupIsNotAsync.cleanup returned None, and must be async" in caplog.text


# Requests.


async def failure_of(engine: LLMEngine, *, call: str = "generate", max_tokens: int | None = None) -> DynamoError:
    """Return what becomes of one request."""
    adapter = adapter_over(engine, capabilities=frozenset({EMBED}), vocabulary=258)
    request = PreprocessedRequest(model="m", token_ids=[1, 2, 3], stop_conditions=StopConditions(max_tokens=max_tokens))
    items: Any = await adapter.generate(request, ServedContext("r1"))
    if call != "generate":
        await items.aclose()
        asked = EmbedRequest(token_ids=[[1]]) if call == "embed" else ScoreRequest(queries=["q"], documents=["d"])
        items = await getattr(adapter, call)(asked, ServedContext("r1"))
    with pytest.raises(DynamoError) as caught:
        _ = [item async for item in items]
    return caught.value


def engine(cls: type[Mine]) -> Mine:
    return cls(PluginConfig(), WorkerConfig(model_name="m", worker="w"))


class IsNoGenerator(Mine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:  # type: ignore[override]
        return [LLMEngineOutput.stop()]


class ReturnsNothing(Mine):
    def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        return None


class YieldsMaps(Mine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        yield {"token_ids": [1]}


class YieldsNone(Mine):
    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
        yield chunk.token(1)
        yield None


@pytest.mark.parametrize("validator", ["0", "1"])
@pytest.mark.parametrize(
    ("broken", "said", "line"),
    [
        (IsNoGenerator, "returned a coroutine, expected an async generator: write `async def generate` with", 0),
        (ReturnsNothing, "returned None, expected an async generator", 0),
        (YieldsMaps, "yielded a dict, expected an LLMEngineOutput", 1),
        (YieldsNone, "yielded None, expected an LLMEngineOutput", 2),
    ],
)
async def test_a_stream_of_a_wrong_type_is_named_with_its_line_also_in_service(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    validator: str,
    broken: type[Mine],
    said: str,
    line: int,
) -> None:
    monkeypatch.setenv("DYN_STREAM_VALIDATOR", validator)

    error = await failure_of(engine(broken))

    assert type(error).kind == "Backend(Unknown)"
    assert f"{broken.__name__}.generate {said}" in str(error)
    assert str(error).endswith(f", line {inspect.getsourcelines(broken.generate)[1] + line})")
    [told] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.getMessage() == f"engine mine of worker w: {error}"
    assert told.exc_info is None


async def test_an_error_in_the_engines_code_keeps_its_type(caplog: pytest.LogCaptureFixture) -> None:
    class Typo(Mine):
        async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> Any:
            yield chunk.token(1)
            request.tokens  # type: ignore[attr-defined] # noqa: B018 - the fault

    error = await failure_of(engine(Typo))

    assert str(error) == "AttributeError: 'PreprocessedRequest' object has no attribute 'tokens'"
    assert "Traceback" in caplog.text


async def test_embeddings_of_a_wrong_type_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class EmbedsLists(Mine):
        async def embed(self, request: Any, ctx: Any) -> Any:
            return [[0.5]]

    error = await failure_of(engine(EmbedsLists), call="embed")

    assert str(error).startswith("EmbedsLists.embed returned a list, expected an EmbedOutput (test_engine_boundary.py,")
    assert str(error) in caplog.text


async def test_scores_of_a_wrong_type_are_named() -> None:
    class ScoresLists(Mine):
        async def score(self, request: Any, ctx: Any) -> Any:
            return [0.5]

    error = await failure_of(engine(ScoresLists), call="score")

    assert str(error).startswith("ScoresLists.score returned a list, expected a ScoreOutput (test_engine_boundary.py,")


# What the validator finds.


def answer(*items: Any) -> Callable[..., AsyncIterator[Any]]:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[Any]:
        for item in items:
            yield item

    return body


def ends(prompt: int, completion: int, total: int | None = None) -> LLMEngineOutput:
    told = usage(prompt, completion)
    if total is not None:
        told.total_tokens = total
    return LLMEngineOutput.length().with_usage(told)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([LLMEngineOutput(["a"])], "token id 'a' is a str, not an integer"),  # type: ignore[list-item]
        ([LLMEngineOutput([1.0])], "token id 1.0 is a float, not an integer"),  # type: ignore[list-item]
        ([LLMEngineOutput([True])], "token id True is a bool, not an integer"),
        ([LLMEngineOutput(7)], "token_ids is an int, not a list of integers"),  # type: ignore[arg-type]
        ([LLMEngineOutput([-1])], "token id -1 is negative"),
        ([LLMEngineOutput([258])], "token id 258 is beyond the vocabulary, whose ids end at 257"),
        ([LLMEngineOutput(finish_reason="stop")], "finish_reason is a str, not a FinishReason"),  # type: ignore[arg-type]
        ([chunk.token(1), ends(4, 1)], "usage says 4 prompt tokens, the prompt had 3"),
        ([chunk.token(1), ends(3, 2)], "usage says 2 completion tokens, 1 came"),
        ([chunk.token(1), ends(3, 1, 5)], "usage says 5 tokens in all, prompt and completion are 4"),
        ([chunk.tokens([1] * 5)], "5 tokens came, max_tokens was 4"),
        ([chunk.tokens([5, 6]), chunk.tokens([5, 6, 7])], "the tokens that had come were sent again"),
        ([ends(3, 0), chunk.token(1)], "item yielded after terminal item"),
        ([LLMEngineOutput([1], log_probs=[])], "log_probs is 0 for 1 tokens: one entry per new token"),
    ],
)
async def test_the_validator_fails_the_request_and_names_the_line(items: list[Any], said: str) -> None:
    error = await failure_of(Told(answer(*items)), max_tokens=4)

    assert said in str(error)
    line = inspect.getsourcelines(answer)[1] + 3
    assert str(error).endswith(f"(test_engine_boundary.py, line {line})")


async def test_an_engine_that_hides_the_token_which_ended_its_answer_may_count_it() -> None:
    told = Told(answer(chunk.token(1), LLMEngineOutput.stop().with_usage(usage(3, 2)), chunk.token(9)))

    assert "after terminal" in str(await failure_of(told))


async def test_a_failure_after_the_terminal_is_an_engine_error_without_migration() -> None:
    async def body(request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput.stop()
        raise BackendError.EngineShutdown("too late")

    error = await failure_of(Told(body))

    assert type(error).kind == "Backend(Unknown)"
    assert str(error) == "Told.generate raised BackendEngineShutdown after its terminal item: too late"


# Names.


@pytest.mark.parametrize(
    ("worker", "said", "name"),
    [
        ({"model_name": "public"}, {}, "public"),
        ({"model_name": "public"}, {"served_model_name": "the-engines"}, "public"),
        ({"model_name": "public", "served_model_name": "served"}, {}, "served"),
        ({}, {"served_model_name": "the-engines"}, "the-engines"),
        ({}, {}, "loaded/from-a-folder"),
    ],
)
def test_the_model_name_of_the_worker_is_the_public_one_and_the_engines_own_only_without_it(
    worker: dict[str, str], said: dict[str, str], name: str
) -> None:
    engine_config = EngineConfig(model="loaded/from-a-folder", **said)  # type: ignore[arg-type]

    assert public_name(WorkerConfig(**worker), engine_config) == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (b'{"vocab_size": 32000}', 32000),
        (b'{"text_config": {"vocab_size": 128256}}', 128256),
        (b"{}", None),
        (b'{"vocab_size": "many"}', None),
        (b'{"vocab_size": -1}', None),
        (b'{"text_config": 7}', None),
        (b"[]", None),
        (b"{", None),
        (b"[" * 100_000, None),
    ],
)
def test_the_vocabulary_size_comes_from_the_models_config(config: bytes, size: int | None) -> None:
    assert vocabulary_of({"tokenizer.json": b"{}", "config.json": config}) == size


def test_without_a_folder_the_vocabulary_is_that_of_the_byte_tokenizer() -> None:
    assert vocabulary_of({}) == 258
    assert vocabulary_of({"tokenizer.json": b"{}"}) is None
