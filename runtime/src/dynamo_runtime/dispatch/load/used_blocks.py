"""KV blocks in use on each rank: its worker's last report, and the placements since.

Only the worker's engine knows how long the answers have become. But a report is as old as the way it came, and an
engine takes a request in only between two steps. So a report may lack what was placed up to `SETTLE` before it was
heard, or have it. Which of the two is found by comparing it with an older report: what was placed in between counts
once, whether the last report has it or not.

A request that ends is taken off at once if it was placed after the last report. What the last report has stays until
the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

#: A worker and one of its data-parallel ranks.
Rank: TypeAlias = tuple[int, int]

#: Seconds after which a report has what was placed before: reports of a busy worker come every 0.1 s.
SETTLE = 0.25
#: Seconds within which another frontend tells what it has placed.
TOLD_WITHIN = 0.1


@dataclass(slots=True)
class Report:
    """A worker's report on a rank, and the frontends' placements when it came."""

    #: In use, as the worker reports.
    blocks: int
    #: Held by requests of this frontend, and of others.
    own: int
    others: int
    #: Seconds of one clock.
    heard: float
    #: Held by requests of this frontend that were placed after this report and before the next, and have not ended.
    placed: int = 0


class UsedBlocks:
    """The reports that count. Times are seconds of one clock; those of others' loads are of the same."""

    def __init__(self) -> None:
        #: Of each rank: the last one that is older by `SETTLE` than the last of all, and all after it.
        self._reports: dict[Rank, tuple[Report, ...]] = {}

    def last(self, rank: Rank) -> Report | None:
        """Return the last report of a rank; None if there is none."""
        reports = self._reports.get(rank)
        return reports[-1] if reports is not None else None

    def report(self, rank: Rank, blocks: int, own: int, others: int, now: float) -> None:
        """Record a report that came while this frontend's requests held `own` blocks, and others `others`."""
        reports = (*self._reports.get(rank, ()), Report(blocks, own, others, now))
        first = 0
        while first + 1 < len(reports) and reports[first + 1].heard <= now - SETTLE:
            first += 1
        self._reports[rank] = reports[first:]

    def others_changed(self, rank: Rank, blocks: int, now: float) -> None:
        """Add the blocks that requests of another frontend hold more, or less if negative.

        They came or went a moment ago, so that a report that was heard lately may know of it already.
        """
        for report in self._reports.get(rank, ()):
            if report.heard > now - TOLD_WITHIN:
                report.others += blocks

    def forget(self, rank: Rank) -> None:
        """Forget the reports of a silent worker."""
        self._reports.pop(rank, None)

    def used(self, rank: Rank, own: int, others: int, uncomputed: int) -> int:
        """Return the KV blocks in use on a rank, where requests of this frontend hold `own`, and others `others`.

        `uncomputed` are blocks of prompts that wait or are being computed, which the worker may not have counted yet.
        Without a report it is what frontends placed. May be called from another thread.
        """
        reports = self._reports.get(rank)
        if reports is None:
            return own + others
        last = reports[-1]
        # What waits inside the worker counts too.
        used = min(last.blocks + uncomputed, own + others)
        if last.heard - reports[0].heard < SETTLE:
            # Nothing that was placed is surely in a report.
            used = own + others
        placed = 0
        for report in reversed(reports):
            placed += report.placed
            # Right if the last report has nothing of what was placed since this one, and else too much.
            most = last.blocks + placed + max(0, others - report.others)
            # Right if since this one nothing has changed but that requests came and went.
            since = report.blocks + own - report.own + others - report.others
            used = max(used, most if report is last else min(most, since))
        return used
