"""Whose folder is used, what is followed, and what happens when the disk is full."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_discovery_file.discovery import FileConfig, FileDiscovery
from dynamo_plugin_discovery_file.folder import LEASES, RECORDS
from pydantic import ValidationError

Make = Callable[..., FileDiscovery]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a folder to somebody else")


async def test_the_folder_is_made_for_this_user_alone(make: Make, tmp_path: Path) -> None:
    discovery = make(path=str(tmp_path / "run" / "discovery"))

    await discovery.start()

    assert (tmp_path / "run" / "discovery").stat().st_mode & 0o777 == 0o700


def test_without_a_path_the_folder_is_below_the_hosts_temp_folder_and_per_user() -> None:
    from dynamo_telemetry import Metrics

    discovery = FileDiscovery(FileConfig(), Metrics())

    assert discovery.path == Path(tempfile.gettempdir()) / f"dynamo-discovery-{os.geteuid()}"


@as_root
async def test_a_folder_of_another_user_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "discovery").mkdir(mode=0o700)
    os.chown(tmp_path / "discovery", 12345, 12345)

    with pytest.raises(ConfigError, match=r"^discovery\.path: .* belongs to user 12345, .* use a folder of your own$"):
        await make().start()


@as_root
async def test_a_folder_that_is_given_away_while_running_is_not_read_any_more(host: Any) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")
    host.run(1)

    os.chown(host.path, 12345, 12345)
    (host.path / RECORDS / "a").unlink()
    host.run(2)

    assert view.records == {"a": b"1"}
    assert view.scanner.stale


async def test_a_folder_that_others_may_write_to_is_refused_with_the_remedy(make: Make, tmp_path: Path) -> None:
    (tmp_path / "discovery").mkdir()
    (tmp_path / "discovery").chmod(0o777)

    with pytest.raises(ConfigError, match=r"chmod go-w"):
        await make().start()


async def test_a_symbolic_link_is_not_followed_to_the_folder(make: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "discovery").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="symbolic link"):
        await make().start()
    assert not list((tmp_path / "elsewhere").iterdir())


async def test_a_file_in_the_folders_place_is_refused(make: Make, tmp_path: Path) -> None:
    discovery = make()
    (tmp_path / "discovery").write_text("")

    with pytest.raises(ConfigError, match=r"^discovery\.path: .*/discovery cannot be used: "):
        await discovery.start()


@pytest.mark.parametrize(
    ("below", "says"),
    [((), "is no folder"), (("deep", "discovery"), "cannot be made: {file} is no folder")],
)
def test_a_path_that_can_be_no_folder_is_found_before_the_start(
    tmp_path: Path, below: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    path = file.joinpath(*below)

    with pytest.raises(ValidationError) as caught:
        FileConfig(path=str(path))

    assert f"{path} {says.format(file=file)}" in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_is_not_there_yet_is_not_made_by_looking(tmp_path: Path) -> None:
    FileConfig(path=str(tmp_path / "run" / "discovery"))

    assert list(tmp_path.iterdir()) == []


async def test_a_folder_of_another_layout_is_refused_by_name(make: Make, tmp_path: Path) -> None:
    await make().start()
    (tmp_path / "discovery" / "format").write_text("dynamo-discovery 9\nabc\n")

    with pytest.raises(ConfigError, match="'dynamo-discovery 9', this release reads 'dynamo-discovery 1'"):
        await make().start()


async def test_links_and_pipes_in_the_folder_are_neither_followed_nor_waited_for(host: Any, tmp_path: Path) -> None:
    lease = host.lease()
    await lease.put("good", b"1")
    host.put_value("link", b"read through a link")
    secret = (host.path / RECORDS / "link").rename(tmp_path / "secret")
    (host.path / RECORDS / "link").symlink_to(secret)
    os.mkfifo(host.path / RECORDS / "pipe")
    await lease.put("mine", b"2")
    (host.path / RECORDS / "mine").unlink()
    (host.path / RECORDS / "mine").symlink_to(secret)
    before = secret.read_bytes()

    view = host.view()
    view.poll()
    assert view.records == {"good": b"1"}
    host.run(2)

    assert view.records == {"good": b"1", "mine": b"2"}
    assert secret.read_bytes() == before


def test_a_file_that_has_just_been_replaced_is_not_removed_in_the_place_of_the_old(host: Any) -> None:
    with host.folder().open() as place:
        old = place.write("records/a", b"old")
        new = place.write("records/a", b"new")

        assert not place.remove_if("records/a", old)
        assert place.read("records/a", 10) == (new, b"new")
        assert place.remove_if("records/a", new)
        assert not place.remove_if("records/a", new)
    assert not list((host.path / "tmp").iterdir())


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"ttl": 0}, "ttl"),
        ({"poll": 0}, "poll"),
        ({"poll": 2}, "poll"),
        ({"heartbeat": 2}, "heartbeat"),
        ({"paht": "x"}, "paht"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        FileConfig.model_validate(settings)


async def test_on_a_full_disk_a_put_fails_clearly_and_heartbeats_go_on(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, lease = host.view(), host.lease()
    await lease.put("a", b"1")

    def full(handle: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for key in ("a", "b"):
            with pytest.raises(CannotConnect, match=r"cannot be written: No space left on device"):
                await lease.put(key, b"2")
        host.run(10)
    assert view.records == {"a": b"1"}
    assert [re.fullmatch(r"[0-9a-f]{16}", path.name) is not None for path in (host.path / LEASES).iterdir()] == [True]
    assert not list((host.path / "tmp").iterdir())

    await lease.put("b", b"2")
    host.run(1)
    assert view.records == {"a": b"1", "b": b"2"}
