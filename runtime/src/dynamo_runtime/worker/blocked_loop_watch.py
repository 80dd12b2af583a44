"""Detection of the engine line that blocks the event loop: `time.sleep`, a waiting library, a long computation.

While it does, every other request of the process stands still, and nothing inside the loop can tell.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain
from types import FrameType
from typing import ClassVar, Final, TypeAlias

from dynamo_core.contracts.engine import LLMEngine
from dynamo_core.contracts.engine_boundary import EngineFiles, engine_name, location
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
    """Has a thread look at the event loop's now and then. Each line of the engine is warned of once.

    A single long wait is seen as well as a short one that comes again and again. Made and closed in the loop's thread.
    All watches of a loop share the thread, and engines that consist of the same files share a look: a thousand of them
    cost what one does.
    """

    def __init__(self, engine: LLMEngine, worker: str, *, look: float = LOOK) -> None:
        self.worker = worker
        self.files: Final = EngineFiles(engine)
        self._name = engine_name(engine)
        self._look = look
        self._seen: deque[Place | None] = deque(maxlen=LOOKS)
        self._told: set[Place] = set()
        self._looker: _Looker | None = None

    def start(self) -> None:
        """Begin to look."""
        self._looker = _Looker.of_this_thread(self._look)
        self._looker.add(self)

    async def aclose(self) -> None:
        """End it. Safe twice, and without `start`."""
        looker, self._looker = self._looker, None
        if looker is not None:
            looker.remove(self)

    # In the thread.

    def judge(self, frame: FrameType | None, workers: Collection[str]) -> None:
        """Judge one look: `frame` is the loop's innermost. `workers` are those whose engine it may be."""
        place = self._place(frame)
        self._seen.append(place)
        if place is not None and self._seen.count(place) >= SAME:
            self._warn_of(place, workers)

    def _place(self, frame: FrameType | None) -> Place | None:
        mine: FrameType | None = self.files.innermost(frame)
        if mine is None or frame is None:
            return None
        code = mine.f_code
        return code.co_filename, mine.f_lineno, code.co_name, frame.f_code.co_filename, frame.f_lineno

    def _warn_of(self, place: Place, workers: Collection[str]) -> None:
        if place in self._told or len(self._told) >= MOST:
            return
        self._told.add(place)
        file, line, function, *_ = place
        log.warning(
            "engine %s of worker %s blocks the event loop in %s%s: all requests of the process wait meanwhile; "
            "use `await asyncio.sleep(...)`, or give what takes long to a thread: `await asyncio.to_thread(...)`",
            self._name,
            " or ".join(sorted(workers)),
            function,
            location(file, line),
        )


class _Looker:
    """The thread that looks at one other thread, for as long as there are watches."""

    #: By the thread that is looked at.
    _running: ClassVar[dict[int, _Looker]] = {}

    @classmethod
    def of_this_thread(cls, look: float) -> _Looker:
        """Return the one that looks at the calling thread."""
        watched = threading.get_ident()
        looker = cls._running.get(watched)
        if looker is None:
            looker = cls._running[watched] = cls(watched, look)
        return looker

    def __init__(self, watched: int, look: float) -> None:
        self._watched = watched
        self._look = look
        #: By files of engines. Replaced when it changes, since the thread reads it.
        self._watches: tuple[tuple[BlockingWatch, ...], ...] = ()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blocking watch", daemon=True)

    def add(self, watch: BlockingWatch) -> None:
        """Add a watch. The first one begins the thread."""
        self._put([*chain.from_iterable(self._watches), watch])
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, watch: BlockingWatch) -> None:
        """Remove a watch. The last one ends the thread."""
        self._put([one for one in chain.from_iterable(self._watches) if one is not watch])
        if not self._watches:
            self._running.pop(self._watched, None)
            self._over.set()

    def _put(self, watches: Iterable[BlockingWatch]) -> None:
        engines: dict[frozenset[str], list[BlockingWatch]] = {}
        for watch in watches:
            engines.setdefault(watch.files.roots, []).append(watch)
        self._watches = tuple(map(tuple, engines.values()))

    def _run(self) -> None:
        while not self._over.wait(self._look):
            frame = sys._current_frames().get(self._watched)
            for watches in self._watches:
                watches[0].judge(frame, {watch.worker for watch in watches})
