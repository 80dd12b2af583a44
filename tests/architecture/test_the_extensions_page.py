"""The example of docs/reference/extensions.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import Extension, PluginConfig, RequestFinished
from dynamo_core.protocol import RequestRecord
from dynamo_runtime.telemetry.request_events import ExtensionRequestEvents, RequestEventHub
from dynamo_telemetry import Metrics
from dynamo_telemetry.metrics import Counter

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "extensions.md").read_text()


async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [source] = re.findall(r"```python\n# file: ledger\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    # The page is ours.
    code = compile(source, "extensions.md", "exec")
    exec(code, names)
    cls: type[Extension] = names["Ledger"]
    hub = RequestEventHub()
    services: Any = FakeServices(ExtensionRequestEvents(hub, Counter()))
    ledger = cls(PluginConfig(), services)

    async with ledger:
        await ledger.start()
        hub.publish(RequestFinished("r", 0.0, record()))
        services.requests.close()
        await ledger._tasks.join(5)

    assert capsys.readouterr().out == "m 7\n"


class FakeServices:
    """As much as the example uses."""

    name = "ledger"

    def __init__(self, requests: ExtensionRequestEvents) -> None:
        self.requests = requests
        self.metrics = Metrics()


def record() -> RequestRecord:
    nothing: dict[str, Any] = dict.fromkeys(RequestRecord.__struct_fields__)
    return RequestRecord(**nothing | {"model": "m", "output_tokens": 7})
