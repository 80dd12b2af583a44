"""docs/how-to/request-rejection.md links to files that exist; its client and its alert rules are what it says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from dynamo_core.dispatch.models.gauges import FrontGauges

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "request-rejection.md").read_text()


def test_the_files_that_the_page_links_to_are_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)

    assert [link for link in links if not (ROOT / "docs" / "how-to" / link).exists()] == []
    assert "../../examples/overload/client.py" in links


def test_alert_rules_are_about_metrics_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "examples" / "overload" / "alerts.yaml").read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"dynamo_\w+", rule["expr"])}
    gauges = FrontGauges(None, None, "dynamo_frontend")  # type: ignore[arg-type]
    source = "".join(
        (ROOT / "core/src/dynamo_core" / name).read_text() for name in ("telemetry/inflight.py", "worker/gate.py")
    )

    assert len(named) >= 5
    known = {family.name for family in gauges.describe()}
    assert [name for name in named - known if name.replace("dynamo_frontend", "{prefix}") not in source] == []
