"""Transports are measured beside each other: what each process took, what brokers were sent, and what is a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import Measured
from benchmarks.transports import (
    Costs,
    Taken,
    faults,
    publish_transports,
    transports_table,
)

ROOT = Path(__file__).parents[2]

#: 10 requests with 160 tokens.
MEASURED = Measured(10, 160, 1.0, 0, {}, 10.0, 160.0, 1.0, 2.0, 1.0, 2.0, 0.5, 0.25, 0.4, 30.0, 20.0, 0.3)
COSTS = Costs(frontend=0.4, worker=0.2, broker=0.1, whole=0.7, messages=16, writes=8)
GOOD = Taken(MEASURED, COSTS)
WITHOUT_BROKER = Taken(MEASURED, replace(COSTS, broker=None, whole=0.6, messages=None))


def line_of(table: str, title: str) -> str:
    return next(line for line in table.splitlines() if line.strip().startswith(title))


# --- meters


# --- servers


# --- which are measured


# --- the report


def test_the_table_has_a_column_for_each_transport_and_the_cpu_of_each_part() -> None:
    table = transports_table({("unary-32", "tcp"): [WITHOUT_BROKER], ("unary-32", "nats"): [GOOD]})

    assert table.splitlines()[0].split() == ["tcp", "nats"]
    assert line_of(table, "CPU ms per request: frontend").split()[-3:] == ["40.00", "40.00", "×1.00"]
    assert line_of(table, "worker").split()[1:] == ["20.00", "20.00", "×1.00"]
    assert line_of(table, "broker").split()[1:] == ["-", "10.00"]
    assert line_of(table, "all together").split()[2:] == ["60.00", "70.00", "×1.17"]


@pytest.mark.parametrize("name", ["flood", "paced"])
def test_one_message_per_token_is_a_fault_under_load(name: str) -> None:
    many = replace(GOOD, costs=replace(COSTS, messages=160))

    assert faults({(name, "redis"): [GOOD, GOOD, many]}) == []
    assert faults({(name, "redis"): [GOOD, many, many]}) == [
        f"{name} over redis: 1.00 broker messages per token: rows are not merged"
    ]


def test_a_wrong_answer_is_a_fault_and_makes_the_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = replace(GOOD, measured=replace(MEASURED, errors=2, error_kinds={"status 500: x": 2}))
    where = tmp_path / "out.json"

    assert publish_transports({("flood", "tcp"): [GOOD]}, {}, None) == 0
    assert publish_transports({("flood", "tcp"): [GOOD], ("flood", "nats"): [bad]}, {"quick": True}, where) == 1

    assert "flood over nats: 2 x status 500: x" in capsys.readouterr().err
    written: Mapping[str, Any] = json.loads(where.read_text())
    assert [part["transport"] for part in written["parts"]] == ["tcp", "nats"]
    assert written["parts"][0]["summary"]["messages_per_token"]["median"] == 0.1
    assert [target["target"] for target in written["scenarios"][0]["targets"]] == ["tcp", "nats"]


# --- all of it


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_bench_measures_real_servers_and_leaves_no_process(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["-m", "benchmarks", "transports", "--quick", "--no-pin", "--json", str(report)]
    # Its files are in here, and so in the command lines of what it starts.
    env = os.environ | {"TMPDIR": str(tmp_path)}

    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )

    assert ended.returncode == 0, ended.stderr
    parts = {(part["scenario"], part["transport"]): part["summary"] for part in json.loads(report.read_text())["parts"]}
    measured = {transport for _, transport in parts}
    assert {"inproc", "tcp"} <= measured
    for broker in measured - {"inproc", "tcp"}:
        assert 0 < parts["paced", broker]["messages_per_token"]["median"] < 1
        assert parts["flood", broker]["broker_100k"] is not None
    assert running(tmp_path) == []


def running(folder: Path) -> list[str]:
    """Return the command lines of processes that are about something in `folder`."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found
