"""The tables of docs/reference/metrics.md refuse a metric that they cannot show; each name of a metric is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from scripts.pages.metrics import declarations, page
from scripts.pages.metrics.declarations import Declaration
from scripts.pages.metrics.page import Undocumented
from scripts.pages.metrics.prose import Group
from tests.architecture.metrics_page import ROOT, rows

#: Where metrics are named: pages, dashboards, alerts, and examples of them.
NAMING = ("docs/**/*.md", "README.md", "plugins/*/*/README.md", "deploy/**/*.*", "examples/**/*.*")


@pytest.mark.parametrize(
    "source",
    [
        'metrics.counter("jobs_total", "Jobs that have ended.").labels().inc()',
        'self._depth = services.metrics.gauge(\n    "depth", "Jobs that wait.", ("queue",)\n)',
        'every = [scope.histogram(name, "Seconds that jobs take.") for name in ("a", "b")]',
        'GaugeMetricFamily(f"{prefix}_jobs", "Jobs that wait.")',
    ],
)
def test_a_place_that_declares_a_metric_and_that_nothing_reached_is_found(source: str, tmp_path: Path) -> None:
    file = tmp_path / "meters.py"
    file.write_text(f"import this\n\n{source}\n")

    assert declarations.unreached([file], []) == [(file, 3)]
    last = 2 + len(source.splitlines())
    assert declarations.unreached([file], [declared(file=file, line=last)]) == []


JOBS, QUEUE = Group("Jobs", "What is done.", ("worker.Jobs",)), Group("Queue", "What waits.", ("worker.Queue",))


def declared(**changes: Any) -> Declaration:
    """Return a declaration that is sound."""
    usual: dict[str, Any] = {
        "file": ROOT / "core" / "worker.py",
        "line": 1,
        "place": "worker.Jobs.__init__",
        "name": "jobs_total",
        "kind": "counter",
        "help": "Jobs that have ended.",
        "labels": ("queue",),
        "scope": None,
        "part": "frontend",
    }
    return Declaration(**(usual | changes))


def queued(**changes: Any) -> Declaration:
    """Return another one, of another group."""
    usual = {"place": "worker.Queue.put", "name": "waiting_jobs", "kind": "gauge", "help": "Jobs that wait."}
    return declared(**(usual | changes))


def test_a_name_that_follows_the_prefix_has_the_usual_one_on_the_page() -> None:
    (metric,) = page.metrics([declared(name=f"{declarations.PREFIX}_jobs_total")])

    assert metric.name == "dynamo_frontend_jobs_total"


@pytest.mark.parametrize(
    ("help", "name", "unit"),
    [
        ("Jobs that have ended.", "jobs_total", "jobs"),
        ("KV blocks that are free.", "free_blocks", "KV blocks"),
        ("Seconds that a job takes.", "job_seconds", "seconds"),
        ("Milliseconds that a job takes.", "job_ms", "milliseconds"),
        ("1 while jobs wait.", "waiting", "0 or 1"),
        ("Share of jobs that failed, from 0 to 1.", "failed", "0 to 1"),
    ],
)
def test_the_unit_is_the_first_word_of_the_help(help: str, name: str, unit: str) -> None:
    (metric,) = page.metrics([declared(help=help, name=name)])

    assert metric.unit == unit


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([declared(help="Time of a job.", name="job_seconds")], "the help of job_seconds must begin with"),
        ([declared(help="Milliseconds of a job.", name="job_bytes")], "the help of job_bytes must begin with"),
        ([declared(help="Whether jobs wait.")], "must begin with what it counts"),
        ([declared(), declared(place="plugin.New.__init__", name="new_jobs")], "new_jobs must have one group"),
        ([declared(), declared(place="worker.Queue.put")], "jobs_total must have one group"),
        ([declared(), declared(labels=())], "declare jobs_total with different"),
        ([declared(), declared(help="Jobs that ended.")], "declare jobs_total with different"),
        ([declared(), declared(kind="gauge")], "declare jobs_total with different"),
        ([declared(), declared(name="lost_jobs", part="worker")], "make two of it"),
        ([declared(labels=("queue", "colour"))], r"must have all labels and no others: \['colour'\]"),
        ([declared(labels=())], r"must have all labels and no others: \['queue'\]"),
        ([], "no metric is in the group 'Jobs'"),
    ],
)
def test_a_metric_that_cannot_be_documented_is_refused_with_a_remedy(wrong: list[Declaration], words: str) -> None:
    with pytest.raises(Undocumented, match=words):
        page.text([*wrong, queued(labels=())], [JOBS, QUEUE], {"queue": "the queue"})


def test_a_group_has_its_metrics_with_their_process_and_distribution() -> None:
    text = page.text([queued(), declared()], [JOBS, QUEUE], {"queue": "the queue"})

    assert text.split("## ")[1].splitlines()[2:] == [
        "What is done.",
        "On the page of frontends; from `dynamo-core`.",
        "",
        "| Name | Type | Unit | Labels | Meaning |",
        "| --- | --- | --- | --- | --- |",
        "| `jobs_total` | counter | jobs | `queue` | Jobs that have ended. |",
        "",
    ]


def hooks() -> set[str]:
    sources = (ROOT / "core/src/dynamo_core/hookspecs").glob("*.py")
    return {name for path in sources for name in re.findall(r"def (dynamo_\w+)", path.read_text())}


def test_every_metric_named_in_the_repository_is_on_the_page() -> None:
    known = rows()
    beginnings = {"_".join(name.split("_")[:2]) for name in known}
    named: dict[str, set[str]] = {}
    for pattern in NAMING:
        # What Python has compiled of a script beside them names what it likes.
        for path in (one for one in ROOT.glob(pattern) if one.is_file() and one.suffix != ".pyc"):
            for name in re.findall(r"\b(dynamo_[a-z]+)(_\w+)", path.read_text(errors="replace")):
                if name[0] in beginnings:
                    full = re.sub(r"_(bucket|sum|count)$", "", "".join(name))
                    named.setdefault(full, set()).add(str(path.relative_to(ROOT)))

    assert len(named.keys() & known.keys()) > 60
    assert {name: places for name, places in named.items() if name not in known.keys() | hooks()} == {}
