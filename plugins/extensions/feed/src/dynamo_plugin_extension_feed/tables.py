"""The tables of `dynamo top`: the columns of each view, and their cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A title, the sort key of a row, and the format of a cell."""

    title: str
    value: Callable[[Row], Any]
    write: Callable[[Any], str] = str
    right: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A view: the place of its rows in a state, the identifying fields, and the columns, important ones first."""

    name: str
    keys: Sequence[str]
    columns: Sequence[Column]

    def key(self, row: Row) -> str:
        """Return what tells a row from others."""
        return "/".join(str(row[name]) for name in self.keys)

    def rows(self, state: Row, words: str = "", column: int = 0, turned: bool = False) -> list[Row]:
        """Return the rows that have all words, in the order of a column. Those without a value come last."""
        wanted = words.lower().split()
        found = [row for row in state[self.name] if all(word in self._text(row) for word in wanted)]
        value = self.columns[column].value
        known = sorted((row for row in found if value(row) is not None), key=value, reverse=turned)
        return [*known, *(row for row in found if value(row) is None)]

    def cells(self, row: Row) -> list[str]:
        """Return a row as it is written."""
        values = [(column, column.value(row)) for column in self.columns]
        return ["-" if value is None else column.write(value) for column, value in values]

    def _text(self, row: Row) -> str:
        return " ".join(self.cells(row)).lower()


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    if value < 1:
        return f"{value * 1000:.0f}ms"
    return f"{value:.1f}s" if value < 120 else f"{value / 60:.0f}m"


def age(since: float) -> str:
    """Return how long something runs that began at a Unix time."""
    passed = max(0.0, time.time() - since)
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "m")):
        if passed >= 2 * length:
            return f"{passed / length:.0f}{unit}"
    return f"{passed:.0f}s"


def share(value: float) -> str:
    """Return a share in per cent."""
    return f"{value:.0%}"


def kv_use(worker: Row) -> float | None:
    """Return the share of a worker's KV blocks that is in use; None if it does not say how many it has."""
    total = worker["kv_total_blocks"]
    return worker["kv_used_blocks"] / total if total else None


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _field(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _minute(*names: str) -> Callable[[Row], Any]:
    def value(row: Row) -> Any:
        found: Any = row["last_minute"]
        for name in names:
            found = None if found is None else found[name]
        return found

    return value


def _whole(name: str) -> Callable[[Row], Any]:
    return lambda row: row["last_15_minutes"][name]


def _numbers(value: Callable[[str], Callable[[Row], Any]], *titles: str) -> list[Column]:
    """Return columns of numbers; each text is a title and the name of its field."""
    return [Column(title, value(name), right=True) for title, name in map(str.split, titles)]


def _end(line: Row) -> str:
    return str(line["finish_reason"] or "-") if line["status"] == "success" else str(line["error_type"] or "error")


WORKERS: Final = Table(
    "workers",
    ["model", "role", "id"],
    [
        Column("WORKER", _field("name")),
        Column("MODEL", _field("model")),
        Column("STATUS", _field("status")),
        Column("REQ", _field("requests"), right=True),
        Column("KV", kv_use, share, right=True),
        Column("HIT", _field("hit_rate"), share, right=True),
        *_numbers(_field, "PREFILL prefill_tokens", "SERVED served"),
        Column("ROLE", _field("role")),
        Column("STATE", _field("state")),
        Column("AGE", _field("started"), age, right=True),
        Column("HOST", _field("host")),
        Column("PID", _field("pid"), right=True),
        Column("VERSION", _field("version")),
        Column("ID", _field("id")),
    ],
)
MODELS: Final = Table(
    "models",
    ["name"],
    [
        Column("MODEL", _field("name")),
        Column("WRK", lambda row: sum(row["workers"].values()), right=True),
        *_numbers(_field, "WAIT waiting", "PREFILL prefilling", "ANSWER answering"),
        Column("REQ/S", _minute("requests_per_second"), _rate, right=True),
        Column("TOK/S", _minute("output_tokens_per_second"), _rate, right=True),
        Column("TTFT50", _minute("time_to_first_token", "p50"), seconds, right=True),
        Column("TTFT99", _minute("time_to_first_token", "p99"), seconds, right=True),
        Column("ITL99", _minute("inter_token_latency", "p99"), seconds, right=True),
        Column("HIT", _minute("hit_rate"), share, right=True),
        *_numbers(_minute, "REFUSED refused", "FAILED failed", "MOVED moved"),
    ],
)
REQUESTS: Final = Table(
    "recent",
    ["id"],
    [
        Column("RECEIVED", _field("received"), lambda value: time.strftime("%H:%M:%S", time.localtime(value))),
        Column("MODEL", _field("model")),
        Column("END", _end),
        Column("WAITED", _field("waited"), seconds, right=True),
        Column("TTFT", _field("time_to_first_token"), seconds, right=True),
        Column("TOTAL", _field("duration"), seconds, right=True),
        *_numbers(_field, "IN prompt_tokens", "HIT cached_tokens", "OUT output_tokens"),
        Column("TENANT", _field("tenant")),
        Column("WORKER", lambda row: row.get("worker_name") or row["worker"]),
        Column("ID", _field("id")),
    ],
)
TENANTS: Final = Table(
    "tenants",
    ["name"],
    [
        Column("TENANT", _field("name")),
        Column("REQ/MIN", _minute("requests"), right=True),
        *_numbers(
            _whole, "REQ/15M requests", "REFUSED refused", "FAILED failed", "IN prompt_tokens", "OUT output_tokens"
        ),
    ],
)


def free(state: Row) -> int:
    """Return how many workers get requests."""
    return sum(worker["status"] == "free" for worker in state["workers"])


def figures(state: Row) -> str:
    """Return what else stands and runs."""
    models = [model["last_minute"] for model in state["models"] if model["last_minute"] is not None]
    answering = sum(model["answering"] + model["prefilling"] for model in state["models"])
    waiting = sum(model["waiting"] for model in state["models"])
    live = sum(one["missing"] is None for one in state["frontends"])
    rates = (sum(counts[name] for counts in models) for name in ("requests_per_second", "output_tokens_per_second"))
    return (
        f"{live}/{len(state['frontends'])} frontends  {answering} running  {waiting} waiting  "
        f"{' req/s  '.join(f'{rate:.1f}' for rate in rates)} tok/s"
    )


def alarm(state: Row) -> str:
    """Return the worst alarm, and how many more there are."""
    alarms = state["alarms"]
    more = f" (+{len(alarms) - 1})" if len(alarms) > 1 else ""
    return f"{alarms[0]['level'].upper()}{more}: {alarms[0]['text']}" if alarms else "no alarms"


def worker_lines(worker: Row) -> list[str]:
    """Return all that is known of a worker."""
    return [
        f"{column.title.lower():<10}{text}" for column, text in zip(WORKERS.columns, WORKERS.cells(worker), strict=True)
    ]
