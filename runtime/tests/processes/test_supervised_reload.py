"""All processes prepare before one applies; what fails is started again; what is not there, or starts, is no riddle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import Disconnected, DynamoError, ResponseTimeout
from dynamo_core.plugins.loader import PluginLoader
from dynamo_runtime.assembly.process_roles import role_of
from dynamo_runtime.assembly.reload import OneReload, Plan, Reloader, ReloadReport, Step
from dynamo_runtime.assembly.resolve import Resolved, resolve
from dynamo_runtime.processes.supervised_reload import ChildReload, SupervisedReload, answer_reloads
from dynamo_runtime.settings import load_settings
from hypothesis import given
from hypothesis import strategies as st

CONFIG = """
transport: {{use: tcp}}
discovery: {{use: file}}
log: {{level: {level}}}
client: {{retries: {retries}}}
workers: {{mock: {{model: {{name: m}}, engine: {{use: mocker}}}}}}
"""


class Part:
    """A part of a child that counts what it took."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.level = "info"

    def reload_steps(self, plan: Plan) -> Iterator[Step]:
        def take() -> None:
            if self.fails:
                raise ValueError("no")
            self.level = plan.loaded.settings.log.level

        yield Step("part", take, lambda: None)


class Process:
    """One child: its half, reached without a line; and how it behaves."""

    def __init__(self, name: str, family: Family, how: str) -> None:
        self.name, self.how = name, how
        self.pid = hash(name) & 0xFFFF
        self.part = Part(how == "fails")
        self.reloader = Reloader(family.loaded.again(), family.resolved, family.role, [self.part])
        self.half = ChildReload(self.reloader, self)
        self.restarted = False
        self.asked: list[str] = []

    async def ask(self, body: Any, timeout: float) -> Any:
        self.asked.append(body["what"])
        if self.how == "starting":
            return None
        if self.how == "silent" or (self.how == "hangs" and body["what"] == "apply"):
            raise ResponseTimeout("no answer within 10 s")
        if self.how == "dies" and body["what"] == "apply":
            raise Disconnected("gone")
        return await self.half.answer(body)

    def restart(self) -> None:
        self.restarted = True


class Family:
    """A supervisor with children, over one file."""

    def __init__(self, folder: Path, *hows: str) -> None:
        self.path = folder / "config.yaml"
        self.write()
        self.loaded = load_settings(self.path, env={})
        self.role = role_of(self.loaded.settings, None)
        self.resolved = resolved()
        self.children = [Process(f"p{number}", self, how) for number, how in enumerate(hows)]
        self.reloader = Reloader(self.loaded, self.resolved, self.role, [])
        self.reload = OneReload(SupervisedReload(self.reloader, self))

    def write(self, level: str = "info", retries: int = 2) -> None:
        self.path.write_text(CONFIG.format(level=level, retries=retries))

    def names(self) -> list[str]:
        return [child.name for child in self.children]

    def running(self) -> list[Process]:
        return [child for child in self.children if child.how != "absent"]

    def levels(self) -> list[str]:
        return [child.part.level for child in self.children]


@cache
def resolved() -> Resolved:
    """Return the plugins, which are the same for every test."""
    return resolve(load_settings(env={}, sets=["transport.use=tcp", "discovery.use=file"]), PluginLoader())


Make = Callable[..., Family]


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    # Puts the level back after the test.
    caplog.set_level("INFO")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *hows: Family(tmp_path, *hows)


async def applied(family: Family) -> ReloadReport:
    """Return what becomes of a level in the file."""
    family.write(level="debug")
    return await family.reload(False)


async def test_a_reload_is_applied_and_reported_for_all_processes(make: Make) -> None:
    family = make("well", "well")

    report = await applied(family)

    assert report.status == "applied"
    assert [(one.name, one.result) for one in report.processes] == [
        ("supervisor", "applied"), ("p0", "applied"), ("p1", "applied")
    ]  # fmt: skip
    assert family.levels() == ["debug", "debug"]
    assert (await family.reload(False)).status == "unchanged"


async def test_a_dry_run_prepares_and_applies_nothing(make: Make) -> None:
    family = make("well")
    family.write(level="debug")

    report = await family.reload(True)

    assert (report.status, [change.key for change in report.changes]) == ("checked", ["log.level"])
    assert family.levels() == ["info"]
    assert family.children[0].asked == ["prepare"]


async def test_changes_that_need_a_restart_are_refused_before_asking_children(make: Make) -> None:
    family = make("well")
    family.write(retries=7, level="debug")

    report = await family.reload(False)

    assert report.status == "refused"
    assert report.message == "nothing was applied, since these need a restart: client.retries"
    assert family.children[0].asked == []


