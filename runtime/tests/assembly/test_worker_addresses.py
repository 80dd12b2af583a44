"""Under which component a worker registers."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_runtime.assembly.worker_process import worker_config
from dynamo_runtime.settings import WorkerSettings


@pytest.mark.parametrize(
    ("keys", "component"),
    [
        ({}, "backend"),
        ({"disaggregation_mode": "decode"}, "backend"),
        ({"disaggregation_mode": "prefill"}, "prefill"),
        ({"disaggregation_mode": "prefill", "component": "backend"}, "backend"),
        ({"component": "own"}, "own"),
    ],
)
def test_prefill_workers_stand_apart_unless_their_component_is_named(keys: dict[str, Any], component: str) -> None:
    settings = WorkerSettings.model_validate({"model": {"name": "m"}, "engine": {"use": "mocker"}, **keys})

    assert worker_config("dynamo", "w", settings, 0).component == component
