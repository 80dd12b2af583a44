"""Alarms say what an operator should look at, the worst first, and nothing when all is well."""

from __future__ import annotations

from typing import Any

from dynamo_plugin_extension_feed.alarms import alarms
from dynamo_plugin_extension_feed.frontend_view import Worker


def model(name: str = "m", requests: int = 0, failed: int = 0, refused: int = 0, ready: bool = True) -> dict[str, Any]:
    counts = {"requests": requests, "failed": failed, "refused": refused} if requests else None
    return {"name": name, "ready": ready, "last_minute": counts}


def worker(name: str = "w-0", status: str = "free", state: str = "serving") -> Worker:
    return Worker(name, name, "m", "aggregated", state, status, "here", 1, None, None, 0, 0, None, 0)


def texts(*args: Any) -> list[str]:
    return [f"{one['level']}: {one['text']}" for one in alarms(*args)]


FRONTEND = {"id": "f", "host": "here", "missing": None}


def test_all_is_well() -> None:
    assert texts([model(requests=100, failed=5)], [worker()], [FRONTEND]) == []


def test_a_model_without_routable_workers_is_critical() -> None:
    found = texts([model()], [worker("w-0", "busy"), worker("w-1", "draining", "draining")], [FRONTEND])

    assert found == [
        "critical: model m: none of its 2 workers gets requests",
        "warning: 1 of 2 workers busy: w-0",
        "note: 1 of 2 workers draining: w-1",
    ]


def test_a_model_that_no_frontend_can_serve_is_critical() -> None:
    assert texts([model(ready=False)], [], []) == [
        "critical: model m: no frontend can serve it, for want of workers (0 are there)"
    ]
    assert texts([model()], [], []) == []


def test_failures_and_refusals_over_a_share_raise_an_alarm() -> None:
    found = texts([model(requests=100, failed=26, refused=20)], [worker()], [])

    assert found == [
        "warning: model m: 20 of 100 requests of the last minute refused",
        "warning: model m: 6 of 100 requests of the last minute failed",
    ]
    assert texts([model(requests=19, failed=19)], [worker()], []) == []


def test_many_workers_are_one_line() -> None:
    (_, line) = texts([model()], [worker(f"w-{number}", "down") for number in range(7)], [])

    assert line == "warning: 7 of 7 workers down: w-0, w-1, w-2, w-3, w-4 and 2 more"


def test_a_frontend_that_does_not_answer_is_named() -> None:
    silent = FRONTEND | {"missing": "no answer within 1 s"}

    assert texts([], [], [silent]) == ["warning: frontend f on here: no answer within 1 s"]
