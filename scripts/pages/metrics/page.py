"""The tables: metrics by group, and labels."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.pages.metrics.declarations import FRONTEND, PREFIX, SLOT_TRACKER, WORKER, Declaration
from scripts.pages.metrics.prose import GROUPS, LABELS, Group

COMMAND = "python -m scripts.pages"

#: What `http.metrics_prefix` is, unless it is set.
DEFAULT_PREFIX = "dynamo_frontend"

#: Units with which names end, and what the help of such a metric begins with.
_UNITS = {unit: unit for unit in ("seconds", "bytes", "tokens", "blocks", "requests", "clients")} | {
    "ms": "milliseconds"
}
#: What the help of a metric may begin with that counts nothing.
_SCALES = {"1 while ": "0 or 1", "1 for ": "0 or 1", "Share of ": "0 to 1"}
_COUNTED = re.compile(r"(?:KV |Tool )?[A-Za-z][a-z]+s\b")

_PAGES = {FRONTEND: "frontends", WORKER: "workers", SLOT_TRACKER: "the slot tracker"}


class Undocumented(Exception):
    """The code and the tables of this folder do not agree; says where, and what to do."""

    def __str__(self) -> str:
        return f"{super().__str__()}. After that, run `{COMMAND}`"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, as every declaration of its name has it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    common: tuple[str, ...]
    declarations: Sequence[Declaration]

    @property
    def unit(self) -> str:
        """The quantity that is counted or measured: the beginning of the help.

        Raises:
            Undocumented: it begins otherwise, or not as the name ends.
        """
        for beginning, unit in _SCALES.items():
            if self.help.startswith(beginning):
                return unit
        counted = _COUNTED.match(self.help)
        end = self.name.removesuffix("_total").rpartition("_")[2]
        if counted is None or not counted[0].lower().endswith(_UNITS.get(end, "")):
            raise Undocumented(
                f"{self.declarations[0]}: the help of {self.name} must begin with what it counts, in the plural "
                f"and as the name ends ('Requests that', 'Seconds from'), or with one of {list(_SCALES)}: {self.help!r}"
            )
        unit = counted[0]
        return unit if unit.startswith("KV") else unit.lower()

    @property
    def row(self) -> str:
        """The row of the table."""
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {self.unit} | {labels} | {self.help} |"


def metrics(declarations: Iterable[Declaration]) -> list[Metric]:
    """Return the metrics of some declarations.

    Raises:
        Undocumented: two declarations of a name differ.
    """
    found: dict[str, Metric] = {}
    for one in declarations:
        name = re.sub(f"^{PREFIX}_", f"{DEFAULT_PREFIX}_", one.name)
        known = found.get(name)
        before = () if known is None else known.declarations
        made = Metric(name, one.kind, one.help, one.labels, one.common, [*before, one])
        if known is not None and _terms(known) != _terms(made):
            raise Undocumented(f"{one} and {before[0]} declare {name} with different types, helps or labels")
        found[name] = made
    return list(found.values())


def _terms(metric: Metric) -> tuple[object, ...]:
    return metric.kind, metric.help, metric.labels, metric.common


def text(
    declarations: Sequence[Declaration], groups: Sequence[Group] = GROUPS, meanings: Mapping[str, str] = LABELS
) -> str:
    """Return the tables; `meanings` are those of labels.

    Raises:
        Undocumented: a metric has no unit or no group, a label no meaning, or the other way round.
    """
    every = metrics(declarations)
    grouped: dict[Group, list[Metric]] = {group: [] for group in groups}
    for metric in every:
        grouped[_group(metric, groups)].append(metric)
    fixed = [
        f"`{metric.name}`"
        for metric in every
        if metric.name.startswith(DEFAULT_PREFIX) and not metric.declarations[0].name.startswith(PREFIX)
    ]
    parts = [f"`http.metrics_prefix` replaces `{DEFAULT_PREFIX}` in all names but {' and '.join(fixed)}.\n"]
    parts += [_section(group, rows) for group, rows in grouped.items()]
    return "\n".join([*parts, _labels(every, meanings)])


def _group(metric: Metric, among: Sequence[Group]) -> Group:
    places = {one.place for one in metric.declarations}
    groups = {_longest(place, among) for place in places}
    group = groups.pop()
    if group is None or groups:
        raise Undocumented(
            f"{metric.name} must have one group: GROUPS of scripts/pages/metrics/prose.py has none or several for "
            f"{sorted(places)}"
        )
    return group


def _longest(place: str, among: Sequence[Group]) -> Group | None:
    fits = [(len(start), group) for group in among for start in group.places if f"{place}.".startswith(f"{start}.")]
    return max(fits, key=lambda fit: fit[0], default=(0, None))[1]


def _section(group: Group, rows: Sequence[Metric]) -> str:
    if not rows:
        raise Undocumented(f"no metric is in the group {group.title!r} of scripts/pages/metrics/prose.py: remove it")
    common = {metric.common for metric in rows}
    pages = {tuple(sorted({one.part for one in metric.declarations} - {""})) for metric in rows}
    if len(common) > 1 or len(pages) > 1:
        raise Undocumented(f"metrics of the group {group.title!r} are of different processes or scopes: make two of it")
    shown = " and ".join(_PAGES[part] for part in next(iter(pages)))
    names = sorted({_distribution(one.file) for metric in rows for one in metric.declarations})
    facts = f"On the page of {shown}; from {', '.join(f'`{name}`' for name in names)}."
    if labels := next(iter(common)):
        facts += f" All have the labels {', '.join(f'`{label}`' for label in labels)}."
    head = "| Name | Type | Unit | Labels | Meaning |\n| --- | --- | --- | --- | --- |"
    return "\n".join([f"## {group.title}\n", f"{group.sentence}", f"{facts}\n", head, *(one.row for one in rows), ""])


def _distribution(file: Path) -> str:
    folder = next(folder for folder in file.parents if (folder / "pyproject.toml").exists())
    return str(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"])


def _labels(rows: Sequence[Metric], meanings: Mapping[str, str]) -> str:
    used = {label for metric in rows for label in (*metric.labels, *metric.common)}
    if wrong := used ^ meanings.keys():
        raise Undocumented(
            f"LABELS of scripts/pages/metrics/prose.py must have all labels and no others: {sorted(wrong)}"
        )
    lines = [f"| `{label}` | {meaning} |" for label, meaning in sorted(meanings.items())]
    return "\n".join(["## Labels\n", "| Label | Meaning |\n| --- | --- |", *lines, ""])
