"""Reloading: read the settings again and apply all changes while the process runs, or none.

Each process prepares first: it loads, validates and compares, and makes all that could fail. Only then it applies.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.http_route import HttpRoute, ListenerName
from dynamo_core.contracts.plugin import Plugin
from dynamo_core.errors import ConfigError, DynamoError, InvalidArgument, error_type
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet
from dynamo_telemetry import logs

from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.assembly.resolve import Resolved, check_access
from dynamo_runtime.settings import Change, LoadedSettings, changes

T = TypeVar("T")

log = logging.getLogger(__name__)

PATH = "/admin/reload"
#: Seconds for reading and validating the settings, and for one part to take its new ones.
PREPARING = 8.0
APPLYING = 5.0
#: Sections that only a process with a frontend goes by.
_FRONTEND_SECTIONS = frozenset({"frontend", "admin", "auth", "admission", "router", "client"})
_FLAG = {"1": True, "true": True, "0": False, "false": False, "": False}

_encoder = msgspec.json.Encoder(enc_hook=str)


class Standing(msgspec.Struct, frozen=True):
    """A value that was set through the API, and stands whatever the file says."""

    key: str
    value: Any
    origin: str = "api"


class ProcessResult(msgspec.Struct, frozen=True):
    """The result of a reload in one process."""

    name: str
    pid: int | None
    result: Literal["checked", "applied", "unchanged", "failed", "restarting", "absent"]
    reason: str = ""


class ReloadReport(msgspec.Struct, frozen=True):
    """The result of a reload, or of a dry run.

    Good are ``unchanged``, ``checked`` (a dry run) and ``applied``. Else the settings are ``invalid``, changes were
    ``refused`` as they need a restart, it could not be done now (``busy``), or a process could not apply it
    (``failed``).
    """

    status: Literal["unchanged", "checked", "applied", "invalid", "refused", "busy", "failed"]
    message: str = ""
    changes: Sequence[Change] = ()
    standing: Sequence[Standing] = ()
    processes: Sequence[ProcessResult] = ()

    @property
    def good(self) -> bool:
        """Whether everything is as the file says, or would be."""
        return self.status in ("unchanged", "checked", "applied")


_STATUS = {"invalid": 422, "refused": 409, "busy": 409, "failed": 500}


class Step(NamedTuple):
    """One part that takes its new settings, and how it takes the former ones back."""

    name: str
    apply: Callable[[], Awaitable[None] | None]
    revert: Callable[[], Awaitable[None] | None]


def switch(name: str, take: Callable[[T], Awaitable[None] | None], old: T, new: T) -> Step:
    """Return the step of a part that takes its settings with one call."""
    return Step(name, partial(take, new), partial(take, old))


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid reload: its changes, and how they are applied."""

    before: LoadedSettings
    loaded: LoadedSettings
    changes: Sequence[Change]
    #: The settings of plugins that change, by their sections: the former ones and the new ones.
    configs: Mapping[str, tuple[PluginConfig, PluginConfig]] = field(default_factory=dict)
    steps: Sequence[Step] = ()

    def touches(self, section: str) -> bool:
        """Return whether a key of a section changes, or the section itself where it is one key."""
        return any(change.key == section or change.key.startswith(f"{section}.") for change in self.changes)

    def reconfigured(self, section: str, plugins: Iterable[Plugin]) -> Iterator[Step]:
        """Yield the steps of the objects of one plugin."""
        if section in self.configs:
            for plugin in plugins:
                yield switch(section, plugin.reconfigure, *self.configs[section])

    @property
    def refusal(self) -> str:
        """Why it cannot be applied, if it cannot."""
        keys = [change.key for change in self.changes if not change.live]
        if not keys:
            return ""
        return f"nothing was applied, since these need a restart: {', '.join(keys)}"


class Reloadable(Protocol):
    """A part of a process that takes new settings."""

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        """Yield the steps by which it takes them. Whatever may fail is made here.

        Raises:
            ConfigError: the settings cannot be used.
        """


def read_plan(loaded: LoadedSettings, resolved: Resolved, role: Role) -> Plan:
    """Read the settings again and compare them, without steps. Reads files: for a thread.

    Raises:
        ConfigError: they are wrong.
    """
    new = loaded.again()
    picks = {picked.section: picked for picked in resolved}
    found = changes(loaded, new, lambda section: picks[section].cls.Config.LIVE if section in picks else ())
    plan = Plan(loaded, new, [change for change in found if _concerns(role, change.key)])
    configs = {}
    for section, picked in picks.items():
        # Another plugin needs a restart; its keys are not those of the present one.
        if new.shown(f"{section}.use") == loaded.shown(f"{section}.use"):
            former = loaded.plugin_config(section, picked.cls.Config)
            config = new.plugin_config(section, picked.cls.Config)
            if former != config:
                configs[section] = (former, config)
    if role.frontend:
        check_access(new)
    return replace(plan, configs=configs)


def _concerns(role: Role, key: str) -> bool:
    """Return whether a process goes by a key."""
    section, _, rest = key.partition(".")
    if section == "workers":
        return role.whole or rest.partition(".")[0] in role.workers
    return role.frontend or section not in _FRONTEND_SECTIONS


class Reloader:
    """The reloader of one process's settings.

    `parts` take new settings; `standing` lists values set through the API.
    """

    def __init__(
        self, loaded: LoadedSettings, resolved: Resolved, role: Role, parts: Sequence[Reloadable] = ()
    ) -> None:
        #: The settings in force.
        self.loaded = loaded
        self.standing: Callable[[], Sequence[Standing]] = list
        self._resolved = resolved
        self._role = role
        self._parts = parts

    def attach(self, parts: Sequence[Reloadable], standing: Callable[[], Sequence[Standing]] = list) -> None:
        """Set the parts that take settings, and the function that lists the values that the API has set.

        A process makes them after its reloader, because the route that reloads is a part too.
        """
        self._parts, self.standing = parts, standing

    async def prepare(self) -> Plan:
        """Read and validate everything; change nothing.

        Raises:
            ConfigError: the settings are wrong, or could not be read in time.
        """
        try:
            async with asyncio.timeout(PREPARING):
                plan = await asyncio.to_thread(read_plan, self.loaded, self._resolved, self._role)
        except TimeoutError:
            raise ConfigError(f"the settings could not be read within {PREPARING:g} s") from None
        if plan.refusal:
            return plan
        steps = [*self._own_steps(plan), *(step for part in self._parts for step in part.reload_steps(plan))]
        return replace(plan, steps=steps)

    async def apply(self, plan: Plan) -> None:
        """Apply it all. Where a part fails, all that had taken the new settings take the former ones back.

        Raises:
            DynamoError: a part failed; the message says which, and why.
        """
        begun: list[Step] = []
        for step in plan.steps:
            begun.append(step)
            try:
                await _run(step.apply)
            except Exception as error:
                log.warning("%s cannot take its new settings", step.name, exc_info=error)
                for one in reversed(begun):
                    await _reverted(one)
                why = str(error) or type(error).__name__
                raise DynamoError(f"{step.name} cannot take its new settings: {why}", cause=error) from error
        self.loaded = plan.loaded

    def _own_steps(self, plan: Plan) -> Iterator[Step]:
        if plan.touches("log.level"):
            yield switch("log.level", logs.set_level, self.loaded.settings.log.level, plan.loaded.settings.log.level)


async def _run(action: Callable[[], Awaitable[None] | None]) -> None:
    async with asyncio.timeout(APPLYING):
        result = action()
        if inspect.isawaitable(result):
            await result


async def _reverted(step: Step) -> None:
    try:
        await _run(step.revert)
    except Exception:
        log.exception("%s could not take its former settings back", step.name)


class Reload(Protocol):
    """Reloads the settings of all processes that belong together."""

    async def __call__(self, dry_run: bool) -> ReloadReport:
        """Check, and without `dry_run` apply, what the files say now."""


class ReloadSwitch:
    """The reload of all processes that belong together, whichever process leads it.

    A process reloads by itself until a supervisor takes the lead.
    """

    def __init__(self, own: Reload) -> None:
        self._leader = own

    async def __call__(self, dry_run: bool) -> ReloadReport:
        """See `Reload`."""
        return await self._leader(dry_run)

    def follow(self, leader: Reload) -> None:
        """Have another process lead from now on."""
        self._leader = leader


class OneReload(AsyncResource):
    """Lets one reload run at a time, to its end: a caller that leaves does not cut it."""

    def __init__(self, reload: Reload) -> None:
        self._reload = reload
        self._tasks = TaskSet()

    async def __call__(self, dry_run: bool) -> ReloadReport:
        """See `Reload`."""
        if len(self._tasks):
            return ReloadReport("busy", "another reload is under way: ask again when it is over")
        return await asyncio.shield(self._tasks.spawn(self._reported(dry_run), name="reload settings"))

    async def aclose(self) -> None:
        """Cut the reload that is under way."""
        await self._tasks.aclose()

    async def _reported(self, dry_run: bool) -> ReloadReport:
        report = await self._reload(dry_run)
        if not dry_run:
            log_reload(report)
        return report


def log_reload(report: ReloadReport) -> None:
    """Log what a reload has come to."""
    if report.good:
        keys = ", ".join(change.key for change in report.changes)
        log.info("the settings were read again: %s", f"applied {keys}" if keys else "nothing has changed")
    else:
        log.warning("the settings were read again: %s", report.message)


async def reload_here(reloader: Reloader, name: str, dry_run: bool) -> ReloadReport:
    """Reload one process that runs by itself."""
    try:
        plan = await reloader.prepare()
    except ConfigError as error:
        return ReloadReport("invalid", str(error))
    me = partial(ProcessResult, name or "dynamo", os.getpid())
    about = partial(ReloadReport, changes=plan.changes, standing=reloader.standing())
    if plan.refusal:
        return about("refused", plan.refusal)
    if dry_run or not plan.changes:
        state: Literal["checked", "unchanged"] = "checked" if dry_run else "unchanged"
        return about(state, processes=[me(state)])
    try:
        await reloader.apply(plan)
    except DynamoError as error:
        return about("failed", f"{error}; the former settings are in force", processes=[me("failed", str(error))])
    return about("applied", processes=[me("applied")])


def reload_route(reload: Reload) -> HttpRoute:
    """Return the route ``POST /admin/reload``."""

    async def handle(http: web.Request) -> web.Response:
        dry_run = _FLAG.get(http.query.get("dry_run", "").lower())
        if dry_run is None:
            raise InvalidArgument("dry_run: expected 1 or 0", field="dry_run")
        report = await reload(dry_run)
        return web.Response(
            status=_STATUS.get(report.status, 200), body=_encoder.encode(_body(report)), content_type="application/json"
        )

    return HttpRoute(
        "POST",
        PATH,
        handle,
        "reads the settings again and applies what changed; ?dry_run=1 only says what would",
        ListenerName.ADMIN,
        acts=True,
    )


def _body(report: ReloadReport) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(report, enc_hook=str)
    if not report.good:
        status = _STATUS[report.status]
        body["error"] = {
            "message": report.message,
            "type": error_type(status),
            "param": None,
            "code": f"reload_{report.status}",
        }
    return body
