"""Reloading the settings of a supervisor and its children: all prepare, then all apply."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
from dynamo_core.errors import ConfigError, Disconnected, DynamoError
from dynamo_core.protocol.decoding import Unreadable, read

from dynamo_runtime.assembly.reload import (
    APPLYING,
    PREPARING,
    Plan,
    ProcessResult,
    Reloader,
    ReloadReport,
    Standing,
)

log = logging.getLogger(__name__)

#: Seconds for a child to answer in the first phase and in the second, and for the supervisor to answer a frontend.
ASKING = PREPARING + 2.0
TAKING = 3 * APPLYING
WHOLE = ASKING + TAKING + PREPARING

#: The key that the supervisor sets on the command line of some children.
_OWN_KEYS = ("frontend.port",)


class Request(msgspec.Struct, frozen=True):
    """A request from one end to the other: a child to ``prepare`` or ``apply``, the supervisor to ``reload`` all."""

    what: Literal["prepare", "apply", "reload"]
    #: What the settings must be that a child reads.
    fingerprint: str = ""
    dry_run: bool = False


class Reply(msgspec.Struct, frozen=True):
    """A child's answer: whether it has prepared or applied, or why not. `changes` is whether any is its own."""

    status: Literal["good", "invalid", "refused", "busy", "failed"]
    reason: str = ""
    changes: bool = False
    standing: Sequence[Standing] = ()


_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)
_reports = msgspec.json.Decoder(ReloadReport)


class AskableEnd(Protocol):
    """The other end of a line."""

    async def ask(self, body: Any, timeout: float) -> Any:
        """Return its answer."""


class Child(AskableEnd, Protocol):
    """One process of the supervisor, as a reload sees it."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def restart(self) -> None:
        """End it in order; the supervisor starts it again."""


class Children(Protocol):
    """The processes of a supervisor."""

    def names(self) -> Sequence[str]:
        """Return the names of all that there should be."""

    def running(self) -> Sequence[Child]:
        """Return those that there are."""


class ChildReload:
    """The half of a child: answers the supervisor, and has it reload everything."""

    def __init__(self, reloader: Reloader, supervisor: AskableEnd) -> None:
        self._reloader = reloader
        self._supervisor = supervisor
        self._plan: Plan | None = None

    async def __call__(self, dry_run: bool) -> ReloadReport:
        """See `dynamo_runtime.assembly.reload.Reload`."""
        try:
            answer = await self._supervisor.ask(_plain(Request("reload", dry_run=dry_run)), WHOLE)
            return read(_reports, msgspec.json.encode(answer))
        except (DynamoError, Unreadable) as error:
            return ReloadReport("busy", f"the supervisor does not answer: {error}")

    async def answer(self, body: Any) -> Any:
        """Answer one question of the supervisor."""
        request = read(_requests, msgspec.json.encode(body))
        return _plain(await (self._prepare(request) if request.what == "prepare" else self._apply()))

    async def _prepare(self, request: Request) -> Reply:
        self._plan = None
        try:
            plan = await self._reloader.prepare()
        except ConfigError as error:
            return Reply("invalid", str(error))
        if plan.refusal:
            return Reply("refused", plan.refusal)
        if plan.loaded.fingerprint(without=_OWN_KEYS) != request.fingerprint:
            return Reply("busy", "the settings changed while they were read: ask again")
        self._plan = plan
        return Reply("good", changes=bool(plan.changes), standing=self._reloader.standing())

    async def _apply(self) -> Reply:
        plan, self._plan = self._plan, None
        if plan is None:
            return Reply("failed", "nothing was prepared")
        try:
            await self._reloader.apply(plan)
        except DynamoError as error:
            return Reply("failed", str(error))
        return Reply("good", changes=bool(plan.changes))


class SupervisedReload:
    """The supervisor's half of a reload, whose `reloader` has the whole config."""

    def __init__(self, reloader: Reloader, children: Children) -> None:
        self._reloader = reloader
        self._children = children

    async def __call__(self, dry_run: bool) -> ReloadReport:
        """See `dynamo_runtime.assembly.reload.Reload`."""
        try:
            plan = await self._reloader.prepare()
        except ConfigError as error:
            return ReloadReport("invalid", str(error))
        if plan.refusal:
            return ReloadReport("refused", plan.refusal, plan.changes)
        children = list(self._children.running())
        request = Request("prepare", plan.loaded.fingerprint(without=_OWN_KEYS))
        replies = await asyncio.gather(*(_asked(child, request, ASKING) for child in children))
        for child, reply in zip(children, replies, strict=True):
            if reply is not None and reply.status != "good":
                status: Any = "busy" if reply.status == "failed" else reply.status
                return ReloadReport(status, f"nothing was applied: {child.name}: {reply.reason}", plan.changes)
        standing = next((reply.standing for reply in replies if reply is not None and reply.standing), ())
        report = partial(ReloadReport, changes=plan.changes, standing=standing)
        if dry_run:
            return report("checked", processes=self._results(children, replies, "checked"))
        if not plan.changes and not any(reply is not None and reply.changes for reply in replies):
            return report("unchanged", processes=self._results(children, replies, "unchanged"))
        return await self._apply(plan, children, report)

    async def _apply(self, plan: Plan, children: Sequence[Child], report: partial[ReloadReport]) -> ReloadReport:
        try:
            await self._reloader.apply(plan)
        except DynamoError as error:
            return report("failed", f"{error}; the former settings are in force")
        replies = await asyncio.gather(*(_asked(child, Request("apply"), TAKING) for child in children))
        failed = []
        for child, reply in zip(children, replies, strict=True):
            if reply is not None and reply.status != "good":
                log.error("%s is started again, on the new settings: %s", child.name, reply.reason)
                failed.append(f"{child.name}: {reply.reason}")
                child.restart()
        results = self._results(children, replies, "applied")
        if failed:
            return report("failed", f"started again, on the new settings: {'; '.join(failed)}", processes=results)
        return report("applied", processes=results)

    def _results(
        self,
        children: Sequence[Child],
        replies: Sequence[Reply | None],
        good: Literal["checked", "applied", "unchanged"],
    ) -> list[ProcessResult]:
        """Return the supervisor's own result, those of its children, and of those that there should be and are not."""
        results = {"supervisor": ProcessResult("supervisor", os.getpid(), good)}
        absent = partial(ProcessResult, pid=None, result="absent", reason="it starts on the settings of the file")
        for name in self._children.names():
            results[name] = absent(name)
        for child, reply in zip(children, replies, strict=True):
            if reply is None:
                results[child.name] = absent(child.name)
            elif reply.status == "good":
                results[child.name] = ProcessResult(child.name, child.pid, good if reply.changes else "unchanged")
            else:
                results[child.name] = ProcessResult(child.name, child.pid, "restarting", reply.reason)
        return list(results.values())


async def _asked(child: Child, request: Request, timeout: float) -> Reply | None:
    """Return what a child answers; None if it has ended."""
    try:
        answer = await child.ask(_plain(request), timeout)
        if answer is None:
            return Reply("busy", "it is starting: ask again later")
        return read(_replies, msgspec.json.encode(answer))
    except Disconnected:
        return None
    except (DynamoError, Unreadable) as error:
        return Reply("failed", str(error))


async def answer_reloads(reload: Any, body: Any) -> Any:
    """Answer a child that wants everything reloaded."""
    return _plain(await reload(read(_requests, msgspec.json.encode(body)).dry_run))


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)
