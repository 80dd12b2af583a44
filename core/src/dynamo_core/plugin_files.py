"""Plugins of one file: how a config file names them, and which files are trusted.

``use: ./sticky.py:StickyRouter`` is code that runs with all the rights of the process. So only the text of the config
file can name one. A variable, ``--set``, a flag or a record of another process cannot. Config file and plugin may be
written by their owner alone.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from dynamo_core.errors import ConfigError
from dynamo_core.files import read_file

_NAME = re.compile(r"(?P<file>.*[^/]\.py)(:(?P<class_name>[A-Za-z_]\w*))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileName:
    """A name that stands for a file: ``./sticky.py:StickyRouter``, or ``./ledger.py`` for one that only listens."""

    file: str
    class_name: str = ""

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """Return the parts of the name; None if it is the name of an installed plugin."""
        match = _NAME.fullmatch(name)
        return None if match is None else cls(match["file"], match["class_name"] or "")


@dataclass(frozen=True, slots=True)
class PluginFiles:
    """The names of files that may be loaded as plugins. Their paths are relative to `folder`.

    `config` is the config file that holds the names, and `status` says who owned it when it was read; None where names
    come from a command of the operator.
    """

    names: frozenset[str] = frozenset()
    folder: Path = Path()
    config: Path | None = None
    status: os.stat_result | None = None

    def locate(self, name: str) -> Path:
        """Return the absolute path of the file that a name stands for.

        Raises:
            ConfigError: the config file does not hold the name, or others than its owner may write to it.
        """
        if name not in self.names:
            raise ConfigError(
                "a plugin of one file is loaded only if the text of this process's own config file names it: write "
                "the name there, not into a variable, --set or a flag"
            )
        fault = None if self.status is None else foreign_fault(self.status)
        if fault is not None:
            raise ConfigError(f"{self.config}: a config file that names a plugin of one file {fault}")
        parsed = FileName.parse(name)
        assert parsed is not None  # noqa: S101 - `names` holds nothing else
        return (self.folder / Path(parsed.file).expanduser()).absolute()


NO_FILES = PluginFiles()


def names_in(value: object) -> frozenset[str]:
    """Return every text in a tree of mappings and lists that is the name of a file."""
    if isinstance(value, dict):
        return frozenset().union(*map(names_in, value.values()))
    if isinstance(value, list):
        return frozenset().union(*map(names_in, value))
    return frozenset({value} if isinstance(value, str) and FileName.parse(value) is not None else ())


def read_trusted(path: Path) -> bytes:
    """Return what a plugin's file holds. The file that is checked is the one that is read.

    Raises:
        ConfigError: it cannot be read, or others than its owner may write to it.
    """
    try:
        data, status = read_file(path, pipe=False)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    fault = foreign_fault(status)
    if fault is not None:
        raise ConfigError(f"a plugin of one file {fault}")
    return data


def foreign_fault(status: os.stat_result) -> str | None:
    """Return why another user could have written a file, and the remedy; None if none could."""
    user = os.geteuid()
    if status.st_uid not in (0, user):
        return (
            f"must belong to root or to the user of the process, which is {user}, but it belongs to user "
            f"{status.st_uid}: change its owner"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return f"may be written by its owner alone, but its mode is {mode:04o}: chmod go-w"
    return None
