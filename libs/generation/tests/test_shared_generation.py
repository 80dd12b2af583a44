"""APIs of one process share a `Generation`, which ends with the last of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from dynamo_core import FrontendServices
from dynamo_generation.api import Api, Generation
from dynamo_generation.config import GenerationConfig
from dynamo_generation.endpoints.openapi import Operation
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_telemetry import Metrics


class Quiet(Api):
    NAME = "quiet"

    def operations(self) -> Iterable[Operation]:
        return ()


@pytest.fixture
def services() -> FrontendServices:
    metrics = Metrics()
    models: Any = None
    requests = RequestTracker(metrics, lambda _: None)
    return FrontendServices(models=models, requests=requests, metrics=metrics, write_stall=5.0, keep_alive=15.0)


@pytest.mark.parametrize("started", [True, False])
async def test_the_last_api_closes_shared_generation(
    services: FrontendServices, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Quiet(GenerationConfig(), services), Quiet(GenerationConfig(), services)
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(one.generation.chats.templates, "aclose", close)
    if started:
        await one.start()
        await other.start()

    assert one.generation is other.generation
    await one.aclose()
    await one.aclose()
    assert closed == []
    await other.aclose()

    assert closed == [True]
    assert services not in Generation._all
