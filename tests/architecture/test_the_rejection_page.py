"""docs/request-rejection.md names tests that exist; its client and its alert rules are what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from dynamo_core.client.gauges import FrontGauges

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "request-rejection.md").read_text()
TABLE = PAGE.split("\n## What the original's page promises, and what shows it\n")[1]
ROWS = re.findall(r"^\| (?!---|Promise)(.*?) \| (.*?) ?\| (.*?) \|$", TABLE, re.MULTILINE)
HERE = "tests/e2e/test_request_rejection.py"


def test_every_promise_names_what_shows_it() -> None:
    assert len(ROWS) > 35
    assert [promise for promise, _, shown in ROWS if not re.fullmatch(r"`([\w/]+\.py::)?test_\w+`", shown)] == []


@pytest.mark.parametrize("shown", sorted({shown.strip("`") for _, _, shown in ROWS}))
def test_the_test_is_there(shown: str) -> None:
    name, _, test = shown.rpartition("::")

    assert re.search(rf"^(async )?def {test}\(", (ROOT / (name or HERE)).read_text(), re.MULTILINE)


def test_no_test_of_a_promise_is_left_out() -> None:
    tests = set(re.findall(r"^def (test_\w+)\(", (ROOT / HERE).read_text(), re.MULTILINE))
    beyond = {
        "test_all_answers_of_one_request_are_let_in_together",
        "test_what_is_left_out_stays_and_null_switches_off",
    }

    assert tests - {shown.strip("`") for _, _, shown in ROWS} == beyond


def test_the_files_that_the_page_links_to_are_there() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)

    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []
    assert "../examples/overload/client.py" in links


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
