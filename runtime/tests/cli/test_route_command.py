"""`dynamo route explain` without a frontend: what it is given wrong, and how it prints what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dynamo_runtime.cli import route
from dynamo_runtime.cli.main import cli


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["route", "explain", *words])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give exactly one of PROMPT, --messages and --token-ids"),
        (("Hi", "--token-ids", "1"), "give exactly one of"),
        (("--token-ids", "1,x"), "--token-ids: expected numbers divided by commas, such as 1,2,3, got '1,x'"),
        (("--messages", "[{"), "--messages: is no JSON"),
        (("--messages", "@/nowhere"), "--messages: /nowhere cannot be read"),
        (("Hi", "--url", "localhost:8000"), "--url localhost:8000: is no address of a frontend"),
        (("Hi", "--ca", "/nowhere"), "--ca /nowhere: cannot be used"),
    ],
)
def test_invalid_options_are_one_line(words: tuple[str, ...], says: str) -> None:
    result = run(*words)

    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("env", "words", "says"),
    [
        ({"DYN_HTTP_PORT": "1"}, (), "http://127.0.0.1:1 (from DYN_HTTP_PORT): cannot be asked: "),
        (
            {"DYN_HTTP_PORT": "2", "DYN_ADMIN_URL": "http://127.0.0.1:1"},
            (),
            "DYN_ADMIN_URL http://127.0.0.1:1: cannot be",
        ),
        ({"DYN_HTTP_PORT": "2"}, ("--url", "http://127.0.0.1:1"), "--url http://127.0.0.1:1: cannot be asked: "),
        ({"DYN_HTTP_PORT": "port"}, (), "DYN_HTTP_PORT: 'port' is no port; give --url"),
        ({"DYN_ADMIN_URL": "here"}, (), "DYN_ADMIN_URL here: is no address of a frontend"),
    ],
)
def test_the_default_address_is_serves_and_errors_name_its_origin(
    env: dict[str, str], words: tuple[str, ...], says: str
) -> None:
    result = CliRunner(env={"DYN_ADMIN_URL": None, **env}).invoke(cli, ["route", "explain", "Hi", *words])

    assert result.exit_code == 2
    assert result.stderr.startswith(f"dynamo: {says}")


def test_messages_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('[{"role": "user", "content": "Hi"}]')

    assert route._body(None, f"@{file}", None) == {"messages": [{"role": "user", "content": "Hi"}]}


def rank(number: int, **more: Any) -> dict[str, Any]:
    plain = {"worker": "", "dp_rank": 0, "state": "free", "requests": 1, "prefill_tokens": 20, "blocks": 3}
    return {
        "instance_id": f"{number:016x}",
        **plain,
        "overlap": None,
        "shared": None,
        "cost": None,
        "best": None,
        **more,
    }


def shown(*ranks: dict[str, Any], refusal: str | None = None) -> list[str]:
    told = {"role": "decode", "router": "mine", "tokens": 9, "block_size": 4, "ranks": ranks, "refusal": refusal}
    return route._show("m", told).splitlines()


def test_the_cheapest_worker_is_marked() -> None:
    lines = shown(
        rank(255, overlap=2, shared=1, cost=1.256, best=True),
        rank(16, overlap=0, shared=0, cost=9.0, best=False),
        rank(17, state="busy", best=False),
    )

    assert lines[0] == "decode workers of m, chosen by mine: 9 tokens, 2 blocks of 4"
    assert [line.split() for line in lines[2:]] == [
        ["*", "00000000000000ff", "-", "0", "free", "1", "20", "3", "1", "2", "1.26"],
        ["0000000000000010", "-", "0", "free", "1", "20", "3", "0", "0", "9.00"],
        ["0000000000000011", "-", "0", "busy", "1", "20", "3", "-", "-", "-"],
    ]


def test_missing_costs_and_an_empty_choice_are_printed() -> None:
    assert shown(rank(1))[-1] == "mine reports no costs."
    assert shown(rank(1), refusal="all busy")[-1] == "no worker can be chosen: all busy"
    assert shown(refusal="no worker there")[1:] == ["no worker can be chosen: no worker there"]
