"""`dynamo workers`: how it prints what a frontend tells it, and what it says where a drain does not end well."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from dynamo_core.errors import ConfigError
from dynamo_http.admin_client import AdminClient
from dynamo_runtime.cli.main import cli

Answers = list[tuple[int, Any] | ConfigError]


def entry(**more: Any) -> dict[str, Any]:
    plain = {"id": f"{171:016x}", "worker": "gpu", "replica": 3, "model": "m", "role": "decode", "state": "serving"}
    return {**plain, "requests": 2, "drained": False, "host": "far", "pid": 9, "system_url": None, **more}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Answers], list[str]]:
    """Make a frontend that gives these answers in order, the last one again and again; tell what it was asked."""

    def answering(answers: Answers) -> list[str]:
        seen: list[str] = []

        async def ask(client: AdminClient, method: str, path: str, body: Any = None) -> tuple[int, Any]:
            seen.append(f"{method} {path}")
            answer = answers[min(len(seen), len(answers)) - 1]
            if isinstance(answer, ConfigError):
                raise answer
            return answer

        monkeypatch.setattr(AdminClient, "ask", ask)
        monkeypatch.setattr("dynamo_runtime.cli.workers.LOOK", 0.001)
        return seen

    return answering


def run(*words: str) -> Any:
    return CliRunner().invoke(cli, ["workers", *words])


@pytest.mark.parametrize("words", [(), ("list",), ("--timeout", "3"), ("list", "--timeout", "3")])
def test_without_the_name_of_a_command_the_workers_are_listed(
    asked: Callable[[Answers], list[str]], words: tuple[str, ...]
) -> None:
    seen = asked([(200, {"workers": [entry(), entry(requests=None, host="", pid=None)]})])

    result = run(*words)

    assert seen == ["GET /admin/workers"]
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ID", "NAME", "MODEL", "ROLE", "STATE", "REQUESTS", "HOST", "PID"],
        ["00000000000000ab", "gpu-3", "m", "decode", "serving", "2", "far", "9"],
        ["00000000000000ab", "gpu-3", "m", "decode", "serving", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("action", "answer", "says"),
    [
        ("cordon", entry(state="cordoned"), "worker 00000000000000ab (gpu-3) is cordoned and runs 2 requests\n"),
        (
            "cordon",
            entry(state="cordoned", requests=1),
            "worker 00000000000000ab (gpu-3) is cordoned and runs 1 request\n",
        ),
        (
            "drain",
            entry(state="draining", requests=0, drained=True),
            "worker 00000000000000ab (gpu-3) is draining and has drained\n",
        ),
        ("uncordon", entry(requests=0), "worker 00000000000000ab (gpu-3) is serving and runs 0 requests\n"),
    ],
)
def test_a_state_change_prints_the_running_requests(
    asked: Callable[[Answers], list[str]], action: str, answer: dict[str, Any], says: str
) -> None:
    seen = asked([(200, answer)])

    result = run(action, "a b/c")

    assert (result.exit_code, result.stdout) == (0, says)
    assert seen == [f"POST /admin/workers/a%20b%2Fc/{action}"]


def test_json_prints_the_frontends_answer(asked: Callable[[Answers], list[str]]) -> None:
    asked([(200, entry(state="cordoned"))])

    assert json.loads(run("cordon", "gpu-3", "--json").stdout) == entry(state="cordoned")


def test_the_workers_command_prints_a_http_error_as_one_line(asked: Callable[[Answers], list[str]]) -> None:
    asked([(404, {"error": {"message": "no worker 'x' is registered"}})])

    result = run("cordon", "x")

    assert (result.exit_code, result.stderr) == (1, "dynamo: no worker 'x' is registered (404)\n")


def test_a_drain_is_waited_for_through_a_restart_of_the_frontend(asked: Callable[[Answers], list[str]]) -> None:
    seen = asked(
        [
            (200, entry(state="draining")),
            ConfigError("cannot be asked"),
            (503, {"error": {"message": "the first snapshot of discovery is not in yet"}}),
            (200, entry(state="draining", requests=None, drained=None)),
            (200, entry(state="draining", requests=0)),
            (200, entry(state="draining", requests=0, drained=True)),
        ]
    )

    result = run("drain", "gpu-3", "--wait", "60")

    assert (result.exit_code, result.stdout) == (0, "worker 00000000000000ab (gpu-3) is draining and has drained\n")
    # By its id, as another worker may have the name by then.
    assert seen == ["POST /admin/workers/gpu-3/drain"] + ["GET /admin/workers/00000000000000ab"] * 5


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, entry(state="draining")), "still runs 2 requests after 0.05 s; it stays draining: wait longer, or stop"),
        ((200, entry(state="draining", requests=0)), "may still get requests of late callers after 0.05 s; it stays"),
        ((200, entry(state="draining", requests=None)), "does not report after 0.05 s; it stays draining"),
        ((200, entry(state="serving")), "is serving now: its state was changed while it drained"),
        ((404, {"error": {"message": "no worker"}}), "has left while it drained"),
    ],
)
def test_an_unfinished_drain_prints_the_reason(
    asked: Callable[[Answers], list[str]], answer: tuple[int, Any], says: str
) -> None:
    asked([(200, entry(state="draining")), answer])

    result = run("drain", "gpu-3", "--wait", "0.05")

    assert result.exit_code == 1
    assert result.stderr.startswith(f"dynamo: worker 00000000000000ab (gpu-3) {says}")
    assert len(result.stderr.splitlines()) == 1
