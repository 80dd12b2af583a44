"""Files of models on disk: believed only if their content is right, bounded, and never in the way."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from dynamo_core.protocol.records import ModelFile
from dynamo_runtime.dispatch.models.cache import ModelCache


def described(data: bytes) -> ModelFile:
    return ModelFile("tokenizer.json", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_cached_files_are_found_by_digest(folder: Path) -> None:
    ModelCache(folder).put(described(b"{}"), b"{}")

    again = ModelCache(folder)

    assert again.get(ModelFile("other.json", 2, described(b"{}").sha256)) == b"{}"
    assert again.get(described(b"[]")) is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", [b"", b"[]", b"{} and more"])
def test_a_damaged_file_is_a_miss_and_is_removed(
    folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache, file = ModelCache(folder), described(b"{}")
    cache.put(file, b"{}")
    (folder / file.sha256).write_bytes(content)

    assert cache.get(file) is None

    assert not (folder / file.sha256).exists()
    assert "damaged" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 99, 100_000])
def test_a_wrong_size_in_a_card_does_not_remove_the_cached_file(
    folder: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache, file = ModelCache(folder), described(b"{}")
    cache.put(file, b"{}")

    assert cache.get(ModelFile("tokenizer.json", size, file.sha256)) is None

    assert cache.get(file) == b"{}"
    assert "damaged" not in caplog.text


def test_a_file_that_is_larger_than_the_whole_cache_is_removed_without_being_read(folder: Path) -> None:
    cache, file = ModelCache(folder, limit=10), described(b"{}")
    cache.put(file, b"{}")
    os.truncate(folder / file.sha256, 2**40)

    assert cache.get(file) is None

    assert not (folder / file.sha256).exists()


def test_a_link_in_the_cache_is_not_followed(folder: Path, tmp_path: Path) -> None:
    cache, file = ModelCache(folder), described(b"{}")
    (tmp_path / "secret").write_bytes(b"{}")
    folder.mkdir()
    (folder / file.sha256).symlink_to(tmp_path / "secret")

    assert cache.get(file) is None
    cache.put(file, b"{}")

    assert cache.get(file) == b"{}"
    assert not (folder / file.sha256).is_symlink()


def test_beyond_the_limit_the_file_not_used_for_longest_goes(folder: Path) -> None:
    cache = ModelCache(folder, limit=250)
    contents = [bytes([number]) * 100 for number in range(3)]
    for age, data in ((300, contents[0]), (200, contents[1])):
        cache.put(described(data), data)
        os.utime(folder / described(data).sha256, (1e9 - age, 1e9 - age))
    cache.get(described(contents[0]))

    cache.put(described(contents[2]), contents[2])

    assert [cache.get(described(data)) is not None for data in contents] == [True, False, True]


def test_a_file_larger_than_the_whole_cache_is_not_kept(folder: Path) -> None:
    cache = ModelCache(folder, limit=10)
    cache.put(described(b"{}"), b"{}")

    cache.put(described(b"x" * 11), b"x" * 11)

    assert [path.name for path in folder.iterdir()] == [described(b"{}").sha256]


def test_a_file_that_was_never_finished_is_removed_after_a_while(folder: Path) -> None:
    folder.mkdir()
    for name, age in ((".part-old", 10_000), (".part-new", 0)):
        (folder / name).write_bytes(b"x")
        status = folder.stat()
        os.utime(folder / name, (status.st_mtime - age, status.st_mtime - age))

    ModelCache(folder).put(described(b"{}"), b"{}")

    assert sorted(path.name for path in folder.iterdir()) == sorted([".part-new", described(b"{}").sha256])


def test_a_disk_that_is_full_is_no_error_and_leaves_no_part_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ModelCache(folder)

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        cache.put(described(b"{}"), b"{}")
        cache.put(described(b"[]"), b"[]")

    assert list(folder.iterdir()) == []
    assert caplog.text.count("is not used: ") == 1


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = ModelCache(tmp_path / "file" / "cache")

    cache.put(described(b"{}"), b"{}")

    assert cache.get(described(b"{}")) is None
    assert caplog.text.count("is not used: ") == 1


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (None, "{tmp}/xdg", "{tmp}/xdg/dynamo-core/model-files"),
        (None, "relative", "{tmp}/home/.cache/dynamo-core/model-files"),
        (None, "", "{tmp}/home/.cache/dynamo-core/model-files"),
        ("{tmp}/mine", "{tmp}/xdg", "{tmp}/mine"),
    ],
)
def test_the_setting_names_the_folder_or_the_users_own_is_taken(
    setting: str | None, environment: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", environment.format(tmp=tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    cache = ModelCache.from_setting(setting and setting.format(tmp=tmp_path))

    assert cache is not None
    cache.put(described(b"{}"), b"{}")
    assert (Path(expected.format(tmp=tmp_path)) / described(b"{}").sha256).read_bytes() == b"{}"


def test_an_empty_setting_means_no_cache() -> None:
    assert ModelCache.from_setting("") is None
