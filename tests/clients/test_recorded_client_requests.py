"""What clients of other people sent when the lane `make test-clients` ran them, sent again without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.agents.test_sdks_at_work import PROGRAMS
from tests.clients.coding_agents import AGENTS
from tests.clients.recorder import SENT, kept
from tests.clients.test_load_testers import TESTERS
from tests.clients.test_sdks import APIS, HERE_ALREADY, OTHERS

CONFIG = """
workers:
  scripted:
    model: {name: scripted, tool_call_parser: hermes}
    engine: {use: mocker, speedup_ratio: 0, context_length: 1000000, num_gpu_blocks: 100000}
    grace_period: 0
"""
MEMORY = CONFIG + "frontend: {use: openai, response_store: {use: memory}}\n"
#: Of what was answered before it sends only the names.
REMEMBERED = "ai-tasks"
SENT_WHOLE = sorted(path.stem for path in SENT.glob("*.json") if path.stem != REMEMBERED)
#: What the last item of each kind of stream holds.
ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/messages": b"event: message_stop\n",
    "/v1/responses": b"event: response.",
    "/api/chat": b'"eval_duration":',
}


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Any:
    return serve_for_module(f"{CONFIG}frontend: {APIS}\n")


def test_the_clients_of_the_lane_and_no_others_have_a_fixture() -> None:
    agents = {f"{agent.name}-{what}" for agent in AGENTS for what in ("chat", "edit", "task", "resumed", "parallel")}
    at_work = {*(f"aider-{what}" for what in ("task", "resumed", "parallel")), *(f"{each}-tasks" for each in PROGRAMS)}
    others = {str(each) for each in (*HERE_ALREADY, *OTHERS, *TESTERS)}

    assert {path.stem for path in SENT.glob("*.json")} == agents | at_work | others


def is_answered(server: Any, asked: dict[str, Any], body: dict[str, Any]) -> None:
    status, headers, answer = server.request("POST", asked["path"], body, **asked["headers"])
    # What was refused is refused again, as its client goes on without it.
    assert status == asked["status"], answer
    if status != 200:
        assert json.loads(answer)["error"]["details"]["error_code"] == "thread_unsupported_request"
    elif body.get("stream"):
        assert headers["content-type"].startswith(("text/event-stream", "application/x-ndjson"))
        assert ENDS[asked["path"].split("?")[0]] in answer[-200_000:]
    else:
        assert isinstance(json.loads(answer), dict)


@pytest.mark.parametrize("name", SENT_WHOLE)
def test_recorded_client_requests_are_answered(server: Any, name: str) -> None:
    for asked in kept(name).values():
        is_answered(server, asked, {**asked["body"], "model": "scripted"})


def test_items_not_resent_by_a_client_are_found(serve: Any) -> None:
    server = serve(MEMORY)
    _, _, answer = server.request("POST", "/v1/responses", {"model": "scripted", "input": "Say hello."})
    stored = {"type": "item_reference", "id": json.loads(answer)["output"][0]["id"]}

    for asked in kept(REMEMBERED).values():
        items = [stored if item.get("type") == "item_reference" else item for item in asked["body"]["input"]]
        assert stored in items
        is_answered(server, asked, {**asked["body"], "model": "scripted", "input": items})
