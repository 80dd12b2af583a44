"""Objects that keep the engine contract without being made from its class."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo_core import (
    EngineConfig,
    EngineContext,
    GenerateContext,
    LLMEngine,
    LLMEngineOutput,
    PreprocessedRequest,
    WorkerConfig,
)
from dynamo_core.contracts.duck_typed_engine import as_engine
from dynamo_core.errors import ConfigError, NotSupported
from dynamo_core.protocol.request import EmbedRequest
from dynamo_runtime import run

WORKER = WorkerConfig(worker="w")


class Foreign:
    """The least an engine can be."""

    def __init__(self) -> None:
        self.started_as: int | None = None

    async def start(self, worker_id: int) -> EngineConfig:
        self.started_as = worker_id
        return EngineConfig(model="m")

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        yield LLMEngineOutput.stop().with_tokens(request.token_ids)

    async def cleanup(self) -> None:
        self.started_as = None


async def test_an_object_with_three_methods_is_an_engine() -> None:
    foreign = Foreign()
    engine = as_engine(foreign, WORKER)
    ctx = GenerateContext(EngineContext("r"))

    config = await engine.start(7)
    items = [item async for item in engine.generate(PreprocessedRequest(token_ids=[1, 2]), ctx)]

    assert (config.model, foreign.started_as) == ("m", 7)
    assert [item.token_ids for item in items] == [[1, 2]]
    await engine.cleanup()
    assert foreign.started_as is None


async def test_missing_methods_default_to_the_contract() -> None:
    engine = as_engine(Foreign(), WORKER)

    await engine.abort(EngineContext("r"))
    await engine.drain()
    assert await engine.kv_event_sources() == ()
    assert await engine.load_sources() == ()
    assert await engine.health_check_payload() is None
    with pytest.raises(NotSupported):
        await engine.embed(EmbedRequest(token_ids=[[1]]), GenerateContext(EngineContext("r")))


async def test_every_other_method_of_the_contract_is_passed_on_if_it_is_there() -> None:
    called: list[str] = []
    optional = [
        name
        for name, value in vars(LLMEngine).items()
        if inspect.iscoroutinefunction(value) and name not in LLMEngine.__abstractmethods__
    ]

    def method(name: str) -> Any:
        async def call(*_: object) -> None:
            called.append(name)

        return call

    foreign = Foreign()
    for name in optional:
        setattr(foreign, name, method(name))
    engine = as_engine(foreign, WORKER)
    for name in optional:
        await getattr(engine, name)(*[None] * (len(inspect.signature(getattr(LLMEngine, name)).parameters) - 1))

    assert called == optional
    assert len(optional) >= 7


def test_an_engine_made_from_the_class_is_used_as_it_is() -> None:
    class Own(Foreign, LLMEngine):
        __init__ = LLMEngine.__init__

    own = Own(Own.Config(), WORKER)

    assert as_engine(own, WORKER) is own


def test_an_object_that_lacks_a_method_is_refused_by_name() -> None:
    foreign: Any = Foreign()
    foreign.cleanup = foreign.generate = None

    with pytest.raises(ConfigError, match=r"Foreign is no engine, it has no generate and no cleanup: an engine needs"):
        as_engine(foreign, WORKER)


def test_a_class_in_place_of_an_object_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="Foreign is a class, not an engine: hand over an object made from it"):
        as_engine(Foreign, WORKER)  # type: ignore[arg-type] # the mistake itself


@pytest.mark.parametrize(
    ("engine", "config", "complaint"),
    [
        (object(), WorkerConfig(), "object is no engine, it has no start and no generate and no cleanup"),
        (Foreign(), WorkerConfig(metrics_labels={"worker": "x"}), "metrics_labels: 'worker': every worker has"),
        (Foreign(), WorkerConfig(metrics_labels={"a-b": "x"}), "metrics_labels: 'a-b': that is no name"),
        (Foreign(), WorkerConfig(namespace="a/b"), "WorkerConfig: namespace: must match"),
        (
            Foreign(),
            WorkerConfig(endpoint_types=("tensor",)),
            "WorkerConfig: workers.foreign.endpoint_types[0]: expected",
        ),
        (Foreign(), WorkerConfig(worker="Mine"), "workers.Mine: a worker's name may hold only a-z"),
    ],
    ids=["no-engine", "taken-label", "bad-label", "namespace", "types", "worker"],
)
def test_a_wrong_set_up_ends_run_with_one_line_and_exit_code_2(
    engine: Any,
    config: WorkerConfig,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DYN_CONFIG", raising=False)

    with pytest.raises(SystemExit) as ended:
        run(engine, config)

    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert lines[-1].startswith("dynamo: ")
    assert complaint in lines[-1]
