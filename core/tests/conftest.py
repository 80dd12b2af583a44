"""A recorder whose spans stay in memory, and small distributions on disk as an installer would have written them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest
from dynamo_core.telemetry import spans
from dynamo_core.telemetry.otel import RandomIds, SpanRecorder
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

ECHO = """
from dynamo_core import EngineConfig, LLMEngine, LLMEngineOutput, hookimpl

DYNAMO_API = 2


class EchoEngine(LLMEngine):
    NAME = "echo"

    async def start(self, worker_id):
        return EngineConfig(model="echo")

    async def generate(self, request, ctx):
        yield LLMEngineOutput.stop()

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_engines():
    return [EchoEngine]
"""


class Recorded:
    """What was recorded, and the provider that did."""

    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False, id_generator=RandomIds()
        )
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        """All that have ended, in that order."""
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def record() -> Iterator[Callable[..., Recorded]]:
    """Switches recording on, for the rest of the test."""

    def switch_on(ratio: float = 1.0) -> Recorded:
        recorded = Recorded(ratio)
        spans.set_recorder(SpanRecorder(recorded.provider))
        return recorded

    yield switch_on
    spans.set_recorder(None)


class Site:
    """A folder on the import path into which distributions are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        distribution: str,
        entries: Mapping[str, str],
        modules: Mapping[str, str],
        *,
        version: str = "1.2.3",
        group: str = "dynamo",
    ) -> None:
        """Writes a distribution with entry points of one group and modules, given as name and source."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(dedent(source))

    def install_echo(self, source: str = ECHO) -> None:
        """Installs the engine ``echo``, or something else in its place."""
        self.install("dynamo-plugin-engine-echo", {"engine-echo": "fake_engine_echo"}, {"fake_engine_echo": source})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def echo() -> str:
    """The source of a sound plugin, to be broken."""
    return ECHO
