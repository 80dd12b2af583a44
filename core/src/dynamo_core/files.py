"""Files that settings name: read within bounds, so that no path can fill the memory or hold a process for ever."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path
from typing import NamedTuple

#: Seconds for all of what is written into a pipe, such as ``<(command)`` of a shell.
PIPE_TIMEOUT = 5.0
#: Bytes of a file that holds a secret, and of one that people or their programs write.
SECRET = 1024 * 1024
TEXT = 16 * 1024 * 1024
_PIECE = 1024 * 1024


class FileContent(NamedTuple):
    """The content of a file, and its status while it was open."""

    data: bytes
    status: os.stat_result


def read_file(path: str | Path, limit: int = TEXT, *, pipe: bool = True) -> FileContent:
    """Return the content of a regular file, or of a pipe where `pipe` allows one.

    Raises:
        OSError: it cannot be read, is another kind of file, has more than `limit` bytes, or is a pipe that does not end
            in time; `strerror` is the reason.
    """
    deadline = time.monotonic() + PIPE_TIMEOUT
    # A pipe that nothing is written to would hold even the opening.
    with open(path, "rb", 0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) and not (pipe and stat.S_ISFIFO(status.st_mode)):
            raise OSError(errno.EINVAL, f"it is no regular file{' and no pipe' if pipe else ''}")
        poll = select.poll()
        poll.register(file, select.POLLIN)
        data = bytearray()
        while len(data) <= limit:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise OSError(errno.ETIMEDOUT, f"the pipe did not end within {PIPE_TIMEOUT:g} s")
            piece = file.read(min(_PIECE, limit + 1 - len(data)))
            if not piece:
                return FileContent(bytes(data), status)
            data += piece
    raise OSError(errno.EFBIG, f"it has more than {limit / 2**20:g} MiB")
