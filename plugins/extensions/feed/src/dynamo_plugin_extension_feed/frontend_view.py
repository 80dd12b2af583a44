"""One frontend's view of workers and requests, exchanged between the frontends of a deployment.

The structs only grow: a frontend of another release leaves out what it does not know, and what it lacks has a default.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

import msgspec
from dynamo_core import ExtensionServices, ObservedLoads, ObservedPool, RequestAdmitted, RequestFinished
from dynamo_core.protocol import UNREADABLE, ModelCard, Unreadable, format_instance_id

from dynamo_plugin_extension_feed.rates import FrontendCounts, Rates
from dynamo_plugin_extension_feed.request_histories import RequestHistories, RequestHistory, wall_time, worker_id
from dynamo_plugin_extension_feed.worker_names import WorkerNames, name_of

#: How many recent requests a view lists.
RECENT: Final = 100

#: The `status` of a worker that gets requests.
FREE: Final = "free"


class Worker(msgspec.Struct):
    """A worker of a pool. KV blocks are over all ranks; `kv_total_blocks` is None if the worker does not say.

    `requests` and `prefill_tokens` are those of one frontend: others tell theirs.
    """

    id: str
    name: str
    model: str
    role: str
    state: str
    status: str
    host: str
    pid: int | None
    version: str | None
    started: float | None
    requests: int
    kv_used_blocks: int
    kv_total_blocks: int | None
    prefill_tokens: int


class Line(msgspec.Struct):
    """A request that has ended. Times in seconds, `received` in Unix time."""

    id: str
    model: str
    endpoint: str
    tenant: str
    received: float
    status: str
    error_type: str
    finish_reason: str | None
    worker: str | None
    waited: float | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    duration: float
    time_to_first_token: float | None
    worker_name: str | None = None


class View(msgspec.Struct):
    """Workers, open requests by model and where they stand, counts, and the latest requests that have ended.

    `ready` says of each known model whether it can be asked. `since` is the Unix time at which counting began.
    """

    workers: list[Worker]
    standing: dict[str, dict[str, int]]
    counted: FrontendCounts
    recent: list[Line]
    ready: dict[str, bool] = {}
    since: float | None = None


def frontend_view(services: ExtensionServices, ways: RequestHistories, rates: Rates, names: WorkerNames) -> View:
    """Return what this frontend sees."""
    return View(
        [worker for pool in services.pools() for worker in _workers(pool, services.loads)],
        ways.standing(),
        rates.counted(),
        [_line(way, names) for way in islice(ways.ended(), RECENT)],
        dict(services.models.readiness()),
        rates.since,
    )


def read_view(reply: Any) -> View:
    """Return the view of another frontend, from plain values.

    Raises:
        Unreadable: it is none, or of a release that tells something else.
    """
    try:
        return msgspec.convert(reply, View)
    except UNREADABLE as error:
        raise Unreadable(str(error)) from None


def _workers(pool: ObservedPool, loads: ObservedLoads) -> Iterable[Worker]:
    for instance_id, instance in pool.instances.items():
        used, total, prefill = _cache(instance_id, pool.cards.get(instance_id), loads)
        yield Worker(
            format_instance_id(instance_id),
            name_of(instance),
            pool.model,
            pool.role,
            instance.state_name,
            pool.state(instance_id),
            instance.host,
            instance.pid,
            instance.version or None,
            instance.started or None,
            loads.own_requests(instance_id),
            used,
            total,
            prefill,
        )


def _cache(worker: int, card: ModelCard | None, loads: ObservedLoads) -> tuple[int, int | None, int]:
    """Return over all ranks of a worker: KV blocks in use, KV blocks in all, tokens to be prefilled."""
    if card is None:
        return 0, None, 0
    facts = card.runtime_config
    total, first, size = facts.total_kv_blocks, facts.data_parallel_start_rank, facts.data_parallel_size
    used = prefill = 0
    for rank in range(first, first + size):
        used += loads.used_blocks(worker, rank, card.kv_cache_block_size)
        prefill += loads.own_prefill_tokens(worker, rank)
    return used, None if total is None else total * size, prefill


def _line(way: RequestHistory, names: WorkerNames) -> Line:
    first, last = way.received, way.events[-1]
    assert isinstance(last, RequestFinished)  # noqa: S101 - only such are kept among those that have ended
    record = last.record
    return Line(
        id=first.request_id,
        model=first.model,
        endpoint=first.endpoint,
        tenant=first.principal.tenant,
        received=wall_time(first.time),
        status=record.status,
        error_type=record.error_type,
        finish_reason=record.finish_reason,
        worker=worker_id(record.instance_id),
        waited=next((event.waited for event in way.events if isinstance(event, RequestAdmitted)), None),
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        cached_tokens=record.cached_tokens,
        duration=record.duration,
        time_to_first_token=record.time_to_first_token,
        worker_name=names.get(record.instance_id),
    )
