"""The id of an instance looks the same wherever this project shows it: 16 hexadecimal digits, as text."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.e2e.asking import dynamo

CONFIG = """
router: {use: kv}
log: {json: true}
workers: {mock: {model: {name: m}, engine: {use: mocker, speedup_ratio: 0}}}
"""
HEX = re.compile(r"[0-9a-f]{16}")


def test_health_log_metrics_and_command_show_one_text(serve: Any) -> None:
    server = serve(CONFIG)
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert server.request("POST", "/v1/chat/completions", body)[0] == 200

    (instance,) = json.loads(server.request("GET", "/health")[2])["instances"]
    known = instance["instance_id"]
    metrics = server.request("GET", "/metrics")[2].decode()
    told = json.loads(server.request("POST", "/route/explain", {"model": "m", "prompt": "Hi"})[2])
    shown = dynamo("route", "explain", "Hi", "--url", server.url).stdout

    assert HEX.fullmatch(known)
    assert set(re.findall(r'\bworker_id="([^"]*)"', metrics)) == {known}
    assert told["routes"][0]["ranks"][0]["instance_id"] == known
    assert f" {known} " in shown
    assert server.until(lambda: f'"instance_id":"{known}"' in server.log.replace(": ", ":"), 5)
    assert re.search(rf"as instance {known} of worker mock", server.log)
