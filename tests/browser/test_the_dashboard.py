"""The dashboard in a real browser, over a real frontend: what it shows, what it changes, and who may."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_testing.servers.ports import free_port

from tests.browser.conftest import Screen

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

TOKEN = "operators-0123456789"
VIEWERS = "viewers-0123456789"
#: Where screenshots are kept, if anywhere.
SHOTS = os.environ.get("DYNAMO_SCREENSHOTS")

CONFIG = """
admin: {port: %d%s}
router: {use: kv}
admission: {use: token-capacity, active_decode_blocks_threshold: 0.85, active_prefill_tokens_threshold: 5000}
extensions:
  - {use: feed, interval: 0.2}
  - {use: dashboard%s}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5}
    replicas: %d
"""


class Deployment:
    """A frontend, and the address of its dashboard."""

    def __init__(self, serve: Any, replicas: int = 2, guarded: bool = False) -> None:
        port = free_port()
        token, viewers = (f", token: {TOKEN}", f", viewer_token: {VIEWERS}") if guarded else ("", "")
        self.server = serve(CONFIG % (port, token, viewers, replicas))
        self.root = f"http://127.0.0.1:{port}"

    def state(self) -> Any:
        """Return what all frontends and workers do."""
        with urllib.request.urlopen(f"{self.root}/admin/state", timeout=20) as answer:
            return json.load(answer)

    def drain(self, worker: str) -> None:
        """Take a worker out of service."""
        request = urllib.request.Request(f"{self.root}/admin/workers/{worker}/drain", method="POST")
        urllib.request.urlopen(request, timeout=20).close()

    def ask(self, count: int = 1) -> list[str]:
        """Return the ids of requests that were answered."""
        ids = []
        for number in range(count):
            content = [{"role": "user", "content": f"Tell me about the number {number % 3}. " * 20}]
            body = {"model": "mock-model", "messages": content, "max_tokens": 8}
            status, headers, _ = self.server.request("POST", "/v1/chat/completions", body)
            assert status == 200
            ids.append(headers["x-request-id"])
        return ids


#: Whether each chart has something in the color of a series.
DRAWN = r"""
() => {
  const probe = document.body.appendChild(document.createElement("span"));
  const wanted = [1, 2, 3].map((number) => {
    probe.style.color = `var(--series-${number})`;
    return getComputedStyle(probe).color.match(/\d+/g).map(Number);
  });
  probe.remove();
  return [...document.querySelectorAll("#charts canvas")].map((canvas) => {
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    for (let at = 0; at < data.length; at += 4)
      if (wanted.some((color) => color.every((value, index) => data[at + index] === value))) return true;
    return false;
  });
}
"""

#: Where the first chart begins to have something in the color of its first series: 0 is its left end, 1 its right.
BEGINS = r"""
() => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = "var(--series-1)";
  const wanted = getComputedStyle(probe).color.match(/\d+/g).map(Number);
  probe.remove();
  const canvas = document.querySelector("#charts canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let first = Infinity;
  for (let at = 0; at < data.length; at += 4)
    if (wanted.every((value, index) => data[at + index] === value)) first = Math.min(first, (at / 4) % canvas.width);
  return first / canvas.width;
}
"""

sizes = pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])


@pytest.fixture
def open_deployment(serve: Any) -> Callable[..., Deployment]:
    return lambda *args, **options: Deployment(serve, *args, **options)


def shown(screen: Screen, name: str) -> None:
    if SHOTS:
        screen.page.screenshot(path=Path(SHOTS) / f"{name}.png", full_page=True)


def serious(screen: Screen) -> list[Any]:
    """Return what axe-core finds that keeps people out."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")

    # Scripts are those of the frontend only: axe comes in beside the policy, as the tools of a browser do.
    found = axe.Axe().run(screen.page).response["violations"]
    return [
        (one["id"], one["help"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@sizes
def test_the_page_shows_requests_and_contacts_no_other_host(
    open_deployment: Callable[..., Deployment], screen: Any, phone: bool
) -> None:
    deployment = open_deployment()
    deployment.ask(12)
    one = screen(deployment.root, phone)
    one.open()
    one.page.wait_for_selector("#fleet button")
    expect_count(one, "#recent tbody tr", 12)
    one.page.click("#settings-details summary")
    one.page.wait_for_selector("#settings td")
    shown(one, f"2-workers-{'phone' if phone else 'desktop'}")

    assert one.page.locator("#fleet button").count() == 2
    # The first requests are all in one slot, which is a point and no line.
    assert one.page.evaluate(DRAWN) == [True] * 5
    assert one.page.evaluate("document.documentElement.scrollWidth") <= one.page.viewport_size["width"]
    assert serious(one) == []
    assert one.errors == []
    assert one.outside == []


def test_a_new_request_appears_with_its_history(open_deployment: Callable[..., Deployment], screen: Any) -> None:
    deployment = open_deployment()
    one = screen(deployment.root)
    one.open()
    one.page.wait_for_selector("#fleet button")

    (request_id,) = deployment.ask()
    one.page.click(f"#recent button[title='{request_id}']")

    one.page.wait_for_selector("#detail[open]")
    told = one.page.inner_text("#detail")
    places = [told.index(word) for word in ("received", "admitted after", "routed by kv", "accepted", "first token")]
    assert places == sorted(places)
    assert request_id in told
    assert serious(one) == []
    shown(one, "request")
    one.page.keyboard.press("Escape")
    one.page.wait_for_selector("#detail", state="hidden")
    one.page.fill("#find", "no-such-request")
    one.page.keyboard.press("Enter")
    expect_text(one, "#toast", "no frontend knows")


def test_draining_a_worker_needs_confirmation_and_is_logged_with_its_operator(
    open_deployment: Callable[..., Deployment], screen: Any
) -> None:
    deployment = open_deployment(guarded=True)
    one = screen(deployment.root)
    one.open()
    log_in(one, TOKEN)
    # With keys alone: arrows move between workers, Enter opens one.
    one.page.focus("#fleet button[tabindex='0']")
    one.page.keyboard.press("ArrowRight")
    assert one.page.evaluate("document.activeElement.querySelector('span').textContent") == "mock-1"
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("#detail[open]")
    one.page.click("#detail-acts >> text=Drain")
    one.page.wait_for_selector("#confirm[open]")
    assert serious(one) == []
    one.page.click("#confirm-no")
    one.page.click("#detail-acts >> text=Drain")
    one.page.click("#confirm-yes")

    expect_count(one, "#fleet button.out", 1)
    expect_text(one, "#alarms", "draining: mock-1")
    acts = re.findall(
        r"dynamo\.audit: (operator operator:\w+ at 127\.0\.0\.1: POST \S+/drain: 200)", deployment.server.log
    )
    assert len(acts) == 1
    assert one.errors == []


@pytest.mark.parametrize(
    ("passed", "begins"),
    [(None, (0, 0.3)), (300, (0.6, 0.8)), (5000, (0, 0.3))],
    ids=["not told", "5 minutes ago", "long ago"],
)
def test_a_chart_begins_where_counting_began(
    open_deployment: Callable[..., Deployment], screen: Any, passed: int | None, begins: tuple[float, float]
) -> None:
    deployment = open_deployment()
    one = screen(deployment.root)
    told = deployment.state() | {"history": []}
    told.pop("since", None)
    if passed is not None:
        told["since"] = told["time"] - passed
    message = f"event: state\ndata: {json.dumps(told)}\n\n"
    one.page.route("**/admin/feed", lambda route: route.fulfill(content_type="text/event-stream", body=message))
    one.open()
    one.page.wait_for_selector("#charts canvas")
    one.page.wait_for_function(f"() => Number.isFinite(({BEGINS})())")

    assert begins[0] < one.page.evaluate(BEGINS) < begins[1]


def test_thresholds_and_settings_are_changed(open_deployment: Callable[..., Deployment], screen: Any) -> None:
    deployment = open_deployment()
    one = screen(deployment.root)
    one.open()
    one.page.wait_for_selector("#threshold-model option", state="attached")

    expect_text(one, "#thresholds-now", "In force for mock-model")
    assert thresholds(one) == ("0.85", "5000")
    one.page.click("#thresholds button")
    expect_text(one, "#toast", "Change at least one threshold")
    one.page.fill("#active_decode_blocks_threshold", "0.5")
    one.page.fill("#active_prefill_tokens_threshold", "")
    shown(one, "thresholds")
    one.page.click("#thresholds button")
    expect_text(one, "#confirm-text", "For all frontends: active_decode_blocks_threshold = 0.5.")
    one.page.click("#confirm-yes")
    expect_text(one, "#thresholds-now", "active_decode_blocks_threshold = 0.5, active_prefill_tokens_threshold = 5000")
    assert thresholds(one) == ("0.5", "5000")
    one.page.click("#reload")
    expect_text(one, "#toast", "nothing would change")

    assert "POST /busy_threshold: 200" in deployment.server.log
    assert one.errors == []


def thresholds(screen: Screen) -> tuple[str, str]:
    """Return what is in the fields."""
    fields = (f"#active_{name}_threshold" for name in ("decode_blocks", "prefill_tokens"))
    share, tokens = (screen.page.input_value(field) for field in fields)
    return share, tokens


def test_a_viewer_cannot_change_anything(open_deployment: Callable[..., Deployment], screen: Any) -> None:
    deployment = open_deployment(guarded=True)
    one = screen(deployment.root)
    one.open()
    one.page.wait_for_selector("#login-form")
    assert serious(one) == []
    shown(one, "login")
    log_in(one, "not-the-token", then="#login-error:not(:empty)")
    # The browser tells of each 401.
    one.errors.clear()
    log_in(one, VIEWERS)

    one.page.click("#fleet button >> nth=0")
    one.page.wait_for_selector("#detail[open]")
    assert one.page.locator("#detail-acts button").count() == 0
    one.page.click("#detail-close")
    assert one.page.is_hidden("#operate")
    worker = one.page.evaluate("fetch('/admin/state').then(told => told.json()).then(state => state.workers[0].id)")
    path = f"/admin/workers/{worker}/drain"
    assert one.page.evaluate(f"fetch({json.dumps(path)}, {{method: 'POST'}}).then(told => told.status)") == 403
    one.page.click("#logout")
    one.page.wait_for_selector("#login-form")


def test_the_page_goes_on_after_the_frontend_was_away(open_deployment: Callable[..., Deployment], screen: Any) -> None:
    deployment = open_deployment()
    (one := screen(deployment.root)).open()
    one.page.wait_for_selector("#fleet button")

    deployment.server.end()

    one.page.wait_for_selector("#connection.lost")
    assert "no connection" in one.page.inner_text("#connection")


@sizes
def test_a_thousand_workers_can_be_looked_through(
    open_deployment: Callable[..., Deployment], screen: Any, phone: bool
) -> None:
    deployment = open_deployment(replicas=1000)
    assert deployment.server.until(lambda: len(deployment.state()["workers"]) == 1000, 120)
    deployment.ask(20)
    for worker in deployment.state()["workers"][:3]:
        deployment.drain(worker["id"])
    one = screen(deployment.root, phone)
    one.open()
    expect_count(one, "#fleet button", 1000)
    expect_count(one, "#fleet button.out", 3)
    shown(one, f"1000-workers-{'phone' if phone else 'desktop'}")

    one.page.fill("#filter", "mock-77")
    expect_count(one, "#fleet button", 11)

    assert one.page.evaluate("document.documentElement.scrollWidth") <= one.page.viewport_size["width"]
    assert one.errors == []
    assert one.outside == []


def _expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


def expect_count(screen: Screen, selector: str, count: int) -> None:
    _expect(screen.page.locator(selector)).to_have_count(count, timeout=20_000)


def expect_text(screen: Screen, selector: str, text: str) -> None:
    _expect(screen.page.locator(selector)).to_contain_text(text, timeout=20_000)


def log_in(screen: Screen, token: str, then: str = "#fleet button") -> None:
    screen.page.wait_for_selector("#login-form")
    screen.page.fill("#token", token)
    screen.page.click("#login-form button")
    screen.page.wait_for_selector(then)
