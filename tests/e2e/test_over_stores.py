"""A login that a store refuses. What else holds with every store is in `test_every_profile.py` and `tests/chaos`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.brokers import Redis

CONFIG = """
transport: {use: tcp}
discovery: {use: redis, url: "%s", password: "${env:REDIS_PASSWORD}"}
"""


def test_a_wrong_password_is_told_in_one_line(tmp_path: Path) -> None:
    with Redis(tmp_path, "--requirepass", "secret") as store:
        (tmp_path / "config.yaml").write_text(CONFIG % store.url)
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "dynamo_runtime.cli.main",
                "serve",
                str(tmp_path / "config.yaml"),
                "--only",
                "frontend",
            ],
            env=os.environ | {"REDIS_PASSWORD": "other"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    assert ended.returncode == 2, ended.stderr
    assert "discovery.password: Redis at 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr
