"""The memory budget of whole answers while they are collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core.errors import Unavailable

if TYPE_CHECKING:
    from dynamo_core import FrontendServices

MB = 1024 * 1024
#: Bytes up to which an answer is collected although all answers together have reached their bound: it is the large
#: ones that are refused.
SMALL = MB
#: Bytes by which an answer grows until that is counted; most do not grow so large.
STEP = 16 * 1024


class AnswerMemory:
    """The memory of all answers of a process, and its limits. `most_each` and `most_all` are in bytes."""

    def __init__(self, services: FrontendServices, most_each: int, most_all: int) -> None:
        self.most_each = most_each
        self.most_all = most_all
        metrics, prefix = services.metrics, services.metrics_prefix
        self._level = metrics.gauge(
            f"{prefix}_collected_bytes", "Bytes of whole answers that are being collected and are not sent yet."
        ).labels()
        refused = metrics.counter(
            f"{prefix}_collected_too_large_total",
            "Answers given up while they were collected: one was too large (bound answer), or all together (process).",
            ("bound",),
        )
        self._refused = {bound: refused.labels(bound) for bound in ("answer", "process")}
        self._taken = 0

    @property
    def most(self) -> int:
        """The largest answer that there can be."""
        return min(self.most_each, self.most_all)

    def add(self, size: int) -> None:
        """Add so many bytes; take away if negative."""
        self._taken += size
        self._level.set(self._taken)

    def too_large(self, held: int) -> Unavailable | None:
        """Return why an answer that holds so many bytes is to be given up; None if it is not.

        It has become too large itself, or all together have and it is one of the large ones.
        """
        if held > self.most_each:
            self._refused["answer"].inc()
            return Unavailable(
                f"The answer has grown beyond {self.most_each // MB} MB, the most that a whole answer may take. Ask "
                "for fewer tokens, answers or log-probabilities, or set `stream`"
            )
        if self._taken > self.most_all and held > SMALL:
            self._refused["process"].inc()
            return Unavailable(
                f"Large answers fill the {self.most_all // MB} MB that whole answers may take together. Retry later, "
                "or set `stream`"
            )
        return None


class AnswerHold:
    """The memory that one answer holds."""

    __slots__ = ("_held", "_memory")

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._held = 0

    def grow(self, size: int) -> None:
        """Add `size` bytes to the answer.

        Raises:
            Unavailable: that is too much; the answer is given up, and takes nothing any more.
        """
        self._held += size
        self._memory.add(size)
        error = self._memory.too_large(self._held)
        if error is not None:
            # At once, so that others need not be given up for what is free in a moment.
            self.release()
            raise error

    def release(self) -> None:
        """Give everything back. Safe twice."""
        self._memory.add(-self._held)
        self._held = 0