@pytest.mark.parametrize(
    ("how", "says"),
    [("starting", "p1: it is starting: ask again later"), ("silent", "p1: no answer within 10 s")],
)
async def test_while_one_cannot_prepare_none_applies(make: Make, how: str, says: str) -> None:
    family = make("well", how)

    report = await applied(family)

    assert (report.status, report.message) == ("busy", f"nothing was applied: {says}")
    assert family.levels() == ["info", "info"]
    assert not any(child.restarted for child in family.children)


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_child_that_fails_to_apply_is_restarted(make: Make, how: str) -> None:
    family = make("well", how)

    report = await applied(family)

    assert report.status == "failed"
    assert report.message.startswith("started again, on the new settings: p1: ")
    assert [one.result for one in report.processes] == ["applied", "applied", "restarting"]
    assert [child.restarted for child in family.children] == [False, True]
    assert family.reloader.loaded.settings.log.level == "debug"


@pytest.mark.parametrize("how", ["absent", "dies"])
async def test_an_absent_child_starts_with_the_new_settings(make: Make, how: str) -> None:
    family = make("well", how)

    report = await applied(family)

    assert report.status == "applied"
    assert report.processes[-1].result == "absent"
    assert not any(child.restarted for child in family.children)


async def test_a_file_that_changes_while_it_is_read_is_not_applied(make: Make) -> None:
    family = make("well")
    family.write(level="debug")
    child = family.children[0]
    before = child.half.answer

    async def late(body: Any) -> Any:
        family.write(level="error")
        return await before(body)

    child.half.answer = late  # type: ignore[method-assign]

    report = await family.reload(False)

    assert (report.status, family.levels()) == ("busy", ["info"])
    assert "the settings changed while they were read" in report.message


async def test_a_child_that_already_has_the_new_settings_has_nothing_to_do(make: Make) -> None:
    family = make("well")
    family.write(level="debug")
    family.children.append(Process("late", family, "well"))

    report = await family.reload(False)

    assert [one.result for one in report.processes] == ["applied", "applied", "unchanged"]


async def test_a_frontend_that_is_asked_gets_the_whole_report_from_the_supervisor(make: Make) -> None:
    family = make("well", "well")
    family.write(level="debug")

    class Line:
        async def ask(self, body: Any, timeout: float) -> Any:
            return await answer_reloads(family.reload, body)

    report = await ChildReload(family.children[0].reloader, Line())(False)

    assert (report.status, len(report.processes), report.changes[0].key) == ("applied", 3, "log.level")


async def test_a_silent_supervisor_is_reported(make: Make) -> None:
    class Line:
        async def ask(self, body: Any, timeout: float) -> Any:
            raise ResponseTimeout("no answer within 30 s")

    report = await ChildReload(make("well").children[0].reloader, Line())(True)

    assert (report.status, report.message) == ("busy", "the supervisor does not answer: no answer within 30 s")


async def test_a_plan_is_applied_once_and_not_after_another_was_prepared(make: Make) -> None:
    family = make("well")
    half = family.children[0].half
    family.write(level="debug")
    fingerprint = family.loaded.again().fingerprint()

    assert (await half.answer({"what": "prepare", "fingerprint": "other"}))["status"] == "busy"
    assert (await half.answer({"what": "apply"}))["status"] == "failed"
    assert (await half.answer({"what": "prepare", "fingerprint": fingerprint}))["status"] == "busy"
    assert family.levels() == ["info"]


_HOWS = st.lists(st.sampled_from(["well", "fails", "starting", "silent", "hangs", "dies", "absent"]), max_size=5)


@given(hows=_HOWS, level=st.sampled_from(["info", "debug", "loud"]), dry_run=st.booleans())
def test_either_nothing_changes_or_every_process_is_on_the_new_settings_or_started_again(
    tmp_path_factory: pytest.TempPathFactory, hows: list[str], level: str, dry_run: bool
) -> None:
    async def check() -> None:
        family = Family(tmp_path_factory.mktemp("family"), *hows)
        family.write(level=level)
        report = await family.reload(dry_run)
        in_force = family.reloader.loaded.settings.log.level == "debug"

        assert in_force is (report.status in ("applied", "failed"))
        assert not (dry_run and in_force)
        for child in family.running():
            assert child.restarted is (in_force and child.how in ("fails", "hangs"))
            if not child.restarted and child.how != "dies":
                assert (child.part.level == "debug") is in_force
        await family.reload.aclose()

    asyncio.run(check())


async def test_steps_that_were_taken_are_taken_back_last_first_when_a_later_one_fails(make: Make) -> None:
    family = make()
    taken: list[str] = []

    def step(name: str, fails: bool = False) -> Step:
        def apply() -> None:
            taken.append(name)
            if fails:
                raise ValueError("no")

        return Step(name, apply, lambda: taken.append(f"-{name}"))

    plan = Plan(family.loaded, family.loaded.again(), [], steps=[step("a"), step("b"), step("c", True), step("d")])

    with pytest.raises(DynamoError, match="c cannot take its new settings: no"):
        await family.reloader.apply(plan)

    assert taken == ["a", "b", "c", "-c", "-b", "-a"]
    assert family.reloader.loaded is family.loaded
