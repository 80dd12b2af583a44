"""Rounds become medians, a text table and a JSON document."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar

from benchmarks.load import Measured
from benchmarks.loops import LOOP_NAME
from benchmarks.scenarios import Scenario
from benchmarks.stats import Spread, ratio, spread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """A line of a table: which figure, with how many digits, and whether its ratio to another says anything."""

    title: str
    key: str
    digits: int
    value: Callable[[T], float | None]
    compared: bool = True


_ROWS: Final[Sequence[Row[Measured]]] = (
    Row("requests/s", "requests_per_second", 1, lambda m: m.requests_per_second),
    Row("tokens/s", "tokens_per_second", 0, lambda m: m.tokens_per_second),
    Row("latency p50, ms", "latency_p50_ms", 2, lambda m: m.latency_p50_ms),
    Row("latency p99, ms", "latency_p99_ms", 2, lambda m: m.latency_p99_ms),
    Row("TTFB p50, ms", "ttfb_p50_ms", 2, lambda m: m.ttfb_p50_ms),
    Row("TTFB p99, ms", "ttfb_p99_ms", 2, lambda m: m.ttfb_p99_ms),
    Row("CPU s per 1,000 requests", "cpu_per_1k_requests", 3, lambda m: m.cpu_per_1k_requests),
    Row("CPU s per 100,000 tokens", "cpu_per_100k_tokens", 3, lambda m: m.cpu_per_100k_tokens),
    Row("server CPU, cores", "server_busy", 2, lambda m: m.server_busy, compared=False),
    Row("client CPU, cores", "client_busy", 2, lambda m: m.client_busy, compared=False),
    Row("peak RSS, MiB", "peak_rss_mib", 0, lambda m: m.peak_rss_mib),
    Row("events per stream", "events_per_stream", 1, lambda m: m.events_per_stream),
    Row("errors", "errors", 0, lambda m: m.errors, compared=False),
)


@dataclass(frozen=True, slots=True)
class Block:
    """The rounds of one scenario: for each target, in the order of the columns, one measurement a round.

    The first target is compared with the second, where there is one.
    """

    scenario: Scenario
    rounds: Mapping[str, Sequence[Measured]]

    @property
    def errors(self) -> int:
        """Failed or wrong answers over all rounds and targets."""
        return sum(measured.errors for rounds in self.rounds.values() for measured in rounds)


def table(blocks: Sequence[Block]) -> str:
    """Return all blocks as aligned text.

    A figure is the median of its rounds with the smallest and largest behind it.
    """
    return "\n\n".join(_block_table(block) for block in blocks)


def document(blocks: Sequence[Block], settings: Mapping[str, object]) -> dict[str, object]:
    """Return everything measured, round by round, with the medians and ratios, for machines to read."""
    return {
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "client_loop": LOOP_NAME,
        },
        "settings": dict(settings),
        "scenarios": [_block_document(block) for block in blocks],
    }


def _block_table(block: Block) -> str:
    names = list(block.rounds)
    header = [block.scenario.title, *names]
    if len(names) == 2:
        header.append(f"{names[0]} / {names[1]}")
    lines = [header]
    for row in _ROWS:
        spreads = [spread(map(row.value, block.rounds[name])) for name in names]
        if not any(spreads):
            continue
        cells = [row.title, *(_shown(one, row.digits) for one in spreads)]
        if len(names) == 2:
            cells.append(_shown(_ratio(block, row), 2) if row.compared else "")
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])
        for cells in lines
    ]
    text.insert(1, "-" * len(text[0]))
    text += [f"  ! {name}: {count} x {kind}" for name in names for kind, count in _error_kinds(block.rounds[name])]
    return "\n".join(line.rstrip() for line in text)


def _block_document(block: Block) -> dict[str, object]:
    names = list(block.rounds)
    targets = [
        {
            "target": name,
            "summary": {row.key: _plain(spread(map(row.value, block.rounds[name]))) for row in _ROWS},
            "rounds": [asdict(measured) for measured in block.rounds[name]],
        }
        for name in names
    ]
    result: dict[str, object] = {**asdict(block.scenario), "targets": targets}
    if len(names) == 2:
        result["ratios"] = {row.key: _plain(_ratio(block, row)) for row in _ROWS if row.compared}
    return result


def _ratio(block: Block, row: Row[Measured]) -> Spread | None:
    """Return first target by second, round by round: a noisy second then spoils one pair, not the comparison."""
    first, second = block.rounds.values()
    return spread(ratio(row.value(mine), row.value(base)) for mine, base in zip(first, second, strict=True))


def _error_kinds(rounds: Sequence[Measured]) -> list[tuple[str, int]]:
    totals: dict[str, int] = {}
    for measured in rounds:
        for kind, count in measured.error_kinds.items():
            totals[kind] = totals.get(kind, 0) + count
    return sorted(totals.items(), key=lambda item: -item[1])[:5]


def _shown(value: Spread | None, digits: int) -> str:
    if value is None:
        return "-"
    middle = f"{value.median:,.{digits}f}"
    if value.low == value.high:
        return middle
    return f"{middle} ({value.low:,.{digits}f}–{value.high:,.{digits}f})"


def _plain(value: Spread | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)
