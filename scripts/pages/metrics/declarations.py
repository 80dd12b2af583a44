"""The declarations of metrics in the code, and their places.

Deployments with all plugins run in this process for a moment, without servers, while every declaration is recorded at
the place where it is made: what /metrics would say, and not a second list. The sources are read too, so that a place
which no deployment reaches does not go unseen.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dynamo_plugin_engine_vllm.load import Rank
from dynamo_plugin_router_slot_tracker.replication.replicas import SyncSettings
from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import role_of
from dynamo_runtime.settings import load_settings
from dynamo_telemetry import Metrics
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

#: The methods of a `MetricsScope` that declare a metric; a collector declares one by making a family.
KINDS = ("counter", "gauge", "histogram")
FRONTEND, WORKER, SLOT_TRACKER = "frontend", "worker", "slot tracker"

#: A prefix that no name has, so that those show which follow `http.metrics_prefix`.
PREFIX = "prefixed"

#: Seconds until everything has started; it takes about one.
_PATIENCE = 40.0
_COMMON = f"""
http: {{metrics_prefix: {PREFIX}}}
client: {{drain_grace: 0, shutdown_timeout: 1, share_loads: true}}
discovery: {{use: file, path: "%(folder)s/discovery", poll: 0.02, ttl: 2}}
transport: {{use: %(transport)s}}
workers: {{mock: {{model: {{name: mock-model}}, engine: {{use: mocker, speedup_ratio: 0}}, grace_period: 0}}}}
"""
#: Frontends that see the worker. No server is at the addresses.
_FRONTENDS = (
    """
frontend: {port: 0, response_store: {use: memory}}
router: {use: kv}
admission:
- {use: fair-queue, shared: {url: "redis://127.0.0.1:1"}}
- {use: rate-limit, requests_per_minute: 1, shared: {url: "redis://127.0.0.1:1"}}
extensions: [{use: feed}]
""",
    """
frontend: {port: 0}
router: {use: affinity, then: {use: slot-tracker, url: "http://127.0.0.1:1"}}
""",
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """One call that declares a metric. `labels` are those of the call, `part` is the process that shows the metric."""

    file: Path
    line: int
    #: The module, and the function in it.
    place: str
    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    #: None for a collector.
    scope: Metrics | None
    part: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def common(self) -> tuple[str, ...]:
        """The labels that all metrics of the scope have."""
        return () if self.scope is None else tuple(self.scope._labels)


class Recorder:
    """Records declarations, and for which process each is."""

    def __init__(self) -> None:
        self.declarations: list[Declaration] = []
        self._parts: dict[CollectorRegistry, str] = {}
        self._part = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every declaration in the block."""
        with ExitStack() as stack:
            for kind in KINDS:
                stack.enter_context(patch.object(Metrics, kind, self._recorded(kind, getattr(Metrics, kind))))
            family = self._recorded("gauge", GaugeMetricFamily.__init__)
            stack.enter_context(patch.object(GaugeMetricFamily, "__init__", family))
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Let registries that are made in the block belong to this process; empty where it is several in one."""
        self._part = name
        yield
        self._part = ""

    def _recorded(self, kind: str, declare: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(declare)

        def declared(owner: Any, name: str, help: str, *rest: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            scope = owner if isinstance(owner, Metrics) else None
            self.declarations.append(
                Declaration(
                    file=Path(frame.f_code.co_filename),
                    line=frame.f_lineno,
                    place=f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}",
                    name=name,
                    kind=kind,
                    help=help,
                    labels=tuple(signature.bind(owner, name, help, *rest, **named).arguments.get("labels") or ()),
                    scope=scope,
                    part=self._part if scope is None else self._parts.setdefault(scope.registry, self._part),
                )
            )
            return declare(owner, name, help, *rest, **named)

        return declared


def recorded() -> list[Declaration]:
    """Return the declarations of the tree, in the order in which they are made."""
    recorder = Recorder()
    with recorder.recording():
        asyncio.run(_deploy(recorder))
    return recorder.declarations


async def _deploy(recorder: Recorder) -> None:
    def make(part: str, more: str = "", transport: str = "tcp") -> Application:
        path = Path(folder) / "config.yaml"
        path.write_text(_COMMON % {"folder": folder, "transport": transport} + more)
        loaded = load_settings(path, env={})
        only = {FRONTEND: "frontend", WORKER: "workers.mock", "": None}[part]
        with recorder.part(part):
            return Application(loaded, role_of(loaded.settings, only))

    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack, asyncio.timeout(_PATIENCE):
            await (await stack.enter_async_context(make(WORKER))).start()
            for more in _FRONTENDS:
                frontend = await stack.enter_async_context(make(FRONTEND, more))
                await frontend.start()
                await frontend.ready()
            # The metrics of a transport are there before its server is asked for.
            for transport in ("nats", "redis"):
                for part in (FRONTEND, WORKER):
                    await stack.enter_async_context(make(part, transport=transport))
            await stack.enter_async_context(make("", transport="inproc"))
    # vLLM need not be installed: its rank gets the scope of the worker above.
    scopes = {one.place.partition(".")[0]: one.scope for one in recorder.declarations if one.scope is not None}
    Rank(0, worker_id=0, blocks=0).setup_metrics(scopes["dynamo_plugin_engine_mocker"])
    with recorder.part(SLOT_TRACKER):
        Service(ServiceSettings(metrics=True, sync=SyncSettings("tcp://127.0.0.1:0")))


def sources(root: Path) -> Iterator[Path]:
    """Yield the files of the product.

    The kits are left out: they stand in for core, and declare nothing of their own.
    """
    for pattern in ("runtime/src", "libs/*/src", "plugins/*/*/src"):
        for folder in sorted(root.glob(pattern)):
            yield from (path for path in sorted(folder.rglob("*.py")) if "dynamo_testing" not in path.parts)


def unreached(files: Iterable[Path], declarations: Iterable[Declaration]) -> list[tuple[Path, int]]:
    """Return the places in files, by their lines, that declare a metric and are not those of a declaration."""
    reached: dict[Path, set[int]] = {}
    for one in declarations:
        reached.setdefault(one.file, set()).add(one.line)
    return [
        (path, lines.start)
        for path in files
        for lines in _declaring(ast.parse(path.read_text()))
        if reached.get(path, set()).isdisjoint(lines)
    ]


def _declaring(tree: ast.AST) -> Iterator[range]:
    """Yield the lines of the calls that declare a metric, whatever the object is called that is asked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute) and node.func.attr in KINDS
            if method or (isinstance(node.func, ast.Name) and node.func.id.endswith("MetricFamily")):
                yield range(node.lineno, (node.end_lineno or node.lineno) + 1)
