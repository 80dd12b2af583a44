"""The state of a deployment: what one frontend sees, and what the views of all frontends come to together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo_core import ExtensionServices, ObservedLoads, ObservedPool
from dynamo_core.protocol import FrontendRecord, Instance, ModelCard, format_instance_id

from dynamo_plugin_extension_feed.alarms import alarms
from dynamo_plugin_extension_feed.rates import SLOT, Counts, Rates, over, percentile, summed
from dynamo_plugin_extension_feed.ways import Ways

#: How many recent requests a state lists.
RECENT: Final = 100
#: Seconds over which the rates that stand for now are taken, and all that is kept.
NOW: Final = 60
ALL: Final = 900

FREE: Final = "free"

State = dict[str, Any]


def seen(services: ExtensionServices, ways: Ways, rates: Rates) -> State:
    """What this frontend sees, as plain values. The argument of `together`."""
    return {
        "workers": [worker for pool in services.pools() for worker in _workers(pool, services.loads)],
        "standing": ways.standing(),
        "slots": rates.slots(),
        "recent": ways.last(RECENT),
    }


@dataclass(frozen=True, slots=True)
class Views:
    """What each frontend sees, by frontend id; `missing` says why others did not answer."""

    frontends: Sequence[FrontendRecord]
    seen: Mapping[int, State]
    missing: Mapping[int, str]


def together(views: Views, own: int) -> State:
    """The state of the deployment. Requests and rates are sums over all frontends that have answered.

    What they know of a worker alike is told as the frontend `own` knows it; one that any of them finds not free is not.
    """
    now = time.time()
    order = sorted(views.seen, key=lambda one: one != own)
    parts = [views.seen[one] for one in order]
    slots = {kind: summed(part["slots"][kind] for part in parts) for kind in ("models", "tenants", "workers")}
    recent = [{**line, "frontend": f"{one:x}"} for one in order for line in views.seen[one]["recent"]]
    workers = _merged(parts, over(slots["workers"], 0))
    frontends = [_frontend(one, views.missing.get(one.frontend_id)) for one in views.frontends]
    models = _models(workers, summed({0: part["standing"]} for part in parts).get(0, {}), slots["models"], now)
    return {
        "time": now,
        "alarms": alarms(models, workers, frontends),
        "frontends": frontends,
        "models": models,
        "tenants": _tenants(slots["tenants"], now),
        "workers": workers,
        "history": _history(slots["models"]),
        "recent": sorted(recent, key=lambda line: line["received"] + line["duration"], reverse=True)[:RECENT],
    }


def _workers(pool: ObservedPool, loads: ObservedLoads) -> Iterable[State]:
    for instance_id, instance in pool.instances.items():
        card = pool.cards.get(instance_id)
        yield {
            "id": format_instance_id(instance_id),
            "name": f"{instance.worker}-{instance.replica}",
            "model": pool.model,
            "role": pool.role,
            "state": instance.state_name,
            "status": pool.state(instance_id),
            "host": instance.host,
            "pid": instance.pid,
            "version": instance.version or None,
            "started": instance.started or None,
            "requests": loads.requests(instance_id),
            **_cache(instance, card, loads),
        }


def _cache(instance: Instance, card: ModelCard | None, loads: ObservedLoads) -> State:
    """KV blocks over all ranks of a worker. `kv_total_blocks` is None if the worker does not say."""
    if card is None:
        return {"kv_used_blocks": 0, "kv_total_blocks": None, "prefill_tokens": 0}
    facts = card.runtime_config
    ranks = range(facts.data_parallel_start_rank, facts.data_parallel_start_rank + facts.data_parallel_size)
    worker, total = instance.instance_id, facts.total_kv_blocks
    return {
        "kv_used_blocks": sum(loads.used_blocks(worker, rank, card.kv_cache_block_size) for rank in ranks),
        "kv_total_blocks": None if total is None else total * len(ranks),
        "prefill_tokens": sum(loads.prefill_tokens(worker, rank) for rank in ranks),
    }


def _merged(parts: Sequence[State], rates: Mapping[str, Counts]) -> list[State]:
    """The workers that any frontend sees. Each frontend counts its own requests, and knows the same reports of load."""
    workers: dict[tuple[str, str, str], State] = {}
    for part in parts:
        for worker in part["workers"]:
            key = worker["model"], worker["role"], worker["id"]
            known = workers.get(key)
            if known is None:
                workers[key] = dict(worker)
                continue
            known["requests"] += worker["requests"]
            known["prefill_tokens"] += worker["prefill_tokens"]
            known["kv_used_blocks"] = max(known["kv_used_blocks"], worker["kv_used_blocks"])
            if known["status"] == FREE:
                known["status"] = worker["status"]
    for worker in workers.values():
        counts = rates.get(worker["id"])
        worker["hit_rate"] = _share(counts["cached_tokens"], counts["prompt_tokens"]) if counts is not None else None
        worker["served"] = counts["requests"] if counts is not None else 0
    return sorted(workers.values(), key=lambda worker: (worker["model"], worker["role"], worker["name"], worker["id"]))


def _models(
    workers: Sequence[State],
    standing: Mapping[str, Mapping[str, int]],
    slots: Mapping[int, Mapping[str, Counts]],
    now: float,
) -> list[State]:
    recent, whole = over(slots, now - NOW), over(slots, 0)
    running: dict[str, Counter[str]] = {}
    for worker in workers:
        running.setdefault(worker["model"], Counter())[worker["role"]] += 1
    models = []
    for name in sorted({*running, *standing, *whole}):
        stands = standing.get(name, {})
        models.append(
            {
                "name": name,
                "workers": dict(running.get(name, {})),
                "waiting": stands.get("waiting", 0),
                "prefilling": stands.get("prefilling", 0),
                "answering": stands.get("answering", 0),
                "last_minute": _figures(recent.get(name), NOW),
                "last_15_minutes": _figures(whole.get(name), ALL),
            }
        )
    return models


def _figures(counts: Counts | None, seconds: float) -> State | None:
    if counts is None:
        return None
    numbers = {name: counts[name] for name in ("requests", "failed", "refused", "moved", "prompt_tokens")}
    return {
        **numbers,
        "output_tokens": counts["output_tokens"],
        "requests_per_second": counts["requests"] / seconds,
        "output_tokens_per_second": counts["output_tokens"] / seconds,
        "hit_rate": _share(counts["cached_tokens"], counts["prompt_tokens"]),
        "time_to_first_token": _percentiles(counts["ttft"]),
        "inter_token_latency": _percentiles(counts["itl"]),
    }


def _history(slots: Mapping[int, Mapping[str, Counts]]) -> list[State]:
    """One row per slot, the oldest first, over all models."""
    rows = []
    for start in sorted(slots):
        total = summed({start: {"all": one}} for one in slots[start].values())[start]["all"]
        rows.append({"time": start, **(_figures(total, SLOT) or {})})
    return rows


def _tenants(slots: Mapping[int, Mapping[str, Counts]], now: float) -> list[State]:
    recent, whole = over(slots, now - NOW), over(slots, 0)
    return [{"name": name, "last_minute": recent.get(name), "last_15_minutes": whole[name]} for name in sorted(whole)]


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
    return {f"p{share}": percentile(buckets, share / 100) for share in (50, 90, 99)}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
