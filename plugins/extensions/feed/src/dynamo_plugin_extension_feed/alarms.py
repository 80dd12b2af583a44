"""Alarms for operators, derived from a state of the deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from dynamo_plugin_extension_feed.frontend_view import FREE, Worker

CRITICAL, WARNING, NOTE = "critical", "warning", "note"

#: Share of the requests of the last minute that fail or are refused, above which it is told.
SHARE: Final = 0.05
#: Requests of the last minute below which a share says nothing.
LEAST: Final = 20
#: Names that one alarm lists.
_NAMED: Final = 5

_SERVING: Final = "serving"

_Rows = Iterable[Mapping[str, Any]]


def alarms(models: _Rows, workers: Sequence[Worker], frontends: _Rows) -> list[dict[str, str]]:
    """Return the alarms, the worst first: `level` and `text` of each."""
    found = [*_of_models(models, workers), *_of_workers(workers), *_of_frontends(frontends)]
    order = (CRITICAL, WARNING, NOTE)
    return [{"level": level, "text": text} for level, text in sorted(found, key=lambda one: order.index(one[0]))]


def _of_models(models: _Rows, workers: Sequence[Worker]) -> Iterator[tuple[str, str]]:
    own = Counter(worker.model for worker in workers)
    free = {worker.model for worker in workers if worker.status == FREE}
    for model in models:
        name = model["name"]
        if not model["ready"]:
            yield CRITICAL, f"model {name}: no frontend can serve it, for want of workers ({own[name]} are there)"
        elif own[name] and name not in free:
            yield CRITICAL, f"model {name}: none of its {own[name]} workers gets requests"
        counts = model["last_minute"]
        if counts is None or counts["requests"] < LEAST:
            continue
        # A refused request has failed too.
        for what, number in (("refused", counts["refused"]), ("failed", counts["failed"] - counts["refused"])):
            if number > SHARE * counts["requests"]:
                yield WARNING, f"model {name}: {number} of {counts['requests']} requests of the last minute {what}"


def _of_workers(workers: Sequence[Worker]) -> Iterator[tuple[str, str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        if worker.state != _SERVING:
            groups.setdefault((NOTE, worker.state), []).append(worker.name)
        elif worker.status != FREE:
            groups.setdefault((WARNING, worker.status), []).append(worker.name)
    for (level, status), names in groups.items():
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield level, f"{len(names)} of {len(workers)} workers {status}: {', '.join(names[:_NAMED])}{more}"


def _of_frontends(frontends: _Rows) -> Iterator[tuple[str, str]]:
    for frontend in frontends:
        if frontend["missing"]:
            yield (
                WARNING,
                f"frontend {frontend['id']} on {frontend['host'] or 'an unknown host'}: {frontend['missing']}",
            )
