"""Names the line of an engine that holds the event loop: `time.sleep`, a library that waits, a long computation.

While it does, every other request of the process stands still, and nothing inside the loop can tell.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from types import FrameType
from typing import Final, TypeAlias

from dynamo_core.contracts.boundary import EngineFiles, location
from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.resources import AsyncResource

log = logging.getLogger(__name__)

#: Seconds between two looks at what the loop's thread is doing.
LOOK = 0.1
#: So many looks in a row are judged together, and so many of them must have found the same line. Looks are counted, not
#: seconds: a process that was suspended is not blocked.
LOOKS = 10
SAME = 8
#: The most lines that are told of.
MOST = 32

#: The line of the engine, and the innermost line below it: a library that works on and on is not blocked.
Place: TypeAlias = tuple[str, int, str, str, int]


class BlockingWatch(AsyncResource):
    """A thread that looks at the event loop's now and then. Each line of the engine is warned of once.

    A single long wait is seen as well as a short one that comes again and again. Made and closed in the loop's thread.
    """

    def __init__(self, engine: LLMEngine, worker: str, *, look: float = LOOK) -> None:
        self._name = engine.NAME
        self._worker = worker
        self._files: Final = EngineFiles(engine)
        self._look = look
        self._watched = threading.get_ident()
        self._over = threading.Event()
        self._seen: deque[Place | None] = deque(maxlen=LOOKS)
        self._told: set[Place] = set()
        self._thread = threading.Thread(target=self._run, name="blocking watch", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    async def aclose(self) -> None:
        """Ends it. Safe twice, and without `start`."""
        self._over.set()

    # In the thread.

    def _run(self) -> None:
        while not self._over.wait(self._look):
            place = self._place()
            self._seen.append(place)
            if place is not None and self._seen.count(place) >= SAME:
                self._tell(place)

    def _place(self) -> Place | None:
        frame = sys._current_frames().get(self._watched)
        mine: FrameType | None = self._files.innermost(frame)
        if mine is None or frame is None:
            return None
        code = mine.f_code
        return code.co_filename, mine.f_lineno, code.co_name, frame.f_code.co_filename, frame.f_lineno

    def _tell(self, place: Place) -> None:
        if place in self._told or len(self._told) >= MOST:
            return
        self._told.add(place)
        file, line, function, *_ = place
        log.warning(
            "engine %s of worker %s blocks the event loop in %s%s: all requests of the process wait meanwhile; "
            "use `await asyncio.sleep(...)`, or give what takes long to a thread: `await asyncio.to_thread(...)`",
            self._name,
            self._worker,
            function,
            location(file, line),
        )
