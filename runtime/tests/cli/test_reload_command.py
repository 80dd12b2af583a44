"""`dynamo reload` without a server: how it prints what it is told, and what it exits with."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.main import cli

CHANGE = {"key": "router.temperature", "old": None, "new": 0.5, "origin": "dynamo.yaml:9", "live": True}
REPORT: dict[str, Any] = {
    "status": "applied",
    "message": "",
    "changes": [CHANGE, CHANGE | {"key": "namespace", "old": "a" * 100, "live": False}],
    "standing": [{"key": "admission.models.m.active_prefill_tokens_threshold", "value": 5, "origin": "api"}],
    "processes": [{"name": "frontend", "pid": None, "result": "absent", "reason": "it starts"}],
}
Answer = Callable[..., Any]


@pytest.fixture
def run() -> Answer:
    """Run the command against a server that gives one answer; the result, and the path that was asked for."""

    def ask(status: int, body: Any, *words: str) -> tuple[Any, str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(self.path)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *words: Any) -> None:
                pass

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.handle_request)
            thread.start()
            url = f"http://127.0.0.1:{server.server_port}"
            result = CliRunner().invoke(cli, ["reload", "--url", url, *words])
            thread.join()
        return result, asked[0]

    return ask


def test_reload_prints_changes_standing_values_and_processes(run: Answer) -> None:
    result, path = run(200, REPORT)

    assert (result.exit_code, path) == (0, "/admin/reload")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["router.temperature", "-", "0.5", "dynamo.yaml:9", "now"] in lines
    assert ["namespace", f'"{"a" * 58}…', "0.5", "dynamo.yaml:9", "after", "a", "restart"] in lines
    assert ["frontend", "-", "absent", "it", "starts"] in lines
    assert "admission.models.m.active_prefill_tokens_threshold is 5, as the api has set it." in result.stdout
    assert lines[-1] == ["Applied."]


def test_a_dry_run_is_requested_from_the_server(run: Answer) -> None:
    assert run(200, REPORT, "--dry-run")[1] == "/admin/reload?dry_run=1"


def test_a_refused_reload_prints_the_reason_and_exits_1(run: Answer) -> None:
    error = {"error": {"message": "nothing was applied, since these need a restart: namespace"}}

    result, _ = run(409, REPORT | error | {"status": "refused"})

    assert result.exit_code == 1
    assert "after a restart" in result.stdout
    assert result.stderr == "dynamo: nothing was applied, since these need a restart: namespace (409)\n"


def test_invalid_settings_are_reported_as_by_check(run: Answer) -> None:
    error = {"error": {"message": "dynamo.yaml:3: unknown key 'rooter'; did you mean 'router'?"}}

    result, _ = run(422, {"status": "invalid", "changes": [], "standing": [], "processes": []} | error)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "dynamo: dynamo.yaml:3: unknown key 'rooter'; did you mean 'router'? (422)\n"


def test_a_server_without_reload_is_reported_with_its_message(run: Answer) -> None:
    result, _ = run(404, {"error": {"message": "Route not found: POST /admin/reload"}})

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "dynamo: Route not found: POST /admin/reload (404)\n"


def test_json_is_the_answer_as_it_came(run: Answer) -> None:
    result, _ = run(500, REPORT, "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout) == REPORT
