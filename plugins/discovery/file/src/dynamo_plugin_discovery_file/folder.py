"""The folder on disk: its owner and permissions, and the few safe ways to read and change it.

::

    <path>/format           which layout this is, and a random word: another word means another folder
    <path>/records/<key>    one file per record
    <path>/leases/<id>      one file per lease; its modification time is the heartbeat
    <path>/tmp/             files that are being written

Only files below a directory that belongs to this user and that no other user can write to are read, and no symbolic
link is followed. A file gets its name once it is complete, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from dynamo_plugin_discovery_file.clock import Clock

RECORDS = "records"
LEASES = "leases"
TMP = "tmp"
FORMAT = "format"

_LAYOUT = "dynamo-discovery 1"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: Nanoseconds of noise in file times, so that two files made in one tick of a coarse clock differ.
_NOISE_BITS = 20


class UnsafeFolder(OSError):
    """The folder's content cannot be trusted. The message has the reason and the remedy."""


class Signature(NamedTuple):
    """Tells one state of a file from any other."""

    inode: int
    #: Nanoseconds.
    modified: int
    size: int


class Folder:
    """A folder shared by the processes of one user on one host. Safe to use from several threads."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._last_time = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the folder and whatever of it is missing.

        Raises:
            OSError: it cannot be made; `UnsafeFolder` if something is there that must not be used.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = self._enter()
        try:
            for name in (RECORDS, LEASES, TMP):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=root)
            place = Place(self, root)
            if place.signature(FORMAT) is None:
                place.write(FORMAT, f"{_LAYOUT}\n{secrets.token_hex(8)}\n".encode(), exclusive=True)
            self._check_layout(place)
        finally:
            os.close(root)

    @contextmanager
    def open(self) -> Iterator[Place]:
        """Yield the folder as it is now.

        Raises:
            OSError: it, or a part of it, is missing, cannot be read, or must not be used (`UnsafeFolder`).
        """
        root = self._enter()
        try:
            yield Place(self, root)
        finally:
            os.close(root)

    def new_time(self) -> int:
        """Return a modification time, in nanoseconds, that this process has not given to any file yet."""
        with self._lock:
            self._last_time = max(self._clock.wall() + secrets.randbits(_NOISE_BITS), self._last_time + 1)
            return self._last_time

    def _enter(self) -> int:
        try:
            root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if self.path.is_symlink():
                raise UnsafeFolder(f"{self.path} is a symbolic link; name the folder it points to") from error
            raise
        try:
            status = os.fstat(root)
            if status.st_uid != os.geteuid():
                raise UnsafeFolder(
                    f"{self.path} belongs to user {status.st_uid}, this process runs as {os.geteuid()};"
                    " use a folder of your own"
                )
            if status.st_mode & _OTHERS_MAY_WRITE:
                raise UnsafeFolder(f"other users may write to {self.path}; take that away: chmod go-w {self.path}")
        except BaseException:
            os.close(root)
            raise
        return root

    def _check_layout(self, place: Place) -> None:
        layout = place.read(FORMAT, 256)[1].decode("ascii", "replace").partition("\n")[0]
        if layout != _LAYOUT:
            raise UnsafeFolder(f"{self.path} holds {layout[:40]!r}, this release reads {_LAYOUT!r}; use another folder")


class Place:
    """An open folder. Names are relative to it: ``records/…``, ``leases/…``. All methods raise OSError."""

    def __init__(self, folder: Folder, root: int) -> None:
        self._folder = folder
        self._root = root

    def signature(self, name: str) -> Signature | None:
        """Return the state of a file; None if there is none. A directory's `modified` changes with its entries."""
        try:
            return _signature(os.stat(name, dir_fd=self._root, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def require(self, name: str) -> Signature:
        """Return the signature like `signature`, but a missing file is an error."""
        return _signature(os.stat(name, dir_fd=self._root, follow_symlinks=False))

    def listing(self, area: str, *, thorough: bool = True) -> Iterator[tuple[str, int, Signature | None]]:
        """Name (within the area), inode and state of every file of an area; no state unless `thorough`, as it is dear.

        A file that is put in the place of another has another inode, though one that has been used before may come
        back after two such changes.
        """
        handle = os.open(area, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        try:
            with os.scandir(handle) as entries:
                for entry in entries:
                    if not thorough:
                        yield entry.name, entry.inode(), None
                        continue
                    # It may be gone by now.
                    with suppress(FileNotFoundError):
                        yield entry.name, entry.inode(), _signature(entry.stat(follow_symlinks=False))
        finally:
            os.close(handle)

    def read(self, name: str, limit: int) -> tuple[Signature, bytes]:
        """Return state and content of a plain file, of which at most `limit` + 1 bytes are read."""
        # Without O_NONBLOCK a named pipe would hold the reader for ever.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(name, flags, dir_fd=self._root)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", name)
            data = bytearray()
            while len(data) <= limit and (piece := os.read(handle, limit + 1 - len(data))):
                data += piece
            return _signature(status), bytes(data)
        finally:
            os.close(handle)

    def write(self, name: str, data: bytes, *, exclusive: bool = False) -> Signature:
        """Put a complete file in the place of what was there; if `exclusive`, a file that is there stays.

        Return the state of the file that was written, also if it gave way.
        """
        temporary = f"{TMP}/{secrets.token_hex(12)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(temporary, flags, 0o600, dir_fd=self._root)
        try:
            try:
                _write_all(handle, data)
                time = self._folder.new_time()
                os.utime(handle, ns=(time, time))
                written = _signature(os.fstat(handle))
            finally:
                os.close(handle)
            if exclusive:
                with suppress(FileExistsError):
                    os.link(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
                self.remove(temporary)
            else:
                os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._root)
            raise
        return written

    def touch(self, name: str) -> None:
        """Give a file a new modification time. Needs no room on the disk."""
        time = self._folder.new_time()
        os.utime(name, ns=(time, time), dir_fd=self._root, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is fine."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._root)

    def remove_if(self, name: str, state: Signature) -> bool:
        """Remove a file if it still is in that state; whether it did.

        Between a look and a removal another process may put a new file there. So the file is taken aside first; if it
        turns out to be another one, it is put back, unless a still newer one has come.
        """
        aside = f"{TMP}/{secrets.token_hex(12)}"
        try:
            os.rename(name, aside, src_dir_fd=self._root, dst_dir_fd=self._root)
        except FileNotFoundError:
            return False
        same = self.signature(aside) == state
        if not same:
            with suppress(FileExistsError):
                os.link(aside, name, src_dir_fd=self._root, dst_dir_fd=self._root, follow_symlinks=False)
        self.remove(aside)
        return same


def _signature(status: os.stat_result) -> Signature:
    return Signature(status.st_ino, status.st_mtime_ns, status.st_size)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
