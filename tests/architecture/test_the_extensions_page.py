"""docs/reference/extensions.md names every service, event and field, and its example runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import Extension, ExtensionServices, FrontendView, PluginConfig, RequestEvent, RequestFinished
from dynamo_core.contracts import request_events
from dynamo_core.protocol import RequestRecord
from dynamo_runtime.telemetry.request_events import ExtensionRequestEvents, RequestEventHub
from dynamo_telemetry import Metrics
from dynamo_telemetry.metrics import Counter

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "extensions.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of the table of a section, without its head."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_every_service_has_a_row_and_no_other() -> None:
    listed = {name for first, _ in rows("Services") for name in re.findall(r"`(\w+)", first)}
    own = {field.name for field in dataclasses.fields(ExtensionServices)} - {"frontend"}
    of_frontends = {field.name for field in dataclasses.fields(FrontendView)}

    assert listed == own | of_frontends
    assert of_frontends <= vars(ExtensionServices).keys()


def test_every_event_has_a_row_with_its_tag_and_its_fields() -> None:
    classes: list[Any] = RequestEvent.__subclasses__()
    listed = {tuple(re.findall(r"`(\w+)`", first)): second for first, second in rows("Request events")}

    assert set(listed) == {(cls.__name__, cls.__struct_config__.tag) for cls in classes}
    assert {cls.__name__ for cls in classes} <= set(vars(request_events))
    for cls in classes:
        text = listed[cls.__name__, cls.__struct_config__.tag]
        fields = set(cls.__struct_fields__) - {"request_id", "time"}
        assert fields <= set(re.findall(r"`(\w+)`", text)), cls.__name__


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
