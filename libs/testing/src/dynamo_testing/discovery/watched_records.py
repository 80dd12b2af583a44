"""The state that the events of a watch add up to, for hypothesis models of stores."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_core.contracts.discovery import WatchEvent, WatchKind

#: The kinds that say whether the records may be out of date.
MARKS = (WatchKind.STALE, WatchKind.FRESH)


class Told:
    """The records that a watch reported, and its marks."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.marks: list[WatchKind] = []

    def add(self, events: Iterable[WatchEvent]) -> None:
        """Take events; one that ends a record which was never told is an error."""
        for event in events:
            if event.kind is WatchKind.PUT:
                self.records[event.key] = event.value
            elif event.kind is WatchKind.DELETE:
                del self.records[event.key]
            elif event.kind in MARKS:
                self.marks.append(event.kind)

    def is_fresh(self) -> bool:
        """Return whether every STALE was followed by one FRESH, and no other mark was told."""
        return self.marks == [*MARKS] * (len(self.marks) // 2)
