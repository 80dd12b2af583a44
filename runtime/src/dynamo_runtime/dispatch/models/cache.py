"""A disk cache of model files, so that a restarted frontend does not fetch them again.

A file is named by its SHA-256 and believed only if its content has it: who changes the cache gains nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from dynamo_core.protocol.records import ModelFile

log = logging.getLogger(__name__)

#: Bytes that all files together may take; those not used for longest are removed beyond it.
LIMIT = 4 * 1024**3
#: Seconds after which a file that was never finished is removed.
ABANDONED = 3600.0

#: The setting that turns the cache off.
NO_CACHE = ""

_PART = ".part-"


class ModelCache:
    """A folder of files named by their SHA-256, shared by the processes of one user.

    It never fails: what cannot be read is a miss, what cannot be written is not kept, with one warning. All methods
    block on the disk; call them in a thread.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT) -> None:
        self._folder = folder
        self._limit = limit
        self._warned = False

    @classmethod
    def from_setting(cls, setting: str | None) -> ModelCache | None:
        """Return the cache that ``client.model_cache`` names: None is the user's own cache folder, "" is no cache."""
        if setting == NO_CACHE:
            return None
        if setting is not None:
            return cls(Path(setting).expanduser())
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The specification of these folders says that a relative path is to be ignored.
        caches = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
        return cls(caches / "dynamo-core" / "model-files")

    def get(self, file: ModelFile) -> bytes | None:
        """Return the content of a file; None if it is not here, or of another size. A damaged one is removed.

        What is damaged its checksum decides: a card that lies about the size must not cost others the file.

        `file.sha256` must have been checked to be 64 hexadecimal digits: it is used as a name.
        """
        path = self._folder / file.sha256
        try:
            sound, data = self._read(path, file)
            if data is not None:
                # The time says when it was used last.
                os.utime(path)
            if sound:
                return data
            log.warning("cached model file %s is damaged and is fetched again", path)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
        return None

    def put(self, file: ModelFile, data: bytes) -> None:
        """Keep the content of a file, which must have been checked, and remove the oldest beyond the limit."""
        if len(data) > self._limit:
            return
        part = self._folder / f"{_PART}{secrets.token_hex(12)}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(part, data)
            os.replace(part, self._folder / file.sha256)
            self._trim()
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._warn(error)

    def _read(self, path: Path, wanted: ModelFile) -> tuple[bool, bytes | None]:
        """Return whether a file has the content that its name says.

        And the content, if it has the size that is wanted.
        """
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            # Looked at before anything is read: no more is ever kept.
            if not stat.S_ISREG(status.st_mode) or status.st_size > self._limit:
                return False, None
            if status.st_size != wanted.size:
                # Read bit by bit, as it is not asked for.
                return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256, None
            data = file.read(wanted.size)
        sound = hashlib.sha256(data).hexdigest() == wanted.sha256
        return sound, data if sound else None

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)

    def _trim(self) -> None:
        kept: list[tuple[float, int, str]] = []
        newest = 0.0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    kept.append((status.st_mtime, status.st_size, entry.path))
                    newest = max(newest, status.st_mtime)
        kept.sort(reverse=True)
        total = 0
        for modified, size, path in kept:
            abandoned = os.path.basename(path).startswith(_PART) and newest - modified > ABANDONED
            total += size
            if total > self._limit or abandoned:
                total -= size
                with suppress(OSError):
                    os.unlink(path)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the cache of model files in %s is not used: %s", self._folder, error)
