"""What Prometheus is given, and a real Prometheus that tests ask what it makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dynamo_testing.servers.ports import free_port

from tests.deploy.conftest import REPOSITORY

PACK = REPOSITORY / "deploy" / "observability"
RULES = PACK / "prometheus" / "rules.yml"


def rules_in(text: str) -> list[dict[str, Any]]:
    """Return the rules of a file of this text."""
    (group,) = yaml.safe_load(text)["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def promtool(*words: str, folder: Path) -> str:
    """Return what promtool prints; a failure of it is one of the test."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool; on Debian: apt-get install prometheus")
    done = subprocess.run(["promtool", *words], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(address: str, path: str) -> Any:
    """Return the JSON that a server on the loopback answers."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return json.load(answer)


class Prometheus:
    """A real one, that scrapes and evaluates every second."""

    def __init__(self, folder: Path, jobs: list[dict[str, Any]], rules: str | None = None) -> None:
        """`jobs` are entries of `scrape_configs`, `rules` is the text of a file of rules."""
        if shutil.which("prometheus") is None:
            pytest.skip("needs Prometheus; on Debian: apt-get install prometheus")
        self.address = f"127.0.0.1:{free_port()}"
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config: dict[str, Any] = {"global": every, "scrape_configs": jobs}
        if rules is not None:
            (folder / "rules.yml").write_text(rules)
            config["rule_files"] = [str(folder / "rules.yml")]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        files = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen(
                ["prometheus", *files, f"--web.listen-address={self.address}"], stdout=log, stderr=log
            )

    def query(self, query: str) -> list[Any]:
        """Return what a query gives; nothing while Prometheus is still starting."""
        try:
            answer = told(self.address, "/api/v1/query?" + urllib.parse.urlencode({"query": query}))
        except OSError:
            return []
        found: list[Any] = answer["data"]["result"]
        return found

    def firing(self, alert: str) -> list[dict[str, Any]]:
        """Return the alerts of a rule that fire now."""
        active = told(self.address, "/api/v1/alerts")["data"]["alerts"]
        return [one for one in active if (one["labels"]["alertname"], one["state"]) == (alert, "firing")]

    def until(self, condition: Callable[[], Any], seconds: float, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Return what a condition gives, once that is true; what it gave last where it takes longer.

        `meanwhile` is done before each look.
        """
        deadline = time.monotonic() + seconds
        while True:
            meanwhile()
            found = condition()
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)
