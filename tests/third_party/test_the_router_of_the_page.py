"""The router of docs/reference/plugins.md: what is written there is a router."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.protocol import Instance, ModelCard
from dynamo_testing import RouterFactory, RouterKit
from dynamo_testing.router.harness import MODEL, Fleet

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plugins.md"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module that the page shows."""
    [text] = re.findall(r"```python\n# router: zone\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("router") / "zone_router.py"
    path.write_text(text)
    spec = spec_from_file_location("zone_router", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestTheRouterOfThePage(RouterKit):
    @pytest.fixture
    def make_router(self, written: Any) -> RouterFactory:
        return lambda services: written.ZoneRouter(written.ZoneConfig(zone="a", zones={"near": "a"}), services)


async def test_it_prefers_its_zone_and_falls_back_to_the_others(written: Any) -> None:
    config = written.ZoneConfig(zone="a", zones={"near": "a", "far": "b"})
    fleet = Fleet(lambda services: written.ZoneRouter(config, services), wait=30.0)
    for number, worker in enumerate(("far", "near"), 1):
        fleet.pool.add(Instance(instance_id=number, worker=worker), ModelCard(name=MODEL, instance_id=number))

    assert [(await fleet.route()).instance.worker for _ in range(3)] == ["near"] * 3
    assert (await fleet.route(fleet.asked(excluded=[2]))).instance.worker == "far"
