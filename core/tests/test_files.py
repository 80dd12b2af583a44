"""Files that settings name are read within bounds: no path fills the memory, and none holds the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from dynamo_core import files
from dynamo_core.contracts.model_folder import load_folder, load_template
from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file
from dynamo_core.plugin_files import read_trusted
from dynamo_runtime.settings import load_settings


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def write_until_it_breaks(path: Path) -> threading.Thread:
    def write() -> None:
        with path.open("wb", 0) as end:
            try:
                while True:
                    end.write(bytes(65536))
            except BrokenPipeError:
                return

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_pipe_is_read_to_its_end(pipe: Path) -> None:
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"secret" * 50_000))
    writer.start()

    assert read_file(pipe).data == b"secret" * 50_000

    writer.join()


def test_a_pipe_that_never_ends_is_left_at_the_limit(pipe: Path) -> None:
    writer = write_until_it_breaks(pipe)

    with pytest.raises(OSError, match="it has more than 1 MiB"):
        read_file(pipe, 2**20)

    writer.join()


def test_a_silent_pipe_times_out(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIPE_TIMEOUT", 0.05)

    with pytest.raises(TimeoutError, match="did not end within"):
        read_file(pipe)


def test_a_file_has_at_most_as_many_bytes_as_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))

    assert len(read_file(path, 100).data) == 100
    with pytest.raises(OSError, match="it has more than"):
        read_file(path, 99)


def _secret(path: Path) -> object:
    return load_settings(env={}, sets=[f"admin.token=${{file:{path}}}"])


def _config(path: Path) -> object:
    return load_settings(path, env={})


def _model(path: Path) -> object:
    folder = path.parent / "model"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(path)
    return load_folder(folder)


READERS = [_secret, _config, _model, load_template, read_trusted]


@pytest.mark.parametrize("read", READERS)
def test_a_device_that_never_ends_is_refused_with_the_reason(read: Callable[[Path], object], tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")

    with pytest.raises(ConfigError, match="it is no regular file"):
        read(endless)


def test_the_digest_of_a_certificate_leaves_out_a_device(tmp_path: Path) -> None:
    endless = tmp_path / "endless.pem"
    endless.symlink_to("/dev/zero")

    loaded = load_settings(env={}, sets=[f"frontend.tls.cert={endless}"])

    assert loaded.certificates["frontend.tls.cert"] == ""
