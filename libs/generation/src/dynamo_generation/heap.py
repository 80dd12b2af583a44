"""Return of freed heap memory to the system after large requests.

Python and the tokenizers free it, and the C library keeps it: up to a gigabyte, for good. It is asked for what it keeps
when the process has become larger. Of this only the C library of GNU needs it; with any other nothing is done.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource

log = logging.getLogger(__name__)

#: Seconds between two looks at the size of the process, and after looks that changed little, at the most.
PAUSE, LONGEST_PAUSE = 3.0, 60.0
#: Bytes by which the process must have grown for its heap to be looked through, which takes milliseconds.
GROWN = 32 << 20
#: Bytes that give back little.
_LITTLE = 8 << 20
#: Pieces of memory of so many bytes are given back as soon as they are free, and so is as much at the end of a heap.
#: By default the C library raises its own bound to 32 MB.
_AT_ONCE = 1 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: With one of these an operator has set the bounds.
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def resident() -> int:
    """Return the bytes of memory that the process has now; 0 where that cannot be told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def trim() -> bool:
    """Have the C library give back what it keeps, and return whether it is one that can. Takes milliseconds."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return False
    return True


def return_memory_at_once() -> None:
    """Have the C library keep no large pieces of memory from now on."""
    if any(name in os.environ for name in _VARIABLES):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for which in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        mallopt(which, _AT_ONCE)


async def trim_after_growth() -> None:
    """Give memory back whenever the process has grown; goes on until it is cancelled, or cannot."""
    if not await asyncio.to_thread(trim):
        return
    return_memory_at_once()
    least, pause = resident(), PAUSE
    while least:
        await asyncio.sleep(pause)
        size = resident()
        least = min(least, size)
        if size < least + GROWN:
            pause = PAUSE
            continue
        await asyncio.to_thread(trim)
        now = resident()
        log.debug("%d MB of memory given back", (size - now) >> 20)
        # What is left may well be in use: it is looked for again, but ever more seldom.
        pause = PAUSE if size - now > _LITTLE else min(2 * pause, LONGEST_PAUSE)
