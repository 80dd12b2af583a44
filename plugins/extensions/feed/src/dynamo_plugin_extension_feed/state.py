"""The state of a deployment, joined from the views of all frontends."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec
from dynamo_core.protocol import FrontendRecord

from dynamo_plugin_extension_feed.alarms import alarms
from dynamo_plugin_extension_feed.frontend_view import FREE, RECENT, Line, View, Worker
from dynamo_plugin_extension_feed.rates import (
    ALL,
    NOW,
    SLOT,
    ModelCounts,
    TenantCounts,
    Totals,
    WorkerCounts,
    percentiles,
    summed,
)

State = dict[str, Any]

_SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Views:
    """The views of all frontends, by frontend id; `missing` says why others did not answer."""

    frontends: Sequence[FrontendRecord]
    seen: Mapping[int, View]
    missing: Mapping[int, str]


class WorkerState(Worker):
    """A worker, with the totals of its requests of the last 15 minutes."""

    hit_rate: float | None = None
    served: int = 0


class RecentRequest(Line):
    """A request that has ended, and its frontend."""

    frontend: str = ""


def join_views(views: Views, own: int) -> State:
    """Return the state of the deployment. Requests and rates are sums over all frontends that have answered.

    What they know of a worker alike is told as the frontend `own` knows it; one that any of them finds not free is not.
    """
    order = sorted(views.seen, key=lambda one: one != own)
    parts = [views.seen[one] for one in order]
    counted = [part.counted for part in parts]
    workers = _workers(parts, summed(one.workers for one in counted))
    frontends = [_frontend(one, views.missing.get(one.frontend_id)) for one in views.frontends]
    models = _models(workers, _standing(parts), _totals(one.models for one in counted), _ready(parts))
    return {
        "time": time.time(),
        "since": min((part.since for part in parts if part.since is not None), default=None),
        "alarms": alarms(models, workers, frontends),
        "frontends": frontends,
        "models": models,
        "tenants": _tenants(_totals(one.tenants for one in counted)),
        "workers": workers,
        "history": _history(summed(one.history for one in counted)),
        "recent": _recent({f"{one:x}": views.seen[one].recent for one in order}),
    }


def _workers(parts: Sequence[View], counted: Mapping[str, WorkerCounts]) -> list[WorkerState]:
    """Return the workers that any frontend sees.

    Each frontend counts its own requests, and knows the same reports of load.
    """
    workers: dict[tuple[str, str, str], WorkerState] = {}
    for part in parts:
        for worker in part.workers:
            key = worker.model, worker.role, worker.id
            known = workers.get(key)
            if known is None:
                workers[key] = _first_seen(worker, counted.get(worker.id))
                continue
            known.requests += worker.requests
            known.prefill_tokens += worker.prefill_tokens
            known.kv_used_blocks = max(known.kv_used_blocks, worker.kv_used_blocks)
            if known.status == FREE:
                known.status = worker.status
    return sorted(workers.values(), key=attrgetter("model", "role", "name", "id"))


def _first_seen(worker: Worker, counts: WorkerCounts | None) -> WorkerState:
    known = WorkerState(*msgspec.structs.astuple(worker))
    if counts is not None:
        known.hit_rate, known.served = _share(counts.cached_tokens, counts.prompt_tokens), counts.requests
    return known


def _standing(parts: Iterable[View]) -> dict[str, Counter[str]]:
    """Open requests by model and where they stand."""
    standing: dict[str, Counter[str]] = {}
    for part in parts:
        for model, stands in part.standing.items():
            standing.setdefault(model, Counter()).update(stands)
    return standing


def _ready(parts: Iterable[View]) -> dict[str, bool]:
    """Return whether any frontend can serve each known model."""
    ready: dict[str, bool] = {}
    for part in parts:
        for model, one in part.ready.items():
            ready[model] = one or ready.get(model, False)
    return ready


def _totals(parts: Iterable[Totals[Any]]) -> Totals[Any]:
    own = list(parts)
    return Totals(summed(one.minute for one in own), summed(one.whole for one in own))


def _models(
    workers: Sequence[Worker],
    standing: Mapping[str, Mapping[str, int]],
    totals: Totals[ModelCounts],
    ready: Mapping[str, bool],
) -> list[State]:
    running: dict[str, dict[str, int]] = {}
    for (name, role), number in Counter((worker.model, worker.role) for worker in workers).items():
        running.setdefault(name, {})[role] = number
    models = []
    for name in sorted({*running, *standing, *totals.whole, *ready}):
        stands = standing.get(name, {})
        models.append(
            {
                "name": name,
                "ready": ready.get(name, True),
                "workers": running.get(name, {}),
                "waiting": stands.get("waiting", 0),
                "prefilling": stands.get("prefilling", 0),
                "answering": stands.get("answering", 0),
                "last_minute": _figures(totals.minute.get(name), NOW),
                "last_15_minutes": _figures(totals.whole.get(name), ALL),
            }
        )
    return models


def _figures(counts: ModelCounts | None, seconds: float) -> State | None:
    if counts is None:
        return None
    return {
        "requests": counts.requests,
        "failed": counts.failed,
        "refused": counts.refused,
        "moved": counts.moved,
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "requests_per_second": counts.requests / seconds,
        "output_tokens_per_second": counts.output_tokens / seconds,
        "hit_rate": _share(counts.cached_tokens, counts.prompt_tokens),
        "time_to_first_token": _percentiles(counts.ttft),
        "inter_token_latency": _percentiles(counts.itl),
    }


def _history(slots: Mapping[int, ModelCounts]) -> list[State]:
    """Return one row per slot, the oldest first, over all models."""
    return [{"time": start, **(_figures(slots[start], SLOT) or {})} for start in sorted(slots)]


def _tenants(totals: Totals[TenantCounts]) -> list[State]:
    return [
        {"name": name, "last_minute": totals.minute.get(name), "last_15_minutes": totals.whole[name]}
        for name in sorted(totals.whole)
    ]


def _recent(lines: Mapping[str, Sequence[Line]]) -> list[RecentRequest]:
    """Return the last that have ended, at any frontend."""
    latest = sorted(
        ((line.received + line.duration, frontend, line) for frontend, own in lines.items() for line in own),
        key=lambda one: one[0],
        reverse=True,
    )
    found = []
    for _, frontend, line in latest[:RECENT]:
        known = RecentRequest(*msgspec.structs.astuple(line))
        known.frontend = frontend
        found.append(known)
    return found


def _frontend(record: FrontendRecord, missing: str | None) -> State:
    return {
        "id": f"{record.frontend_id:x}",
        "host": record.host,
        "pid": record.pid,
        "version": record.version,
        "replica": record.replica,
        "missing": missing,
    }


def _percentiles(buckets: Mapping[int, int]) -> State:
    return dict(zip(_SHARES, percentiles(buckets, [*_SHARES.values()]), strict=True))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
