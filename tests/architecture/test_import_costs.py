"""What core costs a process that does not serve: no web server, no tokenizers, no tracing, no library of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: What only a process that serves needs.
HEAVY = ("aiohttp.web", "tokenizers", "opentelemetry", "jinja2", "redis", "pytest")
OURS = ("dynamo_leases", "dynamo_redis", "dynamo_testing", "dynamo_text", "dynamo_wire", "dynamo_plugin")
REPORT = f"""
import sys
print(*sorted(name for name in sys.modules if name in {HEAVY!r} or name.startswith({OURS!r})))
"""


def loaded(line: str) -> list[str]:
    """Return which of these modules a fresh interpreter has after a line."""
    done = subprocess.run([sys.executable, "-c", line + REPORT], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    "line",
    [
        "import dynamo_core",
        "from dynamo_core import LLMEngine, hookimpl",
        "from dynamo_core import Admission, Discovery, Permit, Router, Transport",
        "from dynamo_core import ToolCallParser, ReasoningParser",
        "import dynamo_runtime.cli.main",
        "import dynamo_core.errors",
    ],
)
def test_imports_of_plugins_and_command_load_no_serving_library(line: str) -> None:
    assert loaded(line) == []


def test_the_runtime_brings_the_web_server_and_still_no_tokenizers_and_no_tracing() -> None:
    assert loaded("import dynamo_runtime.app") == ["aiohttp.web"]
