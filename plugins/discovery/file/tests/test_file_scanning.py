"""A look at the folder reads what has changed, and only that, whatever happens in its middle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dynamo_plugin_discovery_file.folder import RECORDS, Place, Signature


class Looks:
    """Counts the files whose state was asked for and that were read; `break_at` lets a listing fail after so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thorough: list[bool] = []
        self.read: list[str] = []
        self.break_at: int | None = None
        listing, read = Place.listing, Place.read

        def watched(place: Place, area: str, *, thorough: bool = True) -> Iterator[tuple[str, int, Signature | None]]:
            self.thorough.append(thorough)
            for number, entry in enumerate(listing(place, area, thorough=thorough)):
                if number == self.break_at:
                    self.break_at = None
                    raise OSError("the disk is gone")
                yield entry

        def reading(place: Place, name: str, limit: int) -> tuple[Signature, bytes]:
            if name.startswith(RECORDS):
                self.read.append(name)
            return read(place, name, limit)

        monkeypatch.setattr(Place, "listing", watched)
        monkeypatch.setattr(Place, "read", reading)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


async def test_a_rewritten_record_costs_one_read_at_the_next_poll(host: Any, looks: Looks) -> None:
    view, lease = host.view(), host.lease()
    for number in range(20):
        await lease.put(f"k{number}", b"1")
    view.poll()
    looks.read.clear()
    looks.thorough.clear()

    await lease.put("k7", b"2")
    view.poll()

    assert view.records["k7"] == b"2"
    assert looks.read == ["records/k7"]
    assert looks.thorough == [False], "without asking for the state of every file"


async def test_files_are_looked_at_thoroughly_three_times_in_a_ttl_and_not_oftener(host: Any, looks: Looks) -> None:
    view, lease = host.view(), host.lease()

    for _ in range(12):
        host.run(0.25)
        await lease.put("a", b"1")
        view.poll()

    assert looks.thorough.count(True) == 3
    assert view.records == {"a": b"1"}


@pytest.mark.parametrize("at", [0, 3, 9])
async def test_a_poll_that_fails_midway_forgets_nothing(host: Any, looks: Looks, at: int) -> None:
    view = host.view()
    leases = [host.lease() for _ in range(10)]
    for number, lease in enumerate(leases):
        await lease.put(f"k{number}", b"1")
    await leases[5].put("short-lived", b"1")
    host.run(1)
    expected = dict(view.records)
    assert len(expected) == 11

    await leases[0].put("new", b"1")
    await leases[5].remove("short-lived")
    looks.break_at = at
    view.poll()
    assert view.records == expected
    assert view.scanner.stale
    host.kill(leases[5])
    host.run(8)

    del expected["k5"], expected["short-lived"]
    assert view.records == expected | {"new": b"1"}
    assert not view.scanner.stale
