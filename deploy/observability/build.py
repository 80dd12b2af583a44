"""Writes the dashboards of `grafana/` from the tables below: `python deploy/observability/build.py`.

A panel is a title, a unit of Grafana, and queries with their legends. `$model` and `$__rate_interval` are Grafana's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Panel = tuple[str, str, dict[str, str]]

FRONT = "dynamo_frontend"
MODEL = '{model=~"$model"}'
_RATE = "[$__rate_interval]"


def _rate(metric: str, by: str, labels: str = MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{labels}{_RATE}))"


def _quantiles(metric: str, by: str = "", labels: str = MODEL) -> dict[str, str]:
    grouped = f"le, {by}" if by else "le"
    legend = f"{{{{{by}}}}} p" if by else "p"
    buckets = f"sum by ({grouped}) (rate({metric}_bucket{labels}{_RATE}))"
    return {f"{legend}{share}": f"histogram_quantile({share / 100}, {buckets})" for share in (50, 90, 99)}


DASHBOARDS: dict[str, tuple[str, list[Panel]]] = {
    "overview": (
        "Dynamo / Overview",
        [
            ("Requests", "reqps", {"{{model}} {{status}}": _rate(f"{FRONT}_requests_total", "model, status")}),
            ("Time to first token", "s", _quantiles(f"{FRONT}_time_to_first_token_seconds")),
            ("Time between tokens", "s", _quantiles(f"{FRONT}_inter_token_latency_seconds")),
            ("Output tokens", "short", {"{{model}}": _rate(f"{FRONT}_output_tokens_total", "model")}),
            (
                "Requests that run",
                "short",
                {
                    "{{model}} active": f"sum by (model) ({FRONT}_active_requests{MODEL})",
                    "{{model}} without a token yet": f"sum by (model) ({FRONT}_queued_requests{MODEL})",
                },
            ),
            (
                "Errors",
                "reqps",
                {
                    "{{error_type}}": _rate(
                        f"{FRONT}_requests_total", "error_type", '{model=~"$model", status="error"}'
                    ),
                },
            ),
            ("Refused for load", "reqps", {"{{model}}": _rate(f"{FRONT}_model_rejection_total", "model")}),
            (
                "Moved to another worker",
                "reqps",
                {"{{model}} {{migration_type}}": _rate(f"{FRONT}_model_migration_total", "model, migration_type")},
            ),
            ("Models that can be asked", "short", {"{{model}}": f"max by (model) ({FRONT}_model_ready{MODEL})"}),
            (
                "Stages of a request",
                "s",
                {
                    "{{stage}} p99": f"histogram_quantile(0.99, sum by (le, stage) "
                    f"(rate({FRONT}_stage_duration_seconds_bucket{_RATE})))"
                },
            ),
            ("Event loop delay", "s", _quantiles(f"{FRONT}_event_loop_delay_seconds", labels="")),
        ],
    ),
    "routing": (
        "Dynamo / Routing",
        [
            (
                "Prompt tokens from the cache",
                "percentunit",
                {
                    "{{model}}": f"sum by (model) (rate({FRONT}_cached_tokens_sum{MODEL}{_RATE})) / "
                    f"sum by (model) (rate({FRONT}_input_sequence_tokens_sum{MODEL}{_RATE}))"
                },
            ),
            (
                "Overlap of the chosen worker",
                "percentunit",
                _quantiles("dynamo_component_router_kv_hit_rate", labels=""),
            ),
            (
                "Requests by worker",
                "reqps",
                {"{{worker_id}}": _rate("dynamo_component_router_requests_total", "worker_id", "")},
            ),
            (
                "Balance: the busiest worker, times the mean",
                "short",
                {
                    "busiest": f"max(sum by (worker_id) (rate(dynamo_component_router_requests_total{_RATE}))) / "
                    f"avg(sum by (worker_id) (rate(dynamo_component_router_requests_total{_RATE})))"
                },
            ),
            (
                "Choices against the longest overlap",
                "reqps",
                {
                    "{{worker_type}}": _rate(
                        "dynamo_component_router_non_max_overlap_selections_total", "worker_type", ""
                    )
                },
            ),
            ("Blocks in the index", "short", {"{{model}}": f"sum by (model) (dynamo_router_kv_index_blocks{MODEL})"}),
            (
                "KV events",
                "short",
                {
                    "{{event_type}} {{status}}": _rate(
                        "dynamo_component_kv_cache_events_applied", "event_type, status", ""
                    )
                },
            ),
            ("Ranks without events", "short", {"{{model}}": f"sum by (model) (dynamo_router_kv_events_silent{MODEL})"}),
            (
                "Requests held by the router",
                "short",
                {
                    "{{model}} {{worker_type}}": f"sum by (model, worker_type) "
                    f"({FRONT}_router_queue_pending_requests{MODEL})"
                },
            ),
            ("Time of a choice, ms", "ms", _quantiles("dynamo_router_overhead_total_ms", labels="")),
        ],
    ),
    "workers": (
        "Dynamo / Workers",
        [
            (
                "KV use",
                "percentunit",
                {
                    "{{worker_id}}/{{dp_rank}}": f"max by (worker_id, dp_rank) ({FRONT}_worker_active_decode_blocks) / "
                    f"max by (worker_id, dp_rank) ({FRONT}_worker_kv_blocks_total)"
                },
            ),
            (
                "Prompt tokens to compute",
                "short",
                {"{{worker_id}}/{{dp_rank}}": f"max by (worker_id, dp_rank) ({FRONT}_worker_active_prefill_tokens)"},
            ),
            (
                "Workers over their thresholds",
                "short",
                {"{{worker_type}}": f"sum by (worker_type) ({FRONT}_worker_busy)"},
            ),
            ("Workers by state", "short", {"{{state}}": f"count by (state) ({FRONT}_worker_state == 1)"}),
            ("Requests in engines", "short", {"{{worker}}": "sum by (worker) (dynamo_engine_request)"}),
            ("Requests before engines", "short", {"{{worker}}": "sum by (worker) (dynamo_request_queue)"}),
            ("Requests", "reqps", {"{{worker}}": _rate("dynamo_component_requests_total", "worker", "")}),
            (
                "Last time to first token",
                "s",
                {"{{worker_id}}": f"max by (worker_id) ({FRONT}_worker_last_time_to_first_token_seconds)"},
            ),
            (
                "Last time between tokens",
                "s",
                {"{{worker_id}}": f"max by (worker_id) ({FRONT}_worker_last_inter_token_latency_seconds)"},
            ),
            ("Time to load a model", "s", {"{{worker}}": "max by (worker) (dynamo_component_model_load_time_seconds)"}),
        ],
    ),
    "tenants": (
        "Dynamo / Tenants",
        [
            (
                "Requests",
                "reqps",
                {"{{tenant}} {{outcome}}": _rate(f"{FRONT}_tenant_requests_total", "tenant, outcome", "")},
            ),
            (
                "Tokens",
                "short",
                {"{{tenant}} {{kind}}": _rate(f"{FRONT}_tenant_tokens_total", "tenant, kind", "")},
            ),
            (
                "Requests that run (fair-queue)",
                "short",
                {"{{tenant}}": f"sum by (tenant) (dynamo_admission_running_requests{MODEL})"},
            ),
        ],
    ),
}


def dashboard(name: str) -> dict[str, Any]:
    """Return one dashboard, as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${datasource}"}
    model = {"query": f"label_values({FRONT}_model_ready, model)", "refId": "model"}
    return {
        "uid": f"dynamo-{name}",
        "title": title,
        "tags": ["dynamo"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "model",
                    "type": "query",
                    "label": "Model",
                    "datasource": source,
                    "query": model,
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel, source: dict[str, str]) -> dict[str, Any]:
    title, unit, queries = panel
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "table", "placement": "right", "calcs": ["lastNotNull", "max"]}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": source}
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def text(name: str) -> str:
    """Return the file of a dashboard."""
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (Path(__file__).parent / "grafana" / f"{each}.json").write_text(text(each))
