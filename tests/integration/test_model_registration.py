"""Models appear with their first worker and go with the last; their files come from the workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dynamo_core import ServedContext
from dynamo_core.contracts.transports.call import MODEL_FILE
from dynamo_core.errors import Unavailable
from dynamo_core.protocol import Instance, ModelCard
from dynamo_core.protocol.records import CARDS, INSTANCES, ModelFile, ModelFileChunk, ModelFileRequest
from dynamo_runtime.assembly.health import Health
from dynamo_runtime.settings import Settings
from dynamo_testing.tiny_model import make_tokenizer_folder

from tests.integration.parts import Longer, Plain


async def test_a_model_is_listed_while_at_least_one_worker_serves_it(house: Any) -> None:
    first = await house.run(Plain, worker="w0")
    second = await house.run(Plain, worker="w1")

    assert [(model.name, model.instance_count) for model in house.models.list()] == [("m", 2)]
    await first.stop(grace=False)
    await house.until(lambda: house.model().instance_count == 1)
    await second.stop(grace=False)
    await house.until(lambda: not house.models.list())


async def test_the_no_worker_yet_error_ends_with_the_first_worker(house: Any) -> None:
    await house.until(lambda: house.models.synced)
    with pytest.raises(Unavailable, match="no worker has registered yet"):
        house.model()

    worker = await house.run(Plain)
    await worker.stop(grace=False)
    await house.until(lambda: not house.models.list())

    with pytest.raises(Unavailable, match="no worker serves the model 'm' now"):
        house.model()
    with pytest.raises(Unavailable, match="no worker is registered now"):
        house.model("another")


async def test_a_frontend_without_configured_workers_is_ready_with_its_first_model(house: Any) -> None:
    health = Health(Settings(), house.models)
    await house.until(lambda: house.models.synced)
    assert health.readiness() == (False, "no worker has registered yet")

    await house.run(Plain)

    assert health.readiness() == (True, "ready")
    assert Health(Settings.model_validate({"client": {"min_initial_workers": 2}}), house.models).readiness() == (
        False,
        "model m has 1 of 2 workers",
    )


async def test_a_worker_with_a_conflicting_card_is_left_out(house: Any, caplog: pytest.LogCaptureFixture) -> None:
    await house.run(Plain, worker="w0")
    odd = house.worker(Longer, worker="w1")

    await odd.start()
    await house.run(Plain, worker="w2")

    assert house.model().instance_count == 2
    assert odd.instance.instance_id not in house.model().groups["aggregated"].pool.instances
    assert "left out" in caplog.text
    await odd.stop(grace=False)


async def test_the_files_of_a_model_come_from_its_worker(house: Any, tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "model")

    await house.run(Plain, model_path=str(folder))

    model = house.model()
    assert model.file("tokenizer.json") == (folder / "tokenizer.json").read_bytes()
    assert model.file("config.py") is None
    assert model.tokenizer.decode(model.tokenizer.encode("hello there")) == "hello there"


async def test_a_worker_whose_files_differ_from_its_card_is_left_out(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def lie(request: ModelFileRequest, ctx: ServedContext) -> AsyncGenerator[ModelFileChunk, None]:
        async def chunks() -> AsyncGenerator[ModelFileChunk, None]:
            yield ModelFileChunk(b"{}")

        return chunks()

    lease = await house.discovery.lease()
    await house.transport.serve(lease.id, MODEL_FILE, lie)
    card = ModelCard(name="m", instance_id=lease.id, tokenizer="hf", files=[ModelFile("tokenizer.json", 2, "00" * 32)])
    instance = Instance(instance_id=lease.id)
    await lease.put(CARDS + card.path, msgspec.json.encode(card))
    await lease.put(INSTANCES + instance.path, msgspec.json.encode(instance))
    await house.run(Plain, model_name="other")
    await house.eventually(lambda: "is not what its card says" in caplog.text)

    assert [model.name for model in house.models.list()] == ["other"]


async def test_a_record_that_cannot_be_read_does_not_end_the_watch(
    house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await house.discovery.lease()
    await lease.put(INSTANCES + "broken", b"{")
    newer = Instance(instance_id=1, proto=99)
    await lease.put(INSTANCES + newer.path, msgspec.json.encode(newer))

    await house.run(Plain)

    assert [model.name for model in house.models.list()] == ["m"]
    assert "protocol 99" in caplog.text
