"""`dynamo top` shows what a state has; its keys do what people expect; a frontend that is away is told."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest
from dynamo_core.errors import ConfigError
from dynamo_plugin_extension_feed.screen import Detail, Top
from dynamo_plugin_extension_feed.tables import REQUESTS, TENANTS, WORKERS, age, alarm, seconds
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.widgets import DataTable, Input, Static

pytestmark = pytest.mark.asyncio

COUNTS: dict[str, Any] = {
    "requests": 12,
    "failed": 1,
    "refused": 0,
    "moved": 0,
    "prompt_tokens": 100,
    "output_tokens": 50,
    "requests_per_second": 0.2,
    "output_tokens_per_second": 0.8,
    "hit_rate": 0.5,
    "time_to_first_token": {"p50": 0.02, "p90": 0.1, "p99": 1.5},
    "inter_token_latency": {"p50": 0.005, "p90": 0.006, "p99": 0.007},
}


def worker(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"{number:016x}",
        "name": f"mock-{number}",
        "model": "m",
        "role": "aggregated",
        "state": "serving",
        "status": "free",
        "host": "here",
        "pid": 100 + number,
        "version": "0.1.0",
        "started": time.time() - 7300,
        "requests": number,
        "kv_used_blocks": 10 * number,
        "kv_total_blocks": 100,
        "prefill_tokens": 0,
        "hit_rate": None,
        "served": 3,
    } | changes


def line(request_id: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": request_id,
        "model": "m",
        "tenant": "default",
        "received": 1_700_000_000.0,
        "status": "success",
        "error_type": None,
        "finish_reason": "stop",
        "worker": f"{1:016x}",
        "waited": 0.0,
        "prompt_tokens": 7,
        "cached_tokens": None,
        "output_tokens": 3,
        "duration": 0.5,
        "time_to_first_token": 0.02,
    } | changes


def state(**changes: Any) -> dict[str, Any]:
    return {
        "alarms": [],
        "frontends": [{"id": "a", "missing": None}, {"id": "b", "missing": "does not answer"}],
        "models": [
            {"name": "m", "workers": {"aggregated": 3}, "waiting": 2, "prefilling": 1, "answering": 4}
            | {"last_minute": COUNTS, "last_15_minutes": COUNTS}
        ],
        "workers": [worker(1), worker(2, status="busy", kv_total_blocks=None), worker(3, state="draining")],
        "tenants": [{"name": "default", "last_minute": None, "last_15_minutes": COUNTS}],
        "recent": [line("request-1"), line("request-2", status="error", error_type="timeout")],
    } | changes


STORY = {
    "request": {"id": "request-1", "x_request_id": "", "model": "m", "endpoint": "chat", "request_type": "unary"}
    | {
        "tenant": "default",
        "key_id": "",
        "trace_id": "t",
        "ended": False,
        "events": [{"event": "received", "at": 0.0}],
    },
    "frontend": {"id": "a", "host": "here", "pid": 1},
    "missing": {},
}


class Frontend:
    """Answers, until it is away."""

    def __init__(self) -> None:
        self.away = False
        self.refuses = False
        self.state = state()
        self.story = STORY

    async def ask(self, method: str, path: str) -> tuple[int, Any]:
        if self.away:
            raise ConfigError("http://here (--url names another): cannot be asked: no answer within 10 s")
        if self.refuses:
            return 401, {"error": {"message": "give a token"}}
        return (200, self.state) if path == "/admin/state" else (200, self.story)


@pytest.fixture
def frontend() -> Frontend:
    return Frontend()


@pytest.fixture
def top(frontend: Frontend) -> Top:
    # It is asked by the tests, not by time.
    return Top(frontend.ask, 3600, frontend.state)


def names(top: Top) -> list[str]:
    """Return the first column."""
    table = top.query_one(DataTable)
    return [str(table.get_row_at(index)[0]) for index in range(table.row_count)]


def text(top: Top, selector: str) -> str:
    return str(top.query_one(selector, Static).content)


def errors(top: Top) -> list[str]:
    """Return what the summary shows in the color of errors."""
    content = top.query_one("#summary", Static).content
    assert isinstance(content, Content)
    return [content.plain[span.start : span.end] for span in content.spans if "error" in str(span.style)]


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_each_view_has_its_rows(top: Top, size: tuple[int, int]) -> None:
    async with top.run_test(size=size) as pilot:
        assert names(top) == ["mock-1", "mock-2", "mock-3"]
        assert "2/3 workers" in text(top, "#summary")
        assert "1/2 frontends" in text(top, "#summary")
        for key, first in (("2", "m"), ("4", "default"), ("1", "mock-1")):
            await pilot.press(key)
            assert names(top)[0] == first
        await pilot.press("tab", "tab")
        assert "recent: 2 of 2" in text(top, "#where")


async def test_s_sorts_by_the_next_column_and_r_reverses(top: Top) -> None:
    async with top.run_test() as pilot:
        await pilot.press("r")
        assert names(top) == ["mock-3", "mock-2", "mock-1"]
        # By model, then status, then requests: the most first.
        await pilot.press("s", "s", "s")
        assert names(top) == ["mock-3", "mock-2", "mock-1"]
        await pilot.press("s")
        # One that does not say how many blocks it has comes last.
        assert names(top) == ["mock-3", "mock-1", "mock-2"]


async def test_a_filter_keeps_the_rows_with_all_words(top: Top) -> None:
    async with top.run_test() as pilot:
        await pilot.press("slash", *"mock busy", "enter")
        assert names(top) == ["mock-2"]
        assert isinstance(top.focused, DataTable)
        await pilot.press("escape")
        assert len(names(top)) == 3
        assert top.query_one("#filter", Input).value == ""


async def test_a_worker_and_a_request_can_be_opened_and_closed(top: Top) -> None:
    async with top.run_test() as pilot:
        await pilot.press("down", "enter")
        assert isinstance(top.screen, Detail)
        assert "status    busy" in top.screen.lines
        await pilot.press("escape", "3", "enter")
        await pilot.pause()
        assert isinstance(top.screen, Detail)
        assert top.screen.lines[0] == "Request request-1"
        await pilot.press("q")
        assert not isinstance(top.screen, Detail)


async def test_the_place_stays_while_the_rows_change(top: Top, frontend: Frontend) -> None:
    async with top.run_test() as pilot:
        await pilot.press("down", "down")
        frontend.state = state(workers=[worker(0), worker(3), worker(4)])
        await top.refresh_state()
        await pilot.pause()
        assert names(top) == ["mock-0", "mock-3", "mock-4"]
        assert top.query_one(DataTable).cursor_row == 1


@pytest.mark.timeout(30)
async def test_a_thousand_workers_that_all_change_are_shown(top: Top, frontend: Frontend) -> None:
    crowd = [worker(number) for number in range(1000)]
    frontend.state = state(workers=crowd)
    async with top.run_test(size=(200, 50)) as pilot:
        await top.refresh_state()
        await pilot.pause()
        assert "1000 of 1000" in text(top, "#where")
        # Each cell is narrower than before: a table that looks for the widest of a column does it for each.
        frontend.state = state(workers=[one | {"requests": 1, "kv_used_blocks": 0, "served": 0} for one in crowd])
        await top.refresh_state()
        await pilot.press("end")
        assert names(top)[-1] == "mock-999"
        assert str(top.query_one(DataTable).get_row_at(999)[3]) == "1"


async def test_a_column_grows_with_its_content(top: Top, frontend: Frontend) -> None:
    async with top.run_test(size=(200, 50)) as pilot:
        long = worker(1, name="a-worker-with-a-long-name")
        frontend.state = state(workers=[long])
        await top.refresh_state()
        await pilot.pause()
        (column, *_) = top.query_one(DataTable).ordered_columns
        assert column.width >= len(long["name"])
        assert names(top) == ["a-worker-with-a-long-name"]


async def test_top_keeps_an_open_dialog_across_refreshes(top: Top, frontend: Frontend) -> None:
    async with top.run_test() as pilot:
        await pilot.press("question_mark")
        frontend.state = state(workers=[worker(9)])
        await top.refresh_state()
        assert isinstance(top.screen, Detail)
        await pilot.press("escape")
        assert names(top) == ["mock-9"]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("away", r"NO ANSWER since \d\d:\d\d:\d\d, figures are old: no answer within 10 s"),
        ("refuses", r"REFUSED since \d\d:\d\d:\d\d, figures are old: give a token \(401\)"),
    ],
)
async def test_an_unreachable_frontend_replaces_the_alarm_line(
    top: Top, frontend: Frontend, fault: str, told: str
) -> None:
    async with top.run_test(size=(80, 24)) as pilot:
        setattr(frontend, fault, True)
        await top.refresh_state()
        await pilot.pause()
        line = text(top, "#summary").splitlines()[1]
        assert re.fullmatch(told, line)
        assert line in errors(top)
        assert top.query_one(DataTable).styles.opacity < 1
        assert len(names(top)) == 3
        setattr(frontend, fault, False)
        await top.refresh_state()
        await pilot.pause()
        assert text(top, "#summary").splitlines()[1] == "no alarms"
        assert errors(top) == []
        assert top.query_one(DataTable).styles.opacity == 1


async def test_the_time_of_the_first_silence_stays(
    top: Top, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with top.run_test():
        frontend.away = True
        for clock in ("19:19:04", "19:19:05"):
            monkeypatch.setattr("time.strftime", lambda *_, clock=clock: clock)
            await top.refresh_state()
        assert "since 19:19:04" in text(top, "#summary")


@pytest.mark.parametrize("workers", [[], [worker(1, status="busy")]])
async def test_no_free_worker_is_shown_as_an_error(frontend: Frontend, workers: list[Any]) -> None:
    top = Top(frontend.ask, 3600, state(workers=workers))
    async with top.run_test():
        assert errors(top) == [f"0/{len(workers)} workers"]


async def test_a_table_of_an_opened_request_moves_sideways(top: Top, frontend: Frontend) -> None:
    ranks = {"dp_rank": 0, "overlap": 1, "prefill_tokens": 0, "blocks": 2, "cost": 2.69}
    routed = {"event": "routed", "at": 0.001, "after": None, "router": "kv", "seconds": 0.0001, "role": "aggregated"}
    routed |= ranks | {"worker": f"{1:016x}", "candidates": [ranks | {"worker": f"{1:016x}"}]}
    frontend.story = STORY | {"request": STORY["request"] | {"events": [routed]}}
    async with top.run_test(size=(80, 24)) as pilot:
        await pilot.press("3", "enter")
        await pilot.pause()
        assert isinstance(top.screen, Detail)
        shown = top.screen.query_one(Static)
        box = shown.parent
        assert isinstance(box, ScrollableContainer)
        assert shown.size.height == len(top.screen.lines)
        assert shown.size.width >= max(map(len, top.screen.lines)) > box.size.width
        await pilot.press("right", "right", "right")
        await pilot.wait_for_scheduled_animations()
        assert box.scroll_x == box.max_scroll_x > 0
        await pilot.press("left", "left", "left")
        await pilot.wait_for_scheduled_animations()
        assert box.scroll_x == 0
        assert {"Left", "Right"} <= {one.binding.description for one in top.screen.active_bindings.values()}


async def test_the_worst_alarm_is_on_the_screen() -> None:
    found = [{"level": "critical", "text": "no workers"}, {"level": "note", "text": "a worker drains"}]

    assert alarm(state(alarms=found)) == "CRITICAL (+1): no workers"


@pytest.mark.parametrize(("known", "shown"), [({"worker_name": "mock-1"}, "mock-1"), ({}, f"{1:016x}")])
async def test_a_request_has_the_name_of_its_worker(known: dict[str, str], shown: str) -> None:
    assert REQUESTS.cells(line("r", **{"worker_name": None} | known))[-2] == shown
    assert REQUESTS.cells(line("r") | known)[-2] == shown


async def test_rows_without_a_value_come_last_in_any_order() -> None:
    for turned in (False, True):
        assert [row["name"] for row in WORKERS.rows(state(), "", 4, turned)][-1] == "mock-2"


async def test_cells_are_short() -> None:
    cells: Mapping[str, str] = dict(zip((c.title for c in REQUESTS.columns), REQUESTS.cells(line("r")), strict=True))

    assert (cells["TTFT"], cells["TOTAL"], cells["HIT"], cells["END"]) == ("20ms", "500ms", "-", "stop")
    assert TENANTS.cells(state()["tenants"][0])[:3] == ["default", "-", "12"]
    assert (seconds(90), seconds(600), age(time.time() - 7300)) == ("90.0s", "10m", "2h")
