"""``dynamo check``: check everything that can be known before the start."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from dynamo_runtime.cli.options import config_options, flag_options, json_option, load
from dynamo_runtime.cli.table import format_table

if TYPE_CHECKING:
    from dynamo_core.plugins.loader import PluginLoader

    from dynamo_runtime.assembly.resolve import PickedPlugin, Resolved
    from dynamo_runtime.settings import Settings

BUILT_IN = "dynamo-core"
LOOPBACK = "loopback"
EXPOSED = "exposed to the network"


@click.command()
@config_options
@flag_options
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Load a config and its plugins without starting anything.

    Print what would run: each stage with its plugin, each listener with its reachability, the parsers of each worker's
    model with the reason for them, unless its engine gives text; the forms that its chat template reads; and what
    plugins remark on their settings. Exit code 2, with one line that says what is wrong, if the config could not be
    served.
    """
    from dynamo_core.plugins.loader import PluginLoader

    from dynamo_runtime.assembly.resolve import resolve

    loaded = load(**options)
    loader = PluginLoader(loaded.plugin_files)
    graph = describe(loaded.settings, resolve(loaded, loader), loader)
    click.echo(json.dumps(graph, indent=2) if as_json else _as_text(graph))


def describe(settings: Settings, resolved: Resolved, loader: PluginLoader) -> dict[str, list[dict[str, Any]]]:
    """Return what would run as plain data: `stages`, `listeners`, `parsers`, `templates`, and `remarks`."""
    parsers, templates = _models(settings, resolved, loader)
    return {
        "stages": list(_stages(settings, resolved, loader)),
        "listeners": list(_listeners(settings)),
        "parsers": parsers,
        "templates": templates,
        "remarks": list(_remarks(settings, resolved)),
    }


def exposure(host: str) -> str:
    """Return the reachability of a listener on this address. A name other than ``localhost`` counts as exposed."""
    try:
        inside = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        inside = host == "localhost"
    return LOOPBACK if inside else EXPOSED


def _stages(settings: Settings, resolved: Resolved, loader: PluginLoader) -> Iterator[dict[str, Any]]:
    from dynamo_runtime.assembly.api_set import apis_of
    from dynamo_runtime.assembly.resolve import FRONTEND_KIND

    if resolved.frontend is not None:
        yield _stage("frontend", resolved.frontend)
        for name in apis_of(resolved.frontend.cls)[1:]:
            offer = loader.find(FRONTEND_KIND, name)
            yield {"stage": "frontend", "plugin": name, "distribution": offer.distribution, "version": offer.version}
    if resolved.response_store is not None:
        yield _stage(resolved.response_store.section, resolved.response_store)
    yield from (_stage(admission.section, admission) for admission in resolved.admission)
    if not resolved.admission:
        yield {"stage": "admission", "plugin": "none", "distribution": BUILT_IN, "version": ""}
    if resolved.router is not None:
        yield from (_stage(router.section, router) for router in resolved.router.chain())
    yield _stage("transport", resolved.transport)
    yield _stage("events", resolved.events or resolved.transport)
    yield _stage("discovery", resolved.discovery)
    for name, engine in resolved.workers.items():
        worker = settings.workers[name]
        yield _stage(f"workers.{name}", engine) | {"model": worker.model.name, "replicas": worker.replicas}
    yield from (_stage(extension.plugin.section, extension.plugin) for extension in resolved.extensions)
    for name in settings.hooks:
        offer = loader.find("hook", name)
        yield {"stage": "hooks", "plugin": name, "distribution": offer.distribution, "version": offer.version}


def _stage(stage: str, picked: PickedPlugin[Any]) -> dict[str, Any]:
    return {
        "stage": stage,
        "plugin": picked.name,
        "distribution": picked.distribution,
        "version": picked.version,
    }


def _remarks(settings: Settings, resolved: Resolved) -> Iterator[dict[str, Any]]:
    from dynamo_core.certificates import expiry_remark

    from dynamo_runtime.assembly.resolve import RESPONSE_STORE, store_remark

    if remark := store_remark(resolved, settings.frontend.processes):
        yield {"section": RESPONSE_STORE, "remark": remark}
    for section, tls in (("frontend.tls", settings.frontend.tls), ("admin.tls", settings.admin.tls)):
        if remark := expiry_remark(tls):
            yield {"section": section, "remark": remark}
    for picked in resolved:
        yield from ({"section": picked.section, "remark": remark} for remark in picked.config.remarks())


def _listeners(settings: Settings) -> Iterator[dict[str, Any]]:
    for name, at in (("public", settings.frontend), ("admin", settings.admin)):
        if at.port is not None:
            yield {"listener": name, "host": at.host, "port": at.port, "exposure": exposure(at.host)}


def _models(settings: Settings, resolved: Resolved, loader: PluginLoader) -> tuple[list[dict[str, Any]], ...]:
    """Return the parsers of each worker's model, and the forms that its chat template reads."""
    from dynamo_runtime.assembly.automatic_parsers import find_candidates
    from dynamo_runtime.assembly.worker_process import worker_config
    from dynamo_runtime.worker.model_files import read_files
    from dynamo_runtime.worker.parser_choice import REASONING_KEY, TOOL_KEY, choose_parsers

    parsers, templates = [], []
    candidates = find_candidates(settings, loader)
    for name, worker in settings.workers.items():
        config = worker_config(settings.namespace, name, worker, 0)
        files = read_files(config)
        choice = choose_parsers(config, files, candidates)
        parsers += [
            {"worker": name, "setting": key, "parser": chosen.name, "reason": chosen.reason}
            for key, chosen in ((TOOL_KEY, choice.tools), (REASONING_KEY, choice.reasoning))
        ]
        forms = resolved.frontend.cls.describe_template(files) if resolved.frontend else {}
        templates += [{"worker": name, "messages": part, "form": form} for part, form in forms.items()]
    return parsers, templates


def _as_text(graph: dict[str, list[dict[str, Any]]]) -> str:
    stages = [
        [
            *(row[key] for key in ("stage", "plugin", "distribution", "version")),
            " x ".join(str(row[key]) for key in ("replicas", "model") if key in row),
        ]
        for row in graph["stages"]
    ]
    listeners = [
        [row["listener"], row["host"], str(row["port"] or "any free"), row["exposure"]] for row in graph["listeners"]
    ]
    parsers = [[row["worker"], row["setting"], row["parser"] or "none", row["reason"]] for row in graph["parsers"]]
    return "\n\n".join(
        [
            format_table(["STAGE", "PLUGIN", "DISTRIBUTION", "VERSION", ""], stages),
            format_table(["LISTENER", "HOST", "PORT", "REACHED FROM"], listeners),
            *([format_table(["WORKER", "SETTING", "PARSER", "BECAUSE"], parsers)] if parsers else []),
            *(
                [format_table(["WORKER", "IN PROMPTS", "FORM"], [list(row.values()) for row in graph["templates"]])]
                if graph["templates"]
                else []
            ),
            *(f"{row['section']}: {row['remark']}." for row in graph["remarks"]),
            "The config is sound, but see above." if graph["remarks"] else "The config is sound.",
        ]
    )
